"""Which checkpoint is the newest good one, and which may go."""

from __future__ import annotations

import os
import shutil

import pytest

from shardwise.checkpoint import store
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.store import find_latest, publish_latest, retain, step_directory
from shardwise.checkpoint.writer import write
from shardwise.spec.errors import CheckpointError
from tests.checkpoint.threads import alone, flip, sample, whole


def save(root, step, run_id="run"):
    path = step_directory(root, step)
    pieces = [(whole(name, tensor), tensor.reshape(-1)) for name, tensor in sample(step).items()]
    return write(path, alone(), pieces, {}, step=step, run_id=run_id)


def damage(path):
    flip(next(path.glob("*.safetensors")))


def truncate(path):
    os.truncate(next(path.glob("*.safetensors")), 9)


def names(root):
    return sorted(path.name for path in (root / "checkpoints").iterdir())


def test_latest_points_to_the_newest(tmp_path):
    for step in (10, 20):
        publish_latest(tmp_path, save(tmp_path, step))
    assert (tmp_path / "LATEST").read_text() == "checkpoints/step-00000020\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "checkpoints"]
    found = find_latest(tmp_path)
    assert (found.path, found.step) == (step_directory(tmp_path, 20), 20)
    assert found.require() == found.path


@pytest.mark.parametrize(
    "pointer",
    [None, b"", b"checkpoints/step-00000010\n", b"checkpoints/step-00000099\n", b"../../etc\n", b"\xff\0", "folder"],
)
def test_the_newest_is_found_whatever_latest_says(tmp_path, pointer):
    save(tmp_path, 10)
    save(tmp_path, 20)
    if pointer == "folder":
        (tmp_path / "LATEST").mkdir()
    elif pointer is not None:
        (tmp_path / "LATEST").write_bytes(pointer)
    assert find_latest(tmp_path).step == 20


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (truncate, "the file has 9 bytes, expected"),
        (lambda path: (path / "manifest.json").unlink(), "was never committed"),
        (lambda path: (path / "manifest.json").write_bytes(b""), "it is not a manifest"),
        (lambda path: next(path.glob("*.safetensors")).unlink(), "the file is missing"),
        (lambda path: (path.rename(path.parent / "x"), path.symlink_to(path.parent / "x")), "it is a symbolic link"),
        (lambda path: path.rename(path.parent / "step-00000030"), "its manifest is that of step 20"),
    ],
)
def test_a_newer_one_that_is_damaged_is_reported_and_an_older_one_taken_only_when_asked(tmp_path, spoil, reason):
    save(tmp_path, 10)
    spoil(save(tmp_path, 20))
    found = find_latest(tmp_path)
    assert found.step == 10
    assert len(found.rejected) == 1
    assert reason in found.rejected[0][1]
    with pytest.raises(CheckpointError, match=r"the newest checkpoint .* cannot be used:\n  - step-000000[23]0: "):
        found.require()
    assert found.require(allow_older=True) == step_directory(tmp_path, 10)


def test_flipped_bits_are_found_when_asked_to_verify(tmp_path):
    save(tmp_path, 10)
    damage(save(tmp_path, 20))
    assert find_latest(tmp_path).step == 20
    found = find_latest(tmp_path, verify=True)
    assert found.step == 10
    assert "its content has the hash" in found.rejected[0][1]


def test_when_all_are_bad_each_is_listed(tmp_path):
    for step in (10, 20):
        truncate(save(tmp_path, step))
    with pytest.raises(CheckpointError) as caught:
        find_latest(tmp_path).require(allow_older=True)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"none of the checkpoints of {tmp_path} can be used:"
    assert [line[:19] for line in lines[1:3]] == ["  - step-00000020: ", "  - step-00000010: "]
    assert lines[3] == "  A run does not start from the beginning by itself."
    assert caught.value.exit_code == 65


def test_nothing_there_and_unfinished_saves_are_told(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"there is no checkpoint in .*\n  Name another run, or a step-\* folder\."
    ):
        find_latest(tmp_path).require()
    unfinished = tmp_path / "checkpoints" / "step-00000010.tmp-0123456789abcdef"
    unfinished.mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-abc").mkdir()
    (tmp_path / "checkpoints" / "step-0000000010").mkdir()
    found = find_latest(tmp_path)
    assert (found.path, found.unfinished, found.rejected) == (None, (unfinished,), ())
    with pytest.raises(CheckpointError, match="1 unfinished saves were left there"):
        found.require()


def test_latest_takes_only_checkpoints_of_the_run(tmp_path):
    save(tmp_path / "a", 10)
    (tmp_path / "b").mkdir()
    with pytest.raises(CheckpointError, match="is not one of the checkpoints of"):
        publish_latest(tmp_path / "b", step_directory(tmp_path / "a", 10))
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        publish_latest(tmp_path / "a", step_directory(tmp_path / "a", 11))


def test_retention_keeps_the_newest_good_ones(tmp_path):
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    done = retain(tmp_path, 2)
    assert names(tmp_path) == ["step-00000030", "step-00000040"]
    assert done.good == (step_directory(tmp_path, 40), step_directory(tmp_path, 30))
    assert done.refused == ()


def test_retention_never_leaves_less_than_two_good_ones(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    retain(tmp_path, 1)
    assert names(tmp_path) == ["step-00000020", "step-00000030"]
    with pytest.raises(CheckpointError, match="keep=0 would leave no checkpoint"):
        retain(tmp_path, 0)


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path):
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    damage(step_directory(tmp_path, 40))
    truncate(step_directory(tmp_path, 30))
    done = retain(tmp_path, 2)
    assert names(tmp_path) == ["step-00000010", "step-00000020", "step-00000030", "step-00000040"]
    assert [path.name for path, _ in done.refused] == ["step-00000040", "step-00000030"]


def test_listing_and_retention_read_manifests_only(tmp_path, monkeypatch):
    opened, read = [], []
    paths = [save(tmp_path, step) for step in (10, 20, 30, 40)]
    sizes = [(path / "manifest.json").stat().st_size for path in paths]
    real_open, real_read = store.folders.open_for_reading, store.folders.read_at
    monkeypatch.setattr(
        store.folders, "open_for_reading", lambda f, name, **k: opened.append(name) or real_open(f, name, **k)
    )
    monkeypatch.setattr(store.folders, "read_at", lambda f, v, o: read.append(len(v)) or real_read(f, v, o))

    def seen():
        found = len(opened), set(opened), sum(read)
        opened.clear()
        read.clear()
        return found

    assert find_latest(tmp_path).step == 40
    assert seen() == (1, {"manifest.json"}, sizes[3])
    publish_latest(tmp_path, paths[3])
    assert seen() == (1, {"manifest.json"}, sizes[3])
    assert retain(tmp_path, 3, known_good=paths).good == tuple(paths[:0:-1])
    assert seen() == (4, {"manifest.json"}, sum(sizes))
    assert names(tmp_path) == [path.name for path in paths[1:]]


def test_what_was_verified_before_is_not_read_again(tmp_path, monkeypatch):
    for step in (10, 20, 30):
        save(tmp_path, step)
    done = retain(tmp_path, 2)
    verified = []
    real = store.Checkpoint.verify
    monkeypatch.setattr(store.Checkpoint, "verify", lambda self: verified.append(self.step) or real(self))
    save(tmp_path, 40)
    retain(tmp_path, 2, known_good=done.good)
    assert verified == [40]
    assert names(tmp_path) == ["step-00000030", "step-00000040"]


def test_what_crashes_left_is_removed(tmp_path):
    save(tmp_path, 10)
    home = tmp_path / "checkpoints"
    shutil.copytree(home / "step-00000010", home / "step-00000020.tmp-0123456789abcdef")
    shutil.copytree(home / "step-00000010", home / ".trash-step-00000005-0123456789abcdef")
    (home / ".trash-step-00000005-0123456789abcdef" / "manifest.json").unlink()
    retain(tmp_path, 3)
    assert names(tmp_path) == ["step-00000010"]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_half_a_deletion_is_never_taken_for_a_checkpoint(tmp_path, monkeypatch):
    for step in (10, 20, 30):
        save(tmp_path, step)

    def crash(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(store.folders, "remove_folder", crash)
    with pytest.raises(KeyboardInterrupt):
        retain(tmp_path, 2)
    monkeypatch.undo()
    left = names(tmp_path)
    assert left[1:] == ["step-00000020", "step-00000030"]
    assert left[0].startswith(".trash-step-00000010-")
    assert find_latest(tmp_path).rejected == ()
    retain(tmp_path, 2)
    assert names(tmp_path) == ["step-00000020", "step-00000030"]


def test_nothing_outside_and_nothing_foreign_is_removed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    root = tmp_path / "run"
    for step in (10, 20, 30, 40, 50):
        save(root, step, run_id="other" if step == 20 else "run")
    home = root / "checkpoints"
    (home / "step-00000010" / "notes.txt").write_text("mine")
    (home / "step-00000005").symlink_to(outside)
    (home / "step-00000006.tmp-0123456789abcdef").symlink_to(outside)
    (home / ".trash-step-00000007-0123456789abcdef").symlink_to(outside)
    moved = tmp_path / "moved"
    (home / "step-00000030").rename(moved)
    (home / "step-00000030").symlink_to(moved)
    save(root, 25)
    for step, aside in ((35, "superseded-step-00000035-01234567"), (60, "superseded-step-00000060-01234567")):
        save(root, step).rename(home / aside)
    done = retain(root, 2)
    assert {path.name: reason for path, reason in done.refused} == {
        "step-00000030": "it is a symbolic link",
        "step-00000005": "it is a symbolic link",
        "step-00000010": "it holds 'notes.txt', which is not part of a checkpoint",
        "step-00000020": "it belongs to the run 'other'",
        "step-00000006.tmp-0123456789abcdef": "it is not a folder of its own but a link or a file",
        ".trash-step-00000007-0123456789abcdef": "it is not a folder of its own but a link or a file",
    }
    assert not (home / "step-00000025").exists()
    assert not (home / "superseded-step-00000035-01234567").exists()  # its step has been made again
    assert (home / "superseded-step-00000060-01234567").exists()
    assert (outside / "precious").read_text() == "x"
    assert open_checkpoint(moved).step == 30
    assert (home / "step-00000010" / "notes.txt").exists()
