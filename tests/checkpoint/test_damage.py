"""Every damaged or hostile checkpoint is refused with the file named; nothing is loaded from it and nothing runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint import manifest as manifests
from shardwise.checkpoint.dcp_import import import_dcp
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.writer import write
from shardwise.spec.errors import CheckpointError
from shardwise.train import folder as rundir
from shardwise.train.load import find_model
from tests.checkpoint.threads import cut, even, flip, run_in_threads, sample, whole
from tests.common.ranks import refusal


@pytest.fixture
def saved(tmp_path):
    """A checkpoint that three ranks wrote."""
    return save(tmp_path / "step-00000020")


def save(path, step=20, seed=0):
    tensors = sample(seed)
    run_in_threads(
        lambda comm: write(
            path, comm, cut(tensors, even(tensors, 3), comm.rank), {"lr": 0.1, "pos": 7}, step=step, run_id="run"
        ),
        3,
    )
    return path


def shards(path):
    return sorted(path.glob("*.safetensors"))


def load_all(path, **kwargs):
    pairs = [(whole(name, t), torch.full((t.numel(),), 1).to(t.dtype)) for name, t in sample().items()]
    try:
        open_checkpoint(path).read_into(pairs, **kwargs)
    finally:
        load_all.touched = any(bool((t.float() != 1).any()) for _, t in pairs)
    return pairs


def refused(path, **kwargs):
    """The error of loading; nothing was copied, and verifying finds the same."""
    with pytest.raises(CheckpointError) as caught:
        load_all(path, **kwargs)
    assert not load_all.touched
    assert caught.value.exit_code == 65
    if not kwargs:
        with pytest.raises(CheckpointError) as verified:
            open_checkpoint(path).verify()
        assert str(verified.value) == str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("position", range(3))
def test_a_flipped_bit_is_found(saved, position):
    file = shards(saved)[position]
    flip(file)
    message = refused(saved)
    assert (
        f"checkpoint {saved} (step 20) is damaged:\n  - {file.name} (rank {position} wrote it): its content" in message
    )
    assert re.search("has the hash [0-9a-f]{32}, expected [0-9a-f]{32}", message)
    assert message.endswith("\n  Nothing was loaded from it. Resume from another checkpoint.")


def test_verification_can_be_left_out_only_on_purpose(saved):
    flip(shards(saved)[0])
    load_all(saved, verify=False)


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("left", [0, 5, 100, -1])
def test_a_truncated_shard_is_found(saved, position, left):
    file = shards(saved)[position]
    size = file.stat().st_size
    os.truncate(file, left % size)
    message = refused(saved)
    assert f"{file.name} (rank {position} wrote it): the file has {left % size} bytes, expected {size}" in message
    assert refused(saved, verify=False)


def test_bytes_after_the_end_are_found(saved):
    with shards(saved)[1].open("ab") as file:
        file.write(b"\0")
    assert "bytes, expected" in refused(saved, verify=False)


@pytest.mark.parametrize("position", range(3))
def test_a_missing_shard_is_found(saved, position):
    file = shards(saved)[position]
    file.unlink()
    assert f"{file.name} (rank {position} wrote it): the file is missing" in refused(saved)


def test_every_damaged_file_is_reported_at_once(saved):
    first, second, third = shards(saved)
    first.unlink()
    os.truncate(second, 3)
    third.write_bytes(third.read_bytes()[::-1])
    message = refused(saved)
    assert [name for name in (first.name, second.name, third.name) if name in message] == [
        first.name,
        second.name,
        third.name,
    ]


def test_a_shard_of_another_step_is_told_apart(saved, tmp_path):
    other = save(tmp_path / "step-00000010", step=10)
    shutil.copyfile(shards(other)[1], shards(saved)[1])
    save_id = open_checkpoint(other).manifest.save_id
    assert f"it is a shard of another save: save {save_id}, step 10, rank 1" in refused(saved)
    assert refused(saved, verify=False)


def test_shards_of_one_save_cannot_be_exchanged(saved):
    first, second, _ = shards(saved)
    first.rename(saved / "x")
    second.rename(first)
    (saved / "x").rename(second)
    assert re.search("bytes, expected|it is a shard of another save", refused(saved))


@pytest.mark.parametrize("swap", ["symlink", "hardlink", "fifo", "folder", "device"])
def test_only_plain_files_with_one_link_are_opened(saved, tmp_path, swap):
    file = shards(saved)[1]
    real = tmp_path / "elsewhere"
    if swap == "hardlink":
        os.link(file, real)
        expected = "it has 2 hard links, expected one"
    else:
        file.rename(real)
        expected = "it is a symbolic link" if swap in {"symlink", "device"} else "it is not a regular file"
        {
            "symlink": lambda: file.symlink_to(real),
            "fifo": lambda: os.mkfifo(file),
            "folder": file.mkdir,
            "device": lambda: file.symlink_to("/dev/zero"),
        }[swap]()
    begin = time.monotonic()
    assert f"{file.name} (rank 1 wrote it): {expected}" in refused(saved)
    assert time.monotonic() - begin < 1


@pytest.mark.parametrize("swap", ["symlink", "hardlink", "fifo"])
def test_the_manifest_too_must_be_a_plain_file(saved, tmp_path, swap):
    file = saved / "manifest.json"
    real = tmp_path / "elsewhere"
    if swap == "hardlink":
        os.link(file, real)
    else:
        file.rename(real)
        file.symlink_to(real) if swap == "symlink" else os.mkfifo(file)
    with pytest.raises(CheckpointError, match=r"manifest.json: it (is|has)"):
        open_checkpoint(saved)


def rewrite(path: Path, change: Any, *, checksum: bool = True) -> None:
    """Change the manifest as someone would who can compute checksums."""
    file = path / "manifest.json"
    content = json.loads(file.read_bytes())
    before = content["checksum"]
    content = change(content) or content
    raw = manifests.with_checksum(content)
    file.write_bytes(raw if checksum else b'{"checksum":"%s"' % before.encode() + raw[len(b'{"checksum":""') + 64 :])


def manifest_error(path):
    begin = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert time.monotonic() - begin < 1
    assert len(str(caught.value)) < 3000
    assert str(caught.value).startswith(f"checkpoint {path}")
    return str(caught.value)


def set_in(*keys, value):
    def change(content):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


#: Of the tensors in ``sample``.
SCALE, WEIGHT = 2, 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_in("format", value="x"), "'format' is not 'shardwise-checkpoint'"),
        (set_in("format_version", value=6), "format version 6, expected 5: another version of shardwise wrote it, and"),
        (set_in("format_version", value=4), "format version 4, expected 5: .*\n  Resume from another checkpoint"),
        (set_in("format_version", value=True), "it has format version True, expected 5"),
        (set_in("step", value=True), "step: Input should be a valid integer"),
        (set_in("step", value=-1), "step: Input should be greater than or equal to 0"),
        (set_in("step", value="20"), "step: Input should be a valid integer"),
        (set_in("step", value=20.0), "step: Input should be a valid integer"),
        (set_in("run_id", value="a\x1b[31m"), "is not a name for a run"),
        (set_in("data", value={"x": {"__bytes__": "***"}}), "an object with the key '__bytes__' is malformed"),
        (lambda content: {"content": []}, "is not a manifest"),
        (set_in("save_id", value="../../../../xx"), "save_id: String should match pattern"),
        (set_in("world_size", value=2), "it lists 3 files for 2 ranks"),
        (set_in("world_size", value=10**8), "it lists 3 files for 100000000 ranks"),
        (set_in("surprise", value=5), "surprise: Extra inputs are not permitted"),
        (set_in("rank_data", value=None), "rank_data: Extra inputs are not permitted"),
        (set_in("files", "name", value=["../x"] * 3), "files.name: Extra inputs are not permitted"),
        (set_in("files", "bytes", value=[1, 2]), "it lists 3 hashes and 2 sizes of files"),
        (set_in("files", "hash", 1, value="../../etc/passwd"), "files.hash.1: String should match pattern"),
        (set_in("frozen", value={"bytes": [], "hash": []}), "it lists 0 files of frozen parameters for 3 ranks"),
        (set_in("tensors", "frozen", value=[SCALE]), "scale: it is frozen, but there are no files of frozen"),
        (set_in("tensors", "frozen", value=[1, 1]), "the numbers of its frozen tensors are not ascending, or beyond 7"),
        (set_in("tensors", "frozen", value=[8]), "the numbers of its frozen tensors are not ascending, or beyond 7"),
        (set_in("tensors", "name", SCALE, value="layer.bias"), "layer.bias: it is listed twice"),
        (set_in("tensors", "name", SCALE, value="a\nb"), "is not a name for a tensor"),
        (set_in("tensors", "name", SCALE, value=""), "tensors.name.2: String should have at least 1 character"),
        (set_in("tensors", "name", value=["a"]), "its columns of tensors have other lengths than the 1 names"),
        (set_in("tensors", "dtype", SCALE, value="float33"), "scale: dtype 'float33' is unknown"),
        (
            set_in("tensors", "shape", SCALE, value=[-1]),
            "tensors.shape.2.0: Input should be greater than or equal to 0",
        ),
        (set_in("tensors", "shape", SCALE, value=[True]), "tensors.shape.2.0: Input should be a valid integer"),
        (set_in("tensors", "shape", SCALE, value=[2**59] * 60), "scale: shape .* is too large"),
        (set_in("tensors", "shape", SCALE, value=[1] * 65), "tensors.shape.2: List should have at most 64"),
        (set_in("tensors", "shape", SCALE, value=[2]), "scale: no rank holds elements 1 to 2"),
        (set_in("tensors", "shape", WEIGHT, value=[6, 5]), "layer.weight: element 34 is outside of its 30"),
        (set_in("tensors", "stride", value=[[1]] + 7 * [None]), "layer.weight: stride .1,. does not belong to shape"),
        (set_in("tensors", "partition", SCALE, value=99), "a tensor has a partition beyond 5"),
        (set_in("tensors", "partition", value=[]), "its columns of tensors have other lengths than the 8 names"),
        (set_in("partitions", "length", 0, value=10), "layer.weight: no rank holds elements 34 to 35"),
        (set_in("partitions", "length", 0, value=12), "layer.weight: element 35 is outside of its 35"),
        (set_in("partitions", "length", 0, value=0), "layer.weight: a piece is empty"),
        (set_in("partitions", "length", 0, value=2**60), "length.0: Input should be less than"),
        (set_in("partitions", "length", value=[2**59] * 13), "its pieces have too many elements|is outside of its"),
        (set_in("partitions", "length", value=[1]), "its columns of partitions have other lengths than the 13 ranks"),
        (set_in("partitions", "rank", 0, value=3), "layer.weight: a piece belongs to a rank beyond 2"),
        (set_in("partitions", "rank", 0, value=-1), "partitions.rank.0: Input should be greater"),
        (
            set_in("partitions", "num_rows", 0, value=2),
            "its columns of partitions have other lengths than the 13 ranks",
        ),
        (set_in("partitions", "num_rows", value=[13]), "its partitions have another number of slices than 1"),
        (set_in("partitions", "runs", value=[[0, 3, 1]]), "layer.weight: (element|no rank)"),
        (set_in("partitions", "runs", value=[[0, 4, 1]]), "layer.weight: a piece belongs to a rank beyond 2"),
        (set_in("partitions", "runs", value=[[0, 10**17, 10**17]]), "layer.weight: a piece belongs to a rank beyond 2"),
        (set_in("partitions", "runs", value=[[0, 2, 0]]), "layer.weight: a piece belongs to a rank beyond 2"),
        (set_in("partitions", "runs", value=[[0, 1, 1]]), "a run has fewer than two pieces"),
        (set_in("partitions", "runs", value=[[13, 2, 1]]), "the numbers of its runs are not ascending, or beyond 12"),
        (set_in("partitions", "runs", value=[[0, 2]]), "partitions.runs.0: List should have at least 3"),
        (set_in("partitions", "slices", 0, value=[[[0, 1]]]), "a cut is not a dimension with ranges"),
        (set_in("partitions", "slices", 0, value=[[[2, 0, 1]]]), "layer.weight: a cut of dimension 2 does not belong"),
        (set_in("partitions", "slices", 0, value=[[]]), "layer.weight: a slice is listed twice, or is none"),
        (set_in("partitions", "slices", 0, value=[[[0, 0, 6]]]), r"layer.weight.0:6 of 7, :.: element 34 is outside"),
    ],
)
def test_columns_that_make_no_sense_are_refused(saved, change, message):
    rewrite(saved, change)
    assert re.search(message, manifest_error(saved))


def test_lengths_whose_sum_wraps_around_are_refused(saved):
    """In 64 bits 32 pieces of 2**59 elements are none."""

    def change(content):
        partitions = content["partitions"]
        partitions["num_rows"][0] += 32
        partitions["rank"] = [0] * 32 + partitions["rank"]
        partitions["length"] = [2**59] * 32 + partitions["length"]

    rewrite(saved, change)
    assert "layer.weight: its pieces have too many elements" in manifest_error(saved)


def test_a_class_that_the_state_names_is_not_looked_up(saved):
    rewrite(saved, set_in("data", value={"x": {"__class__": "os.system"}}))
    assert open_checkpoint(saved).data == {"x": {"__class__": "os.system"}}


def test_a_size_that_the_tensors_do_not_make_is_refused_before_anything_is_copied(saved):
    rewrite(saved, set_in("files", "bytes", 0, value=5))
    os.truncate(shards(saved)[0], 5)
    assert "is said to have 5 bytes, its tensors make" in refused(saved)
    assert "is said to have 5 bytes, its tensors make" in refused(saved, verify=False)


def test_a_changed_number_in_the_state_is_found(saved):
    rewrite(saved, set_in("data", "lr", value=0.3), checksum=False)
    assert "its checksum does not match its content: it was damaged or changed by hand" in manifest_error(saved)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "it is not a manifest"),
        (b'{"format":"shardwise-checkpoint","format":"shardwise-checkpoint"}', "the key 'format' occurs twice"),
        (b'{"a":{"b":1,"b":2}}', "the key 'b' occurs twice in one object"),
        (b'{"a":NaN}', "NaN is not JSON"),
        (b'{"a":1e999}', "the number 1e999 is out of range"),
        (b'{"a":' + b"9" * 5000 + b"}", "it is not a manifest"),
        (b"\xff\xfe", "it is not a manifest"),
        (b"[" * 100_000, "nested deeper than 64 levels"),
        (b"[" * 200 + b"]" * 200, "nested deeper than 64 levels"),
        (b'{"a":' * 500 + b"1" + b"}" * 500, "nested deeper than 64 levels"),
        (b"[" + b"0," * (6 * 10**6 + 1) + b"0]", "more than 6000000 times ','"),
        (b"[" + b"[]," * 1_500_000 + b"0]", r"more than 1500000 times '\["),
        (b"[" + b"{}," * 800_000 + b"0]", "more than 750000 times '{'"),
        (b"null", "'format' is not"),
    ],
)
def test_text_that_is_no_strict_json_is_refused(saved, raw, message):
    (saved / "manifest.json").write_bytes(raw)
    assert re.search(message, manifest_error(saved))


def test_a_manifest_of_any_shorter_length_is_refused(saved):
    raw = (saved / "manifest.json").read_bytes()
    for length in range(0, len(raw), 37):
        (saved / "manifest.json").write_bytes(raw[:length])
        manifest_error(saved)


def test_an_oversized_manifest_is_refused_before_it_is_read(saved):
    os.truncate(saved / "manifest.json", 2**40)
    assert "more than the 67108864 that are read" in manifest_error(saved)


def test_a_header_bomb_is_compared_not_parsed(saved):
    file = shards(saved)[0]
    content = bytearray(file.read_bytes())
    content[:8] = (2**63 - 1).to_bytes(8, "little")
    file.write_bytes(content)
    begin = time.monotonic()
    assert "its header is not the one that the manifest describes" in refused(saved)
    assert "its header is not the one" in refused(saved, verify=False)
    assert time.monotonic() - begin < 1


def test_a_pickle_in_any_file_is_never_run(saved, tmp_path):
    marker = tmp_path / "marker"
    payload = b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    for file in (saved / "manifest.json", *shards(saved)):
        original = file.read_bytes()
        file.write_bytes(payload + original[len(payload) :])
        with pytest.raises(CheckpointError):
            load_all(saved)
        file.write_bytes(original)
    assert not marker.exists()


def test_a_folder_without_a_manifest_was_never_committed(saved):
    (saved / "manifest.json").unlink()
    assert "was never committed: it has no manifest.json" in manifest_error(saved)
    assert manifest_error(saved).endswith(
        "  A save was interrupted there, or it is another kind of folder. Give the path of a checkpoint."
    )


def test_a_folder_of_another_kind_is_named_with_what_to_do(saved, tmp_path):
    """The folder above the checkpoints, one of torch.distributed.checkpoint, a file of torch.save."""
    (saved.parent / "step-00000003").mkdir()
    assert refusal(CheckpointError, open_checkpoint, saved.parent).endswith(
        f"\n  It holds checkpoints. Give the path of one, such as {saved}: sw.newest_checkpoint finds it."
    )
    folder = tmp_path / "of torch"
    folder.mkdir()
    (folder / ".metadata").touch()
    assert refusal(CheckpointError, open_checkpoint, folder).endswith(
        f"\n  It is one of torch.distributed.checkpoint. Run: shardwise checkpoint import '{folder}' OUT --trust"
    )
    for name in ("zero_to_fp32.py", "mp_rank_00_model_states.pt"):
        other = tmp_path / name
        other.mkdir()
        (other / name).touch()
        found = [refusal(CheckpointError, read, other) for read in (open_checkpoint, find_model)]
        found += [refusal(CheckpointError, import_dcp, other, tmp_path / "out")]
        found += [refusal(CheckpointError, rundir.choose, "x", tmp_path, is_resuming=True, resume=str(other))]
        assert all("\n  It is a checkpoint of DeepSpeed. Run `python zero_to_fp32.py " in text for text in found)
    torch.save({}, folder / "model.pt")
    assert refusal(CheckpointError, open_checkpoint, folder / "model.pt").endswith(
        "sw.load_full_state_dict(model, torch.load(path))."
    )


def test_a_path_that_is_not_there_suggests_what_is(saved):
    assert refusal(CheckpointError, open_checkpoint, saved.with_name("step-00000021")) == (
        f"there is no checkpoint {saved.with_name('step-00000021')}.\n  Near it there is step-00000020."
    )
    with pytest.raises(CheckpointError, match="There is no folder"):
        open_checkpoint(saved.parent / "no" / "such")
    with pytest.raises(CheckpointError, match="cannot be opened: Not a directory"):
        open_checkpoint(saved / "manifest.json")


def test_damage_that_one_rank_sees_stops_all_with_one_text(saved):
    os.truncate(shards(saved)[2], 10)
    tensors = sample()

    def body(comm):
        pairs = [(e, torch.zeros_like(t)) for e, t in cut(tensors, even(tensors, comm.size), comm.rank)]
        open_checkpoint(saved).read_into(pairs, comm=comm)

    outcome = run_in_threads(body, 3)
    assert all(isinstance(error, CheckpointError) for error in outcome)
    assert len({str(error) for error in outcome}) == 1


def test_a_file_is_read_once_for_verifying_until_it_changes(saved, monkeypatch):
    read = []
    real = folders.read_at
    monkeypatch.setattr(folders, "read_at", lambda f, v, o: read.append(len(v)) or real(f, v, o))
    found = open_checkpoint(saved)
    read.clear()
    found.verify()
    assert read
    read.clear()
    found.verify()
    assert not read
    flip(shards(saved)[0])
    with pytest.raises(CheckpointError, match="its content has the hash"):
        found.verify()


def test_a_rank_that_cannot_open_the_checkpoint_stops_all(saved, tmp_path):
    def body(comm):
        return open_checkpoint(saved if comm.rank != 1 else tmp_path / "nowhere", comm=comm)

    outcome = run_in_threads(body, 3)
    assert {str(error) for error in outcome} == {
        f"rank 1: there is no checkpoint {tmp_path / 'nowhere'}.\n  {tmp_path} holds step-00000020."
    }


def test_ranks_that_see_different_saves_are_stopped(saved, tmp_path):
    other = save(tmp_path / "other")
    outcome = run_in_threads(lambda comm: open_checkpoint((saved, other)[comm.rank], comm=comm), 2)
    assert all("is not the same on all ranks: they see the saves" in str(error) for error in outcome)
    assert [found.step for found in run_in_threads(lambda comm: open_checkpoint(saved, comm=comm), 2)] == [20, 20]
