"""`checkpoint.upload_to`: copies on an S3 server of the loopback, a resume from there, and what goes wrong."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.checkpoint.mirror import upload
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.storage import place_of, storage_of
from shardwise.checkpoint.store import find_latest
from shardwise.launch import inject
from shardwise.launch.world import World
from shardwise.spec.errors import CheckpointError, ConfigError
from shardwise.train.checkpoints.checkpoints import Checkpoints, find_checkpoint, is_empty
from shardwise.train.checkpoints.uploads import Uploads
from shardwise.train.config.sections import read_config
from shardwise.train.folder import read_run_id
from shardwise.train.worker import open_directory
from tests.checkpoint.test_store import save, truncate
from tests.common.store import SECRETS, s3_server
from tests.train.job import command, content, environment, processes_of, state, wait_for_step, wait_until
from tests.train.train_here import losses, sets, summary, train_here, train_well

#: The run of the trainer's tests with fewer layers, without what takes seconds to import.
CONFIG = """
model: {preset: gpt-nano, num_layers: 2, vocab_size: 256, dropout: 0.1}
data: {source: stdlib, max_bytes: 100000}
train: {steps: 20, micro_batch_size: 4, global_batch_size: 8, eval_every: null}
optimizer: {lr: 1e-3}
checkpoint: {every: 5, keep: 2}
log: {tensorboard: false}
"""
UNREACHABLE = {**SECRETS, "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_DEFAULT_REGION": "x", "AWS_MAX_ATTEMPTS": "1"}


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with s3_server() as env:
        yield env


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    train_well(folder, 2, ("--run-dir", "run"), config=CONFIG)
    return folder / "run"


def armed(faults: str, env: dict[str, str]) -> None:
    """For ranks, and the processes that they start."""
    os.environ.update({**env, **({inject.ARMED: "1", inject.FAULT: faults} if faults else {})})


def stored(place: str, step: int = 20) -> list[str]:
    """Hashes of the files of a step there, as :func:`content` has of a folder's."""
    checkpoint = open_checkpoint(f"{place}/checkpoints/step-{step:08d}")
    checkpoint.verify()
    return [entry.hash for entry in checkpoint.manifest.files]


def hashes(run: Path, step: int = 20) -> list[str]:
    return [entry.hash for entry in open_checkpoint(run / "checkpoints" / f"step-{step:08d}").manifest.files]


def leaks(folder: Path, text: str) -> list[str]:
    """Where a secret is found: in what was printed, or in a file."""
    held = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()} | {"output": text.encode()}
    return [name for name, raw in held.items() for value in SECRETS.values() if value.encode() in raw]


def test_a_run_goes_on_from_the_store_on_a_machine_without_its_folder(
    s3: dict[str, str], whole: Path, tmp_path: Path
) -> None:
    place = "s3://bucket/machine/run"
    to = sets(f"checkpoint.upload_to={place}")
    begins, again = ("--run-dir", "a", *to, *sets("checkpoint.every=10")), ("--run-dir", "b", *to)
    results = train_here(
        tmp_path,
        2,
        (*begins, *sets("checkpoint.asynchronous=true")),
        (*again, "--resume", "step-00000010"),
        ("--run-dir", "c", *to),
        ("--run-dir", "d", "--resume", *sets("checkpoint.upload_to=s3://bucket/nothing")),
        ("--run-dir", "e", *sets("checkpoint.upload_to=s3://no-bucket/run")),
        config=CONFIG,
        before=functools.partial(armed, "", s3),
    )
    assert [code for code, _ in results] == [0, 0, 78, 65, 74], results
    texts = [text for _, text in results]
    assert f"resumed at step 10\n  from {place}/checkpoints/step-00000010\n" in texts[1]
    assert f"  {place}/checkpoints/step-00000020 is set aside\n" in texts[1]
    assert losses(tmp_path / "a") == losses(whole)
    assert losses(tmp_path / "b") == losses(whole)[10:]
    assert content(tmp_path / "b") == content(whole)
    assert stored(place) == hashes(tmp_path / "b") != hashes(tmp_path / "a")  # by another save
    assert (tmp_path / "b" / "run-id").read_text() == (tmp_path / "a" / "run-id").read_text()
    assert "holds checkpoints of the run a-" in texts[2]
    assert "name another place for this one" in texts[2]
    assert "d holds no run to resume" in texts[3]
    assert "s3://no-bucket/run/run-id cannot be written: " in texts[4]
    assert not losses_of(tmp_path / "e")  # before the first step
    assert not leaks(tmp_path, "".join(texts))


def losses_of(run: Path) -> list[float]:
    return losses(run) if (run / "metrics.jsonl").exists() else []


def lay_out(root: Path, steps: dict[int, bool]) -> None:
    """Checkpoints of steps; those that are not good are cut off."""
    for step, is_good in steps.items():
        path = save(root, step)
        if not is_good:
            truncate(path)


@pytest.mark.parametrize(
    ("here", "there", "found"),
    [
        ({10: True, 20: True}, {20: True}, "here 20"),
        ({10: True}, {10: True, 20: True}, "there 20"),
        ({}, {10: True, 20: True}, "there 20"),
        ({10: True, 20: False}, {20: True}, "there 20"),
        ({10: True, 20: True}, {20: False}, "here 20"),
        ({10: True, 30: False}, {20: True}, "30 is damaged, there 20"),
        ({10: True}, {20: False}, "20 is damaged, here 10"),
        ({}, {10: True, 20: False}, "20 is damaged, there 10"),
    ],
)
def test_a_resume_takes_the_newest_of_the_folder_and_the_store_and_passes_over_none_unasked(
    tmp_path: Path, here: dict[int, bool], there: dict[int, bool], found: str
) -> None:
    run, far = tmp_path / "here", tmp_path / "there"
    lay_out(run, here)
    lay_out(far, there)
    damaged, _, good = found.rpartition(", ")
    place, step = good.split()
    expected = tmp_path / place / "checkpoints" / f"step-000000{step}"
    said: list[str] = []
    assert find_checkpoint(run, "latest-good", str(far), say=said.append) == expected
    assert [line[:13] for line in said] == [f"step-000000{each.split()[0]}" for each in [damaged] if each]
    if damaged:
        with pytest.raises(CheckpointError, match=f"step-000000{damaged[:2]}: .*the file has 9 bytes"):
            find_checkpoint(run, "latest", str(far))
    else:
        assert find_checkpoint(run, "latest", str(far)) == expected
    assert not is_empty(run, str(far))
    assert is_empty(tmp_path / "none", str(tmp_path / "none"))


def test_a_step_on_the_store_is_found_by_its_name(tmp_path: Path) -> None:
    lay_out(tmp_path / "far", {10: True, 20: True})
    found = find_checkpoint(tmp_path / "run", "step-00000010", str(tmp_path / "far"))
    assert found == tmp_path / "far" / "checkpoints" / "step-00000010"
    with pytest.raises(CheckpointError, match="--resume step-00000030: there is no such checkpoint"):
        find_checkpoint(tmp_path / "run", "step-00000030", str(tmp_path / "far"))


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_a_loop_whose_folder_is_gone_takes_up_its_own_run_from_the_store_and_no_other(
    tmp_path: Path, kind: str
) -> None:
    far = tmp_path / "far" if kind == "folder" else place_of(f"memory://bucket/{tmp_path.name}")
    save(tmp_path / "a-2", 10, run_id="a-2-0123abcd")
    opened = functools.partial(open_directory, resume=None, world=World(), launchers=[None], auto_resumes=True)
    assert opened("a-2", tmp_path / "new" / "a-2", upload_to=str(far))[2] is None  # nothing is there
    upload({"upload": f"{tmp_path}/a-2/checkpoints/step-00000010", "to": f"{far}/checkpoints", "keep": 2, "run_id": ""})
    for name in ("b", "a"):
        with pytest.raises(ConfigError, match=r"holds checkpoints of the run a-2-0123abcd, not of .*\n  Continue that"):
            opened(name, tmp_path / "new" / name, upload_to=str(far))
        assert not (tmp_path / "new" / name).exists()
    assert opened("a-2", tmp_path / "new" / "a-2", upload_to=str(far))[2] == "latest"


def test_a_folder_to_upload_to_is_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, place in (("far", tmp_path / "far"), ("~/far", tmp_path / "home/far"), ("s3://b/far", "s3://b/far")):
        read = read_config(None, base={"checkpoint": {"upload_to": name}})
        read.raise_if_any()
        assert read.config.checkpoint.upload_to == str(place)


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_a_run_that_a_store_refuses_is_not_noted_in_its_folder(tmp_path: Path, kind: str) -> None:
    run, far = tmp_path / "b", tmp_path / "far" if kind == "folder" else place_of(f"memory://bucket/{tmp_path.name}")
    run.mkdir()
    notes = functools.partial(Checkpoints.write_run_id, path=None)
    held = types.SimpleNamespace(_run_dir=run, _run_id="b-1", uploads=Uploads(run, str(far)))
    notes(held)  # type: ignore[arg-type]
    assert read_run_id(run) == "b-1"
    with storage_of(far).open(far, "run-id") as file:
        assert file.num_bytes == len("b-1\n")
    (run / "run-id").unlink()
    path = save(tmp_path / "a", 10, run_id="a-1")
    assert "is_gone" not in upload({"upload": str(path), "to": f"{far}/checkpoints", "keep": 2, "run_id": "a-1"})
    with pytest.raises(ConfigError, match="holds checkpoints of the run a-1; this is b-1"):
        notes(held)  # type: ignore[arg-type]
    assert read_run_id(run) is None


def test_an_upload_that_failed_is_counted_where_its_checkpoint_has_been_removed_since(tmp_path: Path) -> None:
    """Which is not the case where it was removed before it was opened."""
    uploads, path = Uploads(tmp_path, str(tmp_path / "far")), tmp_path / "checkpoints" / "step-00000010"
    job = {"upload": str(path), "to": str(tmp_path / "far" / "checkpoints"), "keep": 2, "run_id": "run"}
    assert uploads._lines_of(job, upload(job)) == ["step-00000010 is not uploaded: it was removed before"]
    assert (uploads.failures, uploads.problem) == ([], None)
    said = f"step 10 was not uploaded to {tmp_path}/far/checkpoints: no way there"
    assert uploads._lines_of(job, {"problem": "no way there", "is_storage": True}) == [f"WARNING: {said}"]
    assert (uploads.failures, uploads.problem) == ([said], said)


def test_a_failed_upload_is_said_and_fails_the_run_only_where_it_is_the_last(whole: Path, tmp_path: Path) -> None:
    """To a folder, as of a slow disk that machines share; ``best/`` goes there too."""
    best = "checkpoint.best=eval_loss", "train.eval_every=10", "train.eval_batches=1"
    to = sets("checkpoint.upload_to=far", "checkpoint.keep=9", *best)
    faults = "store_before_file@step=5:enospc;store_before_file@step=20:raise"
    ((code, text),) = train_here(
        tmp_path, 2, ("--run-dir", "run", *to), config=CONFIG, before=functools.partial(armed, faults, {})
    )
    run, far = tmp_path / "run", tmp_path / "far"
    assert code == 74
    assert f"WARNING: step 5 was not uploaded to {far}/checkpoints: {far}/checkpoints/step-00000005 was not" in text
    assert "the last checkpoint is saved, but not where checkpoint.upload_to says: step 20 was not uploaded" in text
    assert "It is uploaded at the start of a resume" in text
    assert losses(run) == losses(whole)
    assert len(summary(run)["failed_saves"]) == 3  # steps 5 and 20, and the best
    assert find_latest(far).step in {None, 10, 15}  # those that waited may have been passed over
    resumes = "--run-dir", "run", *to, "--resume", *sets("train.steps=22")
    ((code, text),) = train_here(tmp_path, 2, resumes, config=CONFIG)
    assert code == 0, text
    assert stored(str(far), 22) == hashes(run, 22)
    assert stored(str(far)) == hashes(run)  # which the resume has made up for
    assert find_latest(far / "best").step == 22
    assert find_latest(far).unfinished == ()


def test_a_store_that_cannot_be_reached_is_said_before_the_first_step(tmp_path: Path) -> None:
    to = sets("checkpoint.upload_to=s3://bucket/run")
    ((code, text),) = train_here(
        tmp_path, 1, ("--run-dir", "run", *to), config=CONFIG, before=functools.partial(armed, "", UNREACHABLE)
    )
    assert code == 74
    assert "s3://bucket/run/checkpoints cannot be listed: " in text
    assert "See that the store can be reached from this machine" in text
    assert not leaks(tmp_path, text)


# --- killed in twenty places ------------------------------------------------------------------------------------------

#: Of rank 0's save, where its own folder is there for the resume; and of the upload, after which the folder is lost.
SAVING = inject.POINTS[inject.POINTS.index("save_begin") :]
PLACES = [(point, rank) for point in SAVING for rank in ((0, 1) if point == "mid_shard_write" else (0,))]


def train(folder: Path, env: dict[str, str], *arguments: str, killed: str = "") -> subprocess.CompletedProcess[str]:
    held = environment() | env | ({inject.ARMED: "1", inject.FAULT: killed} if killed else {})
    words = command(folder, "--run-dir", "run", "--nproc", "2", *arguments, config=CONFIG)
    return subprocess.run(words, cwd=folder, env=held, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.long
@pytest.mark.timeout(700)  # each of its runs may take 200 s
@pytest.mark.parametrize(("point", "rank"), PLACES)
def test_killed_anywhere_in_a_save_it_ends_as_if_nothing_had_happened_and_so_does_its_copy(
    s3: dict[str, str], whole: Path, tmp_path: Path, point: str, rank: int
) -> None:
    place, run = f"s3://bucket/{tmp_path.name}", tmp_path / "run"
    to = sets(f"checkpoint.upload_to={place}")
    step = 5 if point.startswith("gc_") else 15
    ended = train(tmp_path, s3, *to, killed=f"{point}@rank={rank}@step={step}:kill")
    assert ended.returncode == 137, ended.stdout + ended.stderr
    assert not processes_of(tmp_path)
    resumed = train(tmp_path, s3, *to, "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert losses(run) == losses(whole)
    assert content(run) == content(whole)
    assert stored(place) == hashes(run)
    assert find_latest(place).unfinished == ()
    assert not leaks(tmp_path, ended.stdout + ended.stderr + resumed.stdout + resumed.stderr)


@pytest.mark.long
@pytest.mark.timeout(700)  # each of its runs may take 200 s
@pytest.mark.parametrize("point", [point for point in inject.STORE_POINTS if "delete" not in point])
def test_an_upload_that_is_killed_anywhere_leaves_the_copy_before_or_this_one(
    s3: dict[str, str], whole: Path, tmp_path: Path, point: str
) -> None:
    place, run = f"s3://bucket/{tmp_path.name}", tmp_path / "run"
    to = sets(f"checkpoint.upload_to={place}", "checkpoint.keep=9")
    ended = train(tmp_path, s3, *to, killed=f"{point}@step=20:kill")
    assert ended.returncode == 74, ended.stdout + ended.stderr
    assert "the process that writes checkpoints has been killed" in ended.stdout
    assert losses(run) == losses(whole)
    begins = find_latest(place, verify=True).step or 0
    assert (begins == 20) == (point in {"store_after_manifest", "store_end"})
    shutil.rmtree(run)  # the machine is lost
    resumed = train(tmp_path, s3, *to, "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    if begins < 20:
        assert losses(run) == losses(whole)[begins:]
        assert content(run) == content(whole)
        assert stored(place) == hashes(run)
    assert find_latest(place, verify=True).step == 20
    assert find_latest(place).unfinished == ()


@pytest.mark.long
@pytest.mark.timeout(700)  # each of its runs may take 200 s
@pytest.mark.parametrize("point", ["store_before_delete", "store_mid_delete"])
def test_a_deletion_on_the_store_that_is_killed_is_done_by_the_next_upload(
    s3: dict[str, str], whole: Path, tmp_path: Path, point: str
) -> None:
    place, run = f"s3://bucket/{tmp_path.name}", tmp_path / "run"
    to = sets(f"checkpoint.upload_to={place}")
    first = train(tmp_path, s3, *to, *sets("checkpoint.keep=9"))
    assert first.returncode == 0, first.stdout + first.stderr
    assert find_latest(place, verify=True).step == 20
    # Steps 10 and 20 are uploaded again, and step 5 is due then. (The pauses let uploads begin.)
    pauses = "step_begin@rank=0@step=6:sleep=15;step_begin@rank=0@step=11:sleep=5"
    ended = train(tmp_path, s3, *to, "--resume", "step-00000005", killed=f"{point}@step=5:kill;{pauses}")
    assert "the process that writes checkpoints has been killed" in ended.stdout, ended.stdout + ended.stderr
    shutil.rmtree(run)
    resumed = train(tmp_path, s3, *to, "--resume", *sets("train.steps=25"))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert find_latest(place, verify=True).step == 25
    left = storage_of(place_of(place)).list(place_of(place) / "checkpoints")
    assert "step-00000005" not in left
    assert "step-00000020" in left


@pytest.mark.long
def test_a_run_that_is_asked_to_stop_uploads_its_last_step(s3: dict[str, str], tmp_path: Path) -> None:
    place, run = f"s3://bucket/{tmp_path.name}", tmp_path / "run"
    held = environment() | s3 | {inject.ARMED: "1", inject.FAULT: "step_begin@rank=0:sleep=1"}
    words = command(tmp_path, "--run-dir", "run", "--nproc", "2", *sets(f"checkpoint.upload_to={place}"), config=CONFIG)
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(words, cwd=tmp_path, env=held, stdout=out, stderr=out)
        wait_for_step(run, 7, process)
        process.terminate()
    code, text = process.wait(200), (tmp_path / "out").read_text()
    assert code == 75, text
    saved = re.search(r"stop requested, saved step (\d+), continue with --resume\n", text)
    assert saved is not None, text
    assert stored(place, int(saved[1])) == hashes(run, int(saved[1]))


@pytest.mark.long
def test_a_store_that_is_lost_on_the_way_lets_training_go_on_and_ends_it_with_74(whole: Path, tmp_path: Path) -> None:
    with s3_server() as env:
        to = sets("checkpoint.upload_to=s3://bucket/run")
        # Rank 1 waits for the end of the upload of step 5, so that the upload of step 10 begins at step 10 everywhere.
        faults = "step_begin@rank=0:sleep=1;step_begin@rank=1@step=8:stop;store_end@step=5:stop"
        held = environment() | env | {inject.ARMED: "1", inject.FAULT: faults}
        words = command(tmp_path, "--run-dir", "run", "--nproc", "2", *to, config=CONFIG)
        with (tmp_path / "out").open("wb") as out:
            process = subprocess.Popen(words, cwd=tmp_path, env=held, stdout=out, stderr=out)
            assert wait_until(lambda: [*map(state, processes_of(tmp_path))].count("T") == 2, 150)
    for pid in processes_of(tmp_path):
        os.kill(pid, signal.SIGCONT)
    code, text = process.wait(200), (tmp_path / "out").read_text()
    assert code == 74, text
    warned = text.index("WARNING: step 10 was not uploaded to s3://bucket/run/checkpoints: ")
    assert warned < text.index("step 20/20")  # at the next step
    assert "the last checkpoint is saved, but not where checkpoint.upload_to says" in text
    assert losses(tmp_path / "run") == losses(whole)
    assert content(tmp_path / "run") == content(whole)
    assert not leaks(tmp_path, text)
