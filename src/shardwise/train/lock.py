"""One run per directory: a lock that names its holder and is taken over when the holder is provably gone.

``run.lock`` holds JSON: process id, when that process started (ids are reused), the machine's boot id, host name, and
since when. A holder on this host is gone when the machine has been booted since, or when no process with that id and
start time exists. A holder on another host cannot be judged from here: the user is told what to do.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwise.spec.errors import ShardwiseError, StorageError
from shardwise.train.text import printable

LOCK_NAME = "run.lock"


class RunLockedError(ShardwiseError):
    """Another run owns the directory."""

    exit_code = 84


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock."""

    pid: int
    started: int
    boot_id: str
    host: str
    since: str

    @classmethod
    def this_process(cls) -> Holder:
        """The holder that this process would be."""
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(os.getpid(), _start_time(os.getpid()) or 0, _boot_id(), socket.gethostname(), since)

    def is_gone(self) -> bool | None:
        """Whether the holder has ended; ``None`` where that cannot be known from here."""
        if self.host != socket.gethostname():
            return None
        if self.boot_id != _boot_id():
            return True
        return _start_time(self.pid) != self.started


class RunLock:
    """The lock of one run directory, held from :meth:`acquire` to :meth:`release`."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / LOCK_NAME
        self._holder: Holder | None = None

    def acquire(self) -> None:
        """Take the lock, or take it over from a holder that is gone.

        Raises:
            RunLockedError: Another run holds it, or may.
            StorageError: The directory cannot be written.
        """
        self._take(should_write=True)

    def check(self) -> None:
        """Raise as :meth:`acquire` would, and take nothing."""
        if self.path.exists():
            self._take(should_write=False)

    def release(self) -> None:
        """Give the lock back. Does nothing where it is not held any more."""
        if self._holder is not None and _read(self.path) == self._holder:
            self.path.unlink(missing_ok=True)
        self._holder = None

    def _take(self, *, should_write: bool) -> None:
        try:
            with self.path.parent.joinpath(".run.lock.guard").open("w") as guard:
                fcntl.flock(guard, fcntl.LOCK_EX)  # one at a time looks and writes
                held = _read(self.path)
                if held is not None and held != self._holder and held.is_gone() is not True:
                    raise RunLockedError(self._refusal(held))
                if should_write:
                    self._holder = Holder.this_process()
                    part = self.path.with_suffix(".part")
                    part.write_text(json.dumps(asdict(self._holder)) + "\n")
                    part.replace(self.path)
        except OSError as error:
            raise StorageError(
                f"{self.path.parent} cannot be written: {error.strerror}.\n  Name a folder that can, with --run-dir."
            ) from None

    def _refusal(self, held: Holder) -> str:
        where = f"process {held.pid} on {printable(held.host)}, since {printable(held.since)}"
        message = f"{printable(self.path.parent)} belongs to another run: {where}.\n  "
        if held.is_gone() is None:
            return message + f"That is another machine. If the run has ended there, remove {printable(self.path)}."
        return message + "Wait for it, stop it, or name another folder with --run-dir."


def _read(path: Path) -> Holder | None:
    try:
        held = json.loads(path.read_text("utf-8"))
        holder = Holder(**held)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        return Holder(0, 0, "", "(the lock is unreadable)", "unknown")
    types = [type(value) for value in asdict(holder).values()]
    if types != [int, int, str, str, str]:
        return Holder(0, 0, "", "(the lock is unreadable)", "unknown")
    return holder


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _start_time(pid: int) -> int | None:
    """Clock ticks after boot at which ``pid`` started; ``None`` for no such process, or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else _signalled(pid)
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _signalled(pid: int) -> int | None:
    """Where there is no /proc: 0 if the process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return 0
    return 0
