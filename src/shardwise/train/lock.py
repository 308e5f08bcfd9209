"""The lock that reserves a run's folder for one run: filelock's ``flock``, and ``run.lock``, which names the holder.

The kernel releases the lock when its process ends, for any reason. Some network file systems do not show the lock to
other machines. Therefore a folder whose ``run.lock`` names a process of another machine is taken over only on request,
and only if the file has not changed for some time, because its holder writes to it every few seconds. A holder that
finds another name in the file exits: it was frozen, and its folder has been taken over.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from pathlib import Path

from filelock import FileLock, Timeout

from shardwise.launch import process
from shardwise.spec.errors import ShardwiseError, StorageError
from shardwise.spec.text import printable

LOCK_NAME = "run.lock"
#: Seconds between a holder's writes, and seconds without a write after which the lock may be taken over.
BEAT_S, SILENT_S = 4.0, 20.0


class RunLockedError(ShardwiseError):
    """Another run uses the folder."""

    exit_code = 84


class RunLock:
    """The lock of one run folder; with ``takes_over`` the lock of a silent holder on another machine is taken over."""

    def __init__(self, directory: Path, *, takes_over: bool = False) -> None:
        self.path = directory / LOCK_NAME
        self._takes_over = takes_over
        self._lock = FileLock(directory / f".{LOCK_NAME}", thread_local=False)
        self._head = ""
        self._ends = threading.Event()
        self._thread = threading.Thread()

    def acquire(self, *, wait_s: float = 0.0) -> str | None:
        """Take the lock, waiting up to ``wait_s`` for another holder; return a line about a lock taken over."""
        if self._lock.is_locked:
            return None
        previous = self._take(wait_s)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        self._head = f"process {os.getpid()} on {printable(socket.gethostname())}, since {since}\n{process.boot_id()}\n"
        try:
            self._write(0)
        except OSError as error:
            self._lock.release()
            raise self._unwritable(error) from None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(self._ends,), name="run-lock", daemon=True)
        self._thread.start()
        return f"{printable(self.path)} was left by {previous}: taken over" if previous else None

    def check(self) -> None:
        """Raise as :meth:`acquire` would now, without keeping the lock. Skipped if the lock is to be taken over."""
        if not self._takes_over and not self._lock.is_locked and self.path.exists():
            self._take(0.0)
            self._lock.release()

    def release(self) -> None:
        """Release the lock and remove ``run.lock``. Does nothing if the lock is not held."""
        if self._lock.is_locked:
            self._ends.set()
            self._thread.join(SILENT_S)
            if self._read().startswith(self._head):
                self.path.unlink(missing_ok=True)
            self._lock.release()

    def _take(self, wait_s: float) -> str | None:
        """Take the lock. Return the process whose folder is taken over, unless it is known to have ended."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._lock.release)
            try:
                with contextlib.suppress(Timeout):
                    self._lock.acquire(timeout=wait_s)
                words, boot = [*self._read().split("\n"), ""][:2]
                is_left = self._lock.is_locked and (not words or boot == process.boot_id())
                if not is_left and not (self._takes_over and self._is_silent()):
                    raise self._refusal()
                if not self._lock.is_locked:
                    with contextlib.suppress(RuntimeError):  # a lock of the kernel cannot be broken, a marker file can
                        self._lock.break_lock()
                    self._lock.acquire(timeout=0)
            except Timeout:
                raise self._refusal() from None
            except OSError as error:
                raise self._unwritable(error) from None
            stack.pop_all()
        return None if is_left else printable(words)

    def _unwritable(self, error: OSError) -> StorageError:
        folder = printable(self.path.parent)
        return StorageError(
            f"{folder} cannot be written: {error.strerror}.\n  Name a folder that can, with --run-dir or in sw.Run."
        )

    def _refusal(self) -> RunLockedError:
        return RunLockedError(
            f"{printable(self.path.parent)} belongs to another run:"
            f" {printable(self._read().split(chr(10))[0]) or 'one that begins just now'}.\n"
            "  Wait for it, stop it, or name another folder with --run-dir or in sw.Run. If it was on another machine"
            f" and has ended, add --take-over, which waits {SILENT_S:g} s for a sign of life first; for sw.Run remove"
            f" {LOCK_NAME}."
        )

    def _read(self) -> str:
        with contextlib.suppress(FileNotFoundError):  # opened again, so that a network file system asks its server
            return self.path.read_text(encoding="utf-8", errors="replace")
        return ""

    def _write(self, beats: int) -> None:
        self.path.write_text(f"{self._head}beat {beats}\n", encoding="utf-8")

    def _is_silent(self) -> bool:
        before, end = self._read(), time.monotonic() + SILENT_S
        while time.monotonic() < end:
            time.sleep(0.5)
            if self._read() != before:
                return False
        return True

    def _beat(self, ends: threading.Event) -> None:
        beats = 0
        while not ends.wait(BEAT_S):
            with contextlib.suppress(OSError):  # the disk is full or the folder is gone: a save reports it
                content = self._read()
                if content and not content.startswith(self._head):
                    by = f"{printable(self.path.parent)} was taken over by {printable(content.split(chr(10))[0])}"
                    sys.stderr.write(f"shardwise: {by}. This run ends at once.\n")
                    sys.stderr.flush()
                    os._exit(RunLockedError.exit_code)
                self._write(beats := beats + 1)
