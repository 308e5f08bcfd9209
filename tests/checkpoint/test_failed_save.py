"""A save that fails on one rank fails on all of them, with one text, and leaves nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint import shard, writer
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.writer import write
from shardwise.spec.errors import CheckpointError, NonFiniteError, StorageError
from shardwise.spec.extent import Extent
from tests.checkpoint.threads import alone, cut, even, run_in_threads, sample


def fail_on_all(tmp_path, body, size=3):
    """Run a save that must fail: the one error of all ranks."""
    before = sorted(tmp_path.rglob("*"))
    outcome = run_in_threads(body, size)
    assert len({(type(error), str(error)) for error in outcome}) == 1, outcome
    assert sorted(tmp_path.rglob("*")) == before
    return outcome[0]


def saver(path, tensors=None, **changes):
    tensors = tensors or sample()
    given = {"step": 20, "run_id": "run", **changes}

    def body(comm):
        mine = {key: value(comm.rank) if callable(value) else value for key, value in given.items()}
        pieces = mine.pop("pieces", cut(tensors, even(tensors, comm.size), comm.rank))
        write(path, comm, pieces, mine.pop("data", {}), **mine)

    return body


def test_a_full_disk_on_one_rank_stops_all_ranks(tmp_path, monkeypatch):
    real = folders.write_all

    def write_all(file, content):
        if "-r00001" in Path(f"/proc/self/fd/{file}").readlink().name:
            raise OSError(28, "No space left on device")
        real(file, content)

    monkeypatch.setattr(folders, "write_all", write_all)
    error = fail_on_all(tmp_path, saver(tmp_path / "step-00000020"))
    assert isinstance(error, StorageError)
    assert isinstance(error, OSError)
    assert error.exit_code == 74
    lines = str(error).splitlines()
    assert lines[0].startswith(f"step 20 was not saved to {tmp_path}/step-00000020: rank 1: No space left on device (")
    assert "-r00001.safetensors" in lines[0]
    assert (
        lines[1] == "  Nothing was published; earlier checkpoints are as they were. Remove the cause, then save again."
    )


def test_too_little_free_space_is_noticed_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 300}))
    error = fail_on_all(tmp_path, saver(tmp_path / "s"))
    assert isinstance(error, StorageError)
    assert "no space left on device: " in str(error)
    assert "300 B free" in str(error)


def test_an_unexpected_error_on_one_rank_is_told_to_all(tmp_path, monkeypatch):
    real = shard.byte_view

    def byte_view(tensor):
        if tensor.dtype == torch.bfloat16 and tensor.numel() == 4:  # the third rank's part of 11 elements
            raise MemoryError("out of memory")
        return real(tensor)

    monkeypatch.setattr(shard, "byte_view", byte_view)
    error = fail_on_all(tmp_path, saver(tmp_path / "s"))
    assert type(error) is CheckpointError
    assert "out of memory" in str(error)


def test_an_interrupted_rank_is_interrupted_and_the_others_learn_of_it(tmp_path, monkeypatch):
    real = folders.write_all

    def write_all(file, content):
        if "-r00002" in Path(f"/proc/self/fd/{file}").readlink().name:
            raise KeyboardInterrupt
        real(file, content)

    monkeypatch.setattr(folders, "write_all", write_all)
    outcome = run_in_threads(saver(tmp_path / "s"), 3)
    assert isinstance(outcome[2], KeyboardInterrupt)
    assert all("rank 2: interrupted by KeyboardInterrupt" in str(error) for error in outcome[:2])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["rename", "sync_folder"])
def test_a_failure_to_publish_publishes_nothing(tmp_path, monkeypatch, where):
    def fail(*args, **kwargs):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(writer.folders, "sync_folder", fail)
    if where == "rename":
        monkeypatch.setattr(writer.Path, "rename", fail)
    error = fail_on_all(tmp_path, saver(tmp_path / "s"))
    assert isinstance(error, StorageError)
    assert "rank 0: Input/output error" in str(error)


def test_a_folder_is_never_used_twice(tmp_path):
    path = tmp_path / "s"
    run_in_threads(saver(path), 2)
    manifest = (path / "manifest.json").read_bytes()
    error = fail_on_all(tmp_path, saver(path), 2)
    assert "exists, and a checkpoint never goes into a folder that exists" in str(error)
    assert (path / "manifest.json").read_bytes() == manifest
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "exists" in str(fail_on_all(tmp_path, saver(tmp_path / "link"), 2))


def test_a_folder_that_cannot_be_made_is_an_error_of_the_disk(tmp_path):
    (tmp_path / "file").write_text("")
    error = fail_on_all(tmp_path, saver(tmp_path / "file" / "s"))
    assert isinstance(error, StorageError)
    assert "rank 0: File exists" in str(error)


def test_elements_that_no_rank_or_two_ranks_hold_are_named(tmp_path):
    tensors = {"gap": torch.zeros(9), "twice": torch.zeros(9)}

    def pieces(rank):
        gap, twice = [(0, 3), (4, 6), (6, 8)][rank], [(0, 3), (2, 6), (6, 9)][rank]
        return [
            (Extent(name, (9,), "fp32", *span), torch.zeros(span[1] - span[0]))
            for name, span in (("gap", gap), ("twice", twice))
        ]

    error = fail_on_all(tmp_path, saver(tmp_path / "s", tensors, pieces=pieces))
    assert type(error) is CheckpointError
    assert str(error).splitlines()[1:] == [
        "  - gap: no rank holds elements 3 to 4",
        "  - gap: no rank holds elements 8 to 9",
        "  - twice: elements 2 to 3 are held by rank 0 and by rank 1",
    ]


def test_ranks_that_disagree_are_told_in_what(tmp_path):
    def pieces(rank):
        shape = (2, 2) if rank else (4,)
        return [(Extent("a", shape, "fp32", 2 * rank, 2 * rank + 2), torch.zeros(2))]

    changes = {"step": lambda rank: 20 + rank, "data": lambda rank: {"lr": rank}, "pieces": pieces}
    outcome = run_in_threads(saver(tmp_path / "s", **changes), 2)
    lines = [str(error).splitlines()[1:] for error in outcome]
    assert (
        lines[0]
        == lines[1]
        == [
            "  - step is 21 on rank 1 and 20 on rank 0",
            "  - data differs between rank 1 and rank 0; what is a rank's own belongs in rank_state",
            "  - a: rank 1 has (2, 2) fp32, rank 0 has (4,) fp32",
            "  - a: no rank holds elements 2 to 4",
        ]
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("extent", "tensor", "message"),
    [
        (Extent("a", (4,), "fp32", 0, 4), torch.zeros(2, 2), r"a: the tensor has shape \(2, 2\) and dtype fp32, exp"),
        (Extent("a", (4,), "fp32", 0, 4), torch.zeros(4).half(), r"dtype fp16, expected \(4,\) and fp32"),
        (
            Extent("a", (4,), "fp32", 2, 6),
            torch.zeros(4),
            r"elements 2 to 6 are not a range of a tensor of shape \(4,\)",
        ),
        (Extent("", (4,), "fp32", 0, 4), torch.zeros(4), "'' is not a name for a tensor"),
        (Extent("a\nb", (4,), "fp32", 0, 4), torch.zeros(4), "is not a name for a tensor"),
        (Extent("a", (4,), "float33", 0, 4), torch.zeros(4), "dtype 'float33' is unknown"),
    ],
)
def test_a_piece_that_is_not_what_its_extent_says_is_refused(tmp_path, extent, tensor, message):
    with pytest.raises(CheckpointError, match=message):
        write(tmp_path / "s", alone(), [(extent, tensor)], {}, step=0, run_id="r")
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_crashed_save_are_no_obstacle(tmp_path):
    (tmp_path / "step-00000020.tmp-0123456789abcdef").mkdir()
    run_in_threads(saver(tmp_path / "step-00000020"), 2)
    assert open_checkpoint(tmp_path / "step-00000020").step == 20


def test_saving_takes_no_second_copy_in_memory(tmp_path):
    big = torch.zeros(40 * 2**20)  # 160 MB; chunks are 8 MB

    def resident():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = resident()
    start = time.perf_counter()
    write(tmp_path / "s", alone(), [(Extent("a", (big.numel(),), "fp32", 0, big.numel()), big)], {}, step=0, run_id="r")
    assert resident() - before < 40 * 2**20
    assert time.perf_counter() - start < 60


@pytest.mark.parametrize(("name", "dtype"), [("w", torch.float32), ("optimizer/w/exp_avg", torch.bfloat16)])
def test_nan_and_infinity_are_refused_and_named_unless_asked_for(tmp_path, name, dtype):
    tensors = {name: torch.ones(6, dtype=dtype), "buffer/mask": torch.tensor([0.0, -torch.inf])}
    path = tmp_path / "step-00000020"
    for value in (torch.nan, -torch.inf):
        tensors[name][5] = value  # of the last rank
        error = fail_on_all(tmp_path, saver(path, tensors))
        assert isinstance(error, NonFiniteError)
        assert error.exit_code == 80
        assert f"\n  - rank 2: {name}\n" in str(error)
    run_in_threads(saver(path, tensors, allow_non_finite=True), 3)
    open_checkpoint(path).verify()
