"""The run's folder: which one, what is refused, locks that outlive nobody, files that are replaced whole."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.spec.errors import CheckpointError, ConfigError, StorageError
from shardwise.train import folder as rundir
from shardwise.train.folder import RunLock, RunLockedError
from shardwise.train.log import MetricsFile, Record, to_line


def begin(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("name: x\n")
    return folder


def test_new_runs_are_numbered_and_resume_means_the_newest(tmp_path: Path) -> None:
    assert rundir.choose("demo", None, is_resuming=False, base=tmp_path) == tmp_path / "demo"
    begin(tmp_path / "demo")
    assert rundir.choose("demo", None, is_resuming=False, base=tmp_path) == tmp_path / "demo-2"
    begin(tmp_path / "demo-2")
    begin(tmp_path / "demo-10")
    begin(tmp_path / "demo-other")
    assert rundir.choose("demo", None, is_resuming=False, base=tmp_path) == tmp_path / "demo-11"
    assert rundir.choose("demo", None, is_resuming=True, base=tmp_path) == tmp_path / "demo-10"


def test_a_folder_that_is_named_is_taken_as_it_is(tmp_path: Path) -> None:
    assert rundir.choose("x", tmp_path / "a", is_resuming=False) == tmp_path / "a"
    begin(tmp_path / "a")
    assert rundir.choose("x", tmp_path / "a", is_resuming=True) == tmp_path / "a"
    with pytest.raises(ConfigError, match="holds a run already"):
        rundir.choose("x", tmp_path / "a", is_resuming=False)
    with pytest.raises(CheckpointError, match="holds no run to resume"):
        rundir.choose("x", tmp_path / "b", is_resuming=True)


def test_a_checkpoint_of_another_run_is_told_from_no_run(tmp_path: Path) -> None:
    saved = begin(tmp_path / "a") / "checkpoints" / "step-00000001"
    saved.mkdir(parents=True)
    for wanted in (saved, tmp_path / "a"):
        with pytest.raises(CheckpointError) as caught:
            rundir.choose("x", tmp_path / "b", is_resuming=True, wanted=str(wanted))
        assert f"{wanted} is of the run in {tmp_path / 'a'}, and a run continues in its own folder" in str(caught.value)
        assert "or copy the whole folder and name the copy" in str(caught.value)
        assert rundir.choose("x", tmp_path / "a", is_resuming=True, wanted=str(wanted)) == tmp_path / "a"
    for wanted in ("latest", "step-00000001", str(tmp_path / "c")):
        with pytest.raises(CheckpointError, match="Start it without --resume"):
            rundir.choose("x", tmp_path / "b", is_resuming=True, wanted=wanted)


def test_a_missing_run_names_those_that_exist(tmp_path: Path) -> None:
    begin(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"no run 'demo' to resume in .* There are: other"):
        rundir.choose("demo", None, is_resuming=True, base=tmp_path)


def test_what_a_launcher_makes_is_no_run_yet(tmp_path: Path) -> None:
    rundir.create(tmp_path / "a")
    assert not rundir.holds_run(tmp_path / "a")
    (tmp_path / "a" / "checkpoints" / "step-00000001").mkdir()
    assert rundir.holds_run(tmp_path / "a")


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written") as caught:
        rundir.create(tmp_path / "file" / "run")
    assert caught.value.exit_code == 74


def test_a_second_run_is_refused_and_told_who_holds_the_folder(tmp_path: Path) -> None:
    code = "import sys, pathlib; from shardwise.train.folder import RunLock; lock = RunLock(pathlib.Path(sys.argv[1]))"
    code += "; lock.acquire(); print(); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(RunLockedError, match=f"another run: process {other.pid} on ") as caught:
            RunLock(tmp_path).acquire()
        with pytest.raises(RunLockedError):
            RunLock(tmp_path).check()
        assert caught.value.exit_code == 84
        other.kill()
    lock = RunLock(tmp_path)
    lock.acquire()  # the holder is gone
    lock.acquire()  # it is ours
    lock.release()
    assert not lock.path.exists()


@pytest.mark.parametrize("leave", ["subprocess.Popen(['sleep', '60'])", "os.fork() or time.sleep(60)"])
def test_a_child_that_outlives_the_holder_does_not_keep_the_lock(tmp_path: Path, leave: str) -> None:
    code = f"""
import os, pathlib, subprocess, sys, time
from shardwise.train.folder import RunLock
lock = RunLock(pathlib.Path(sys.argv[1]))
lock.acquire()
os.setpgid(0, 0)
{leave}
print("ready", flush=True)
os.kill(os.getpid(), 9)
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        holder.wait(30)
        try:
            os.killpg(holder.pid, 0)  # the child is alive
            lock = RunLock(tmp_path)
            assert _acquired_soon(lock) is None
            lock.release()
        finally:
            os.killpg(holder.pid, signal.SIGKILL)


def _acquired_soon(lock: RunLock, limit_s: float = 30) -> str | None:
    """What ``acquire`` returns, once a child of the holder has had a processor to close its copy of the file."""
    end = time.monotonic() + limit_s
    while True:
        try:
            return lock.acquire()
        except RunLockedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def test_a_lock_that_is_held_on_another_host_names_the_way_out(tmp_path: Path) -> None:
    with (tmp_path / "run.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("process 5 on else\x1b[31mwhere, since 2026-01-01 00:00:00\n")
        file.flush()
        with pytest.raises(RunLockedError, match=r"process 5 on else\\x1b\[31mwhere.*\n.*another machine.*remove"):
            RunLock(tmp_path).acquire()
        (tmp_path / "run.lock").unlink()
        lock = RunLock(tmp_path)
        lock.acquire()
    with pytest.raises(RunLockedError, match=f"process {os.getpid()} on "):
        RunLock(tmp_path).check()
    lock.release()


@pytest.mark.parametrize("text", ["", "[]", '{"pid": 1, "host": "x"}', "\0", "process 5 on elsewhere, since 2026"])
def test_a_file_that_nobody_has_locked_is_taken_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.lock").write_text(text)
    RunLock(tmp_path).check()
    assert (tmp_path / "run.lock").read_text() == text
    lock = RunLock(tmp_path)
    note = lock.acquire()
    assert (note is None) == (not text)
    assert note is None or ("was left by" in note and "\0" not in note)
    with pytest.raises(RunLockedError, match=f"another run: process {os.getpid()} on "):
        RunLock(tmp_path).check()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_was_taken_over_is_not_released_by_its_old_holder(tmp_path: Path) -> None:
    old, new = RunLock(tmp_path), RunLock(tmp_path)
    old.acquire()
    old.path.unlink()
    new.acquire()
    old.release()
    with pytest.raises(RunLockedError):
        old.acquire()
    new.release()


def test_a_file_that_its_holder_removes_meanwhile_is_not_what_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.acquire()
    flock = fcntl.flock

    def release_and_lock(file: object, operation: int) -> None:
        first.release()
        flock(file, operation)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", release_and_lock)
    second.acquire()
    monkeypatch.undo()
    with pytest.raises(RunLockedError):
        RunLock(tmp_path).check()
    second.release()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_where_the_file_system_has_no_locks_the_run_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = RunLock(tmp_path)
    note = lock.acquire()
    assert note is not None
    assert f"without locks ({os.strerror(number)}): a second run in it is not refused" in note
    lock.release()
    assert not lock.path.exists()


def test_a_lock_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.lock").mkdir()
    with pytest.raises(StorageError, match="cannot be written: Is a directory") as caught:
        RunLock(tmp_path).acquire()
    assert caught.value.exit_code == 74


def test_a_held_out_loss_is_in_the_line_of_its_step_only() -> None:
    assert json.loads(to_line(replace(record(1), eval_loss=2.5)))["eval_loss"] == 2.5
    assert "eval_loss" not in json.loads(to_line(record(1)))


def record(step: int, loss: float = 1.0) -> Record:
    return Record(step, loss, 1.0, 1e-3, step * 8, 100.0, 0.1, 0.0, None, 1000, 10)


def test_metrics_are_one_json_object_per_line_with_the_contract_s_fields(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(record(1))
    file.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert line == json.dumps(json.loads(line))
    assert list(json.loads(line)) == [
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "tokens_per_s",
        "step_time_s",
        "data_time_s",
        "mfu",
        "peak_memory_bytes",
        "collective_bytes",
        "loss_scale",  # beyond the contract, as what follows
        "optimizer_time_s",
        "exposed_time_s",
    ]
    assert json.loads(line)["mfu"] is None


def test_resuming_drops_records_that_are_made_again_and_lines_cut_by_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(to_line(record(step)) for step in (1, 2, 3)) + '{"step": 4, "lo')
    file = MetricsFile(path, keep_steps=2)
    file.write(record(3, loss=2.0))
    file.close()
    assert [(json.loads(line)["step"], json.loads(line)["loss"]) for line in path.read_text().splitlines()] == [
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
    ]


def test_numbers_that_json_has_not_are_null() -> None:
    assert json.loads(to_line(record(1, loss=float("inf"))))["loss"] is None
