"""Saving and loading by real processes: any number to any other, failures on one rank, and deaths at every point."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint import folder, writer
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.store import find_latest, retain, step_directory
from shardwise.checkpoint.writer import write
from shardwise.comm.axes import open_comms
from shardwise.spec.errors import CheckpointError, CommError, StorageError
from shardwise.spec.extent import Extent
from shardwise.testing import RankFailure, run_on_ranks
from tests.common.own import own
from tests.common.ranks import refusal

NUMEL = 1_000_003


def pieces(comm, step):
    """This rank's part of one odd-sized tensor, every element of which is known."""
    start, stop = NUMEL * comm.rank // comm.size, NUMEL * (comm.rank + 1) // comm.size
    return [(Extent("weight", (NUMEL,), "fp32", start, stop), torch.arange(start, stop).float() + step)]


def save(root, step):
    comm, _ = open_comms(torch.device("cpu"))
    write(step_directory(root, step), comm, pieces(comm, step), {"a": 1}, step=step, run_id="run")


def load(root, step):
    comm, _ = open_comms(torch.device("cpu"))
    (extent, expected), *_ = pieces(comm, step)
    target = torch.zeros(extent.numel)
    open_checkpoint(step_directory(root, step), comm=comm).read_into([(extent, target)], comm=comm)
    assert torch.equal(target, expected)
    return target.nbytes


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 2), (3, 2)])
def test_processes_load_what_another_number_of_processes_saved(tmp_path, saved_by, loaded_by):
    run_on_ranks(save, saved_by, tmp_path, 5)
    assert sum(run_on_ranks(load, loaded_by, tmp_path, 5)) == 4 * NUMEL


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def die_half_way(file, content):
    os.write(file, content[: len(content) // 2])
    die()


def rename_and_die(self, target):
    os.rename(self, target)  # noqa: PTH104 - Path.rename is what is replaced here
    die()


def second(name):
    """Of ``writer``'s function ``name``: as it is at the first call, death at the second."""
    calls, original = [], getattr(writer, name)

    def instead(*args):
        calls.append(name)
        return original(*args) if len(calls) == 1 else die()

    return instead


#: What a rank executes instead of a step of the save, so that it dies there.
DEATHS = {
    "before its file": (writer, "write_shard", die, (0, 1)),
    "in its file": (folder, "write_all", die_half_way, (0, 1)),
    "after its file": (writer, "gather_json", second("gather_json"), (0, 1)),
    "after its report": (writer, "broadcast_json", second("broadcast_json"), (0, 1)),
    "before the manifest": (folder, "write_file", die, (0,)),
    "before the rename": (writer.Path, "rename", die, (0,)),
    "after the rename": (writer.Path, "rename", rename_and_die, (0,)),
}


def save_and_die(root, step, point, rank):
    owner, name, instead, _ = DEATHS[point]
    if os.environ["RANK"] == str(rank):
        setattr(owner, name, instead)
    try:
        save(root, step)
    except CommError:
        return "a peer is gone"
    return "saved"


@pytest.mark.cases(5)
@pytest.mark.parametrize(("point", "rank"), [(point, rank) for point, death in DEATHS.items() for rank in death[3]])
def test_death_at_any_point_leaves_this_checkpoint_or_the_one_before_whole(tmp_path, point, rank):
    run_on_ranks(save, 2, tmp_path, 10)
    with pytest.raises(RankFailure):
        run_on_ranks(save_and_die, 2, tmp_path, 20, point, rank)
    found = find_latest(tmp_path, verify=True)
    assert found.rejected == ()
    possible = {("after the rename", 0): [20], ("after its report", 0): [20], ("after its report", 1): [10, 20]}
    assert found.step in possible.get((point, rank), [10])
    assert len(found.unfinished) == (found.step == 10)
    run_on_ranks(load, 2, tmp_path, found.step)
    if found.step == 10:  # the same step can be saved again, and what was left behind goes
        run_on_ranks(save, 2, tmp_path, 20)
        retain(tmp_path, 3)
        assert sorted(path.name for path in Path(tmp_path / "checkpoints").iterdir()) == [
            "step-00000010",
            "step-00000020",
        ]
        run_on_ranks(load, 2, tmp_path, 20)


def save_often(folder):
    """Save five steps and keep two; what an interrupted save has left goes as well."""
    torch.manual_seed(0)
    model = sw.parallelize(torch.nn.Linear(8, 8))
    found = []
    for step in range(1, 6):
        if sw.data_parallel_rank(model) == 0 and step == 4:
            (folder / "step-00000003.tmp-0123456789abcdef").mkdir()
        if sw.data_parallel_rank(model) == 0 and step == 5:
            (folder / "notes").mkdir()
        with torch.no_grad():
            model.weight.fill_(step)
        path = sw.save(folder / f"step-{step:08d}", model, keep=2)
        found.append(sorted(each.name for each in folder.iterdir()))
        if sw.data_parallel_rank(model) == 0:
            assert sw.newest_checkpoint(folder) == path
    assert sw.load(sw.newest_checkpoint(folder), model) == {}
    assert set(own(model.weight).flatten().tolist()) <= {5.0}
    errors = []
    for path, keep in ((folder / "other", 2), (folder / "step-00000006", 0), ("s3://bucket/step-00000006", 2)):
        try:
            sw.save(path, model, keep=keep)
        except CheckpointError as error:
            errors.append(str(error))
    return found, errors


def test_save_keeps_as_many_as_it_is_told_and_the_newest_is_found(tmp_path):
    assert sw.newest_checkpoint(tmp_path) is None
    results = run_on_ranks(save_often, 2, tmp_path)
    for found, errors in results[:1]:  # what rank 0, which makes the folders, has seen
        steps = [[int(name[5:]) for name in names if name.startswith("step-") and "tmp" not in name] for names in found]
        assert steps == [[1], [1, 2], [2, 3], [3, 4], [4, 5]]
        assert not any("tmp" in name or "trash" in name for names in found for name in names)
        assert "notes" in found[-1]
        assert all("expected a folder named by its step, and at least 1 to keep" in error for error in errors[:2])
        assert errors[2].startswith("sw.save(s3://bucket/step-00000006): expected a folder.\n  Save to one and copy it")
        assert len(errors) == 3
    (shard,) = (tmp_path / "step-00000005").glob("*r00000*")
    shard.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"the newest checkpoint of .* cannot be used"):
        sw.newest_checkpoint(tmp_path)
    assert sw.newest_checkpoint(tmp_path, allow_older=True) == tmp_path / "step-00000004"


def on_a_disk_of_its_own(path):
    model = sw.parallelize(torch.nn.Linear(4, 4), sw.ParallelPlan(strategy="zero3"))
    path = Path(path, f"disk-{torch.distributed.get_rank()}", "checkpoint")
    path.parent.mkdir()
    return refusal(StorageError, sw.save, path, model)


def test_a_rank_that_does_not_see_the_folder_of_rank_0_says_so(tmp_path):
    for text in run_on_ranks(on_a_disk_of_its_own, 2, str(tmp_path)):
        assert "rank 1: this rank does not find the folder that rank 0 has made" in text
        assert "file system that all machines share" in text
    assert not list(tmp_path.glob("*/*"))
