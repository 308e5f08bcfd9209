"""The lock of a run's folder: it outlives nobody, and no two processes ever have it, whatever the file system."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from filelock._soft._exclusive import _recovery

from shardwise.spec.errors import StorageError
from shardwise.train import lock as module
from shardwise.train.lock import RunLock, RunLockedError


def test_a_second_run_is_refused_and_told_who_holds_the_folder(tmp_path: Path) -> None:
    code = "import sys, pathlib; from shardwise.train.lock import RunLock; lock = RunLock(pathlib.Path(sys.argv[1]))"
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
from shardwise.train.lock import RunLock
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


ELSEWHERE = "process 5 on else\x1b[31mwhere, since 2026-01-01 00:00:00\nanother-boot\nbeat 00000003\n"


@pytest.mark.parametrize("text", [ELSEWHERE, "[]", "\0", "process 5 on elsewhere, since 2026"])
def test_what_another_machine_holds_is_refused_with_the_way_out_and_taken_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.6)
    path = tmp_path / "run.lock"
    path.write_text(text)
    for attempt in (RunLock(tmp_path).check, RunLock(tmp_path).acquire):
        with pytest.raises(RunLockedError, match=r"another run: .*\n.*on another machine.*--take-over") as caught:
            attempt()
        assert not {"\0", "\x1b"} & set(str(caught.value))
        assert str(caught.value).endswith("; for sw.Run remove run.lock.")
        assert path.read_text() == text
    path.unlink()
    lock = RunLock(tmp_path)
    assert lock.acquire() is None
    lock.release()
    path.write_text(text)
    RunLock(tmp_path, takes_over=True).check()
    lock = RunLock(tmp_path, takes_over=True)
    assert "run.lock was left by " in str(lock.acquire())
    with pytest.raises(RunLockedError, match=f"another run: process {os.getpid()} on "):
        RunLock(tmp_path).check()
    lock.release()
    assert [path.name for path in tmp_path.iterdir()] == [".run.lock"]


def test_a_holder_on_another_machine_that_gives_a_sign_of_life_is_never_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENT_S", 30.0)
    path = tmp_path / "run.lock"
    path.write_text(ELSEWHERE)
    threading.Timer(0.5, lambda: path.write_text(ELSEWHERE.replace("beat 00000003", "beat 00000004"))).start()
    began = time.monotonic()
    with pytest.raises(RunLockedError, match="Wait for it, stop it"):
        RunLock(tmp_path, takes_over=True).acquire()
    assert time.monotonic() - began < 20


def test_a_file_that_names_nobody_and_that_nobody_has_locked_is_taken(tmp_path: Path) -> None:
    (tmp_path / "run.lock").touch()
    lock = RunLock(tmp_path)
    assert lock.acquire() is None
    lock.release()


HOLDER = """
import errno, fcntl, pathlib, sys
from shardwise.train import lock
lock.BEAT_S = 0.2
if sys.argv[2] == "no locks":
    def refuse(*_):
        raise OSError(errno.ENOSYS, "no locks here")
    fcntl.flock = refuse
held = lock.RunLock(pathlib.Path(sys.argv[1]))
held.acquire()
print(flush=True)
sys.stdin.read()
"""
CONTAINER = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]


def can_make_containers() -> bool:
    with contextlib.suppress(OSError):
        return subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode == 0
    return False


@pytest.mark.skipif(not can_make_containers(), reason="unshare may not make process namespaces here")
def test_of_two_containers_of_one_name_with_other_process_numbers_one_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder is process 1 of its container, which here is another process, as it would be after its end."""
    monkeypatch.setattr(module, "SILENT_S", 1.5)
    with subprocess.Popen(
        [*CONTAINER, sys.executable, "-c", HOLDER, str(tmp_path), "locks"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as holder:  # fmt: skip
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"\n"
        for takes_over in (False, True):
            with pytest.raises(RunLockedError, match="belongs to another run: process 1 on"):
                RunLock(tmp_path, takes_over=takes_over).acquire()
        holder.kill()
        holder.wait(30)
    lock = RunLock(tmp_path)
    assert _acquired_soon(lock) is None
    lock.release()


def test_a_holder_that_was_given_up_ends_when_it_wakes_up(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), "locks"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as holder:  # fmt: skip
        assert holder.stdout is not None
        holder.stdout.readline()
        (tmp_path / "run.lock").write_text(ELSEWHERE)
        assert holder.wait(30) == 84
        assert holder.stderr is not None
        assert b"was taken over by process 5 on else\\x1b[31mwhere" in holder.stderr.read()
    assert (tmp_path / "run.lock").read_text() == ELSEWHERE


def refuse_locks(*_: object) -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_where_the_file_system_has_no_locks_a_holder_that_is_silent_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse_locks)
    monkeypatch.setattr(module, "SILENT_S", 1.5)
    monkeypatch.setattr(_recovery, "exchange_names", lambda *_: False)  # as network file systems answer
    words = [sys.executable, "-c", HOLDER, str(tmp_path), "no locks"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        for takes_over in (False, True):
            with pytest.raises(RunLockedError, match=f"another run: process {holder.pid} on "):
                RunLock(tmp_path, takes_over=takes_over).acquire()
        holder.kill()
        holder.wait(30)
    lock = RunLock(tmp_path, takes_over=True)
    assert f"was left by process {holder.pid}" in str(lock.acquire())
    with pytest.raises(RunLockedError):
        RunLock(tmp_path).acquire()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.lock").mkdir()
    with pytest.raises(StorageError, match="cannot be written: Is a directory") as caught:
        RunLock(tmp_path).acquire()
    assert caught.value.exit_code == 74


def test_a_full_disk_is_refused_and_the_lock_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(StorageError, match="cannot be written: No space left on device"):
        RunLock(tmp_path).acquire()
    monkeypatch.undo()
    lock = RunLock(tmp_path)
    assert lock.acquire() is None
    lock.release()
