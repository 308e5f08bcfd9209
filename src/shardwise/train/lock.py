"""One run per directory: an ``flock`` on ``run.lock``, which the kernel releases when the process ends, for any reason.

The file's text names the holder, for messages only. Locks reach across hosts on NFS and most cluster file systems.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import TextIO

from shardwise.spec.errors import ShardwiseError, StorageError
from shardwise.train.text import printable

LOCK_NAME = "run.lock"
#: How a file system says that it has no locks: Lustre without ``-o flock``, NFS without a lock daemon.
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}


class RunLockedError(ShardwiseError):
    """Another run owns the directory."""

    exit_code = 84


class RunLock:
    """The lock of one run directory, held from :meth:`acquire` to :meth:`release`."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / LOCK_NAME
        self._file: TextIO | None = None

    def acquire(self) -> str | None:
        """Take the lock.

        Returns:
            What to tell the user, if anything: a file system without locks, a holder on another host that left it.

        Raises:
            RunLockedError: Another run holds it.
            StorageError: The directory cannot be written.
        """
        return self._take(should_keep=True) if self._file is None else None

    def check(self) -> None:
        """Raise as :meth:`acquire` would, and take nothing."""
        if self._file is None and self.path.exists():
            self._take(should_keep=False)

    def release(self) -> None:
        """Give the lock back and remove the file. Does nothing where the lock is not held."""
        file, self._file = self._file, None
        if file is not None and not file.closed:  # it is closed in a forked child
            with file:
                if self._is_in_place(file):
                    self.path.unlink(missing_ok=True)

    def _take(self, *, should_keep: bool) -> str | None:
        try:
            while True:
                with contextlib.ExitStack() as stack:
                    file = stack.enter_context(self.path.open("a+", encoding="utf-8", errors="replace"))
                    note = self._lock(file)
                    if not self._is_in_place(file):
                        continue  # its holder removed it before it was locked here
                    if should_keep:
                        file.truncate(0)
                        file.write(f"process {os.getpid()} on {_host()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
                        file.flush()
                        os.register_at_fork(after_in_child=file.close)  # a child that outlives us holds no lock
                        self._file = file
                        stack.pop_all()
                    return note
        except OSError as error:
            raise StorageError(
                f"{self.path.parent} cannot be written: {error.strerror}.\n  Name a folder that can, with --run-dir."
            ) from None

    def _lock(self, file: TextIO) -> str | None:
        file.seek(0)
        holder = printable(file.read(1000).strip())
        is_elsewhere = holder != "" and f" on {_host()}, " not in holder
        folder, path = printable(self.path.parent), printable(self.path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            advice = "Wait for it, stop it, or name another folder with --run-dir."
            if is_elsewhere:
                advice = f"That is another machine. If the run has ended there, remove {path}."
            raise RunLockedError(
                f"{folder} belongs to another run: {holder or 'one that begins just now'}.\n  {advice}"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return f"{folder} is on a file system without locks ({error.strerror}): a second run in it is not refused"
        return f"{path} was left by {holder}, which does not hold it any more: taken over" if is_elsewhere else None

    def _is_in_place(self, file: TextIO) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False


def _host() -> str:
    return printable(socket.gethostname())
