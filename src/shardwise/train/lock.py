"""The lock that keeps a run's folder for one run.

The file ``run.lock`` names its holder. Where the file system has locks, the holder has an ``flock`` on the file, which
the kernel releases when the process ends, for any reason. Between processes of one machine that decides, in whatever
container they run. Another machine may not see the lock: some network file systems have none, or keep them to the
machine. So a file that names a process of another machine is never taken over unless that is asked for; and then only
when the file has not changed for some time, as its holder writes a new count of beats every few seconds.

=====================================  ================================  =============================================
the file's holder                      with a lock of the kernel         on a file system without locks
=====================================  ================================  =============================================
holds the lock                         refused                           \
has ended, on this machine             taken                             taken if its process number means the same
                                                                         here, that is outside of other containers
on another machine, or unknown         refused, unless ``takes_over``    refused, unless ``takes_over``
=====================================  ================================  =============================================

A holder that finds another one's name in the file ends at once: it was frozen, and has been given up.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from shardwise.launch import process
from shardwise.spec.errors import ShardwiseError, StorageError
from shardwise.spec.text import printable

LOCK_NAME = "run.lock"
#: How often a holder writes that it is alive, and after what time without that it may be given up.
BEAT_S, SILENT_S = 4.0, 20.0
#: How often a lock is tried again that somebody else holds.
_RETRY_S = 0.5
#: How a file system says that it has no locks: Lustre without ``-o flock``, NFS without a lock daemon.
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
_LONGEST = 1000


class RunLockedError(ShardwiseError):
    """Another run owns the directory."""

    exit_code = 84


@dataclass(frozen=True, slots=True)
class _Holder:
    """Whom a lock's file names.

    Attributes:
        words: For people; empty where the file is.
        boot, pid_namespace, pid, began: As of ``launch.process``; empty where the file does not say.
    """

    words: str
    boot: str = ""
    pid_namespace: str = ""
    pid: str = ""
    began: str = ""

    @classmethod
    def parse(cls, text: str) -> _Holder:
        words, _, rest = text.strip().partition("\n")
        facts = rest.split("\n")[0].split()
        return cls(printable(words), *facts) if len(facts) == 4 else cls(printable(words))

    @property
    def is_gone(self) -> bool:
        """Whether the process is known to have ended."""
        here = process.boot(), process.pid_namespace() or "-"
        is_known = (self.boot, self.pid_namespace) == here and self.pid.isdecimal() and self.began != "-"
        return is_known and process.began(int(self.pid)) != self.began


class RunLock:
    """The lock of one run directory, held from :meth:`acquire` to :meth:`release`.

    Args:
        directory: The run's folder.
        takes_over: Take the lock of a holder on another machine that gives no sign of life.
    """

    def __init__(self, directory: Path, *, takes_over: bool = False) -> None:
        self.path = directory / LOCK_NAME
        self._takes_over = takes_over
        self._file: int | None = None
        self._head = ""
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, *, wait_s: float = 0.0) -> str | None:
        """Take the lock.

        Args:
            wait_s: How long to wait for another holder to end.

        Returns:
            What to tell the user, if anything: whose lock was taken over.

        Raises:
            RunLockedError: Another run holds it.
            StorageError: The directory cannot be written.
        """
        end = time.monotonic() + wait_s
        while self._file is None:
            try:
                return self._try(should_keep=True)
            except RunLockedError:
                if time.monotonic() > end:
                    raise
                time.sleep(_RETRY_S)
        return None

    def check(self) -> None:
        """Raise as :meth:`acquire` would, and take nothing. Signs of life are not waited for."""
        if self._file is None and self.path.exists():
            self._try(should_keep=False)

    def release(self) -> None:
        """Give the lock back and remove the file. Does nothing where the lock is not held."""
        file, self._file = self._file, None
        if file is None:
            return
        self._ends.set()
        if self._thread is not None:
            self._thread.join(SILENT_S)
        if self._is_in_place(file):
            self.path.unlink(missing_ok=True)
        if self._thread is None or not self._thread.is_alive():  # else the disk hangs, and the thread may still write
            os.close(file)

    def _try(self, *, should_keep: bool) -> str | None:
        said: str | None = None
        try:
            while True:
                try:
                    file, is_new = self._open(should_keep=should_keep)
                except FileNotFoundError:
                    if should_keep:
                        raise
                    return None  # its holder has removed it
                with contextlib.ExitStack() as stack:
                    stack.callback(os.close, file)
                    is_ours, note = self._judge(file, is_new=is_new, waits=should_keep)
                    said = note or said
                    if not is_ours and should_keep:
                        self._remove_left(file)
                    if (not is_ours and should_keep) or not self._is_in_place(file):
                        continue  # its holder removed it before it was locked here
                    if should_keep:
                        self._keep(file)
                        stack.pop_all()
                    return said
        except OSError as error:
            raise StorageError(
                f"{printable(self.path.parent)} cannot be written: {error.strerror}.\n"
                "  Name a folder that can, with --run-dir."
            ) from None

    def _open(self, *, should_keep: bool) -> tuple[int, bool]:
        """The file, and whether this call has made it."""
        if should_keep:
            with contextlib.suppress(FileExistsError):
                return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644), True
        return os.open(self.path, os.O_RDWR), False

    def _judge(self, file: int, *, is_new: bool, waits: bool) -> tuple[bool, str | None]:
        """Whether the file is now this process's, or has to be removed first; and what to tell the user.

        Raises:
            RunLockedError: It is another run's.
        """
        holder = self._holder(file)
        has_locks = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refusal(holder, is_alive=True) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            has_locks = False
        if is_new or (has_locks and (not holder.words or holder.boot == process.boot())):
            return True, None
        if not has_locks and holder.is_gone:
            return False, None
        if not self._takes_over:
            raise self._refusal(holder, is_alive=False)
        if waits and self._changes(file):
            raise self._refusal(holder, is_alive=True)
        return has_locks, f"{printable(self.path)} was left by {holder.words or 'an unknown run'}: taken over"

    def _holder(self, file: int) -> _Holder:
        return _Holder.parse(os.pread(file, _LONGEST, 0).decode(errors="replace"))

    def _refusal(self, holder: _Holder, *, is_alive: bool) -> RunLockedError:
        folder = printable(self.path.parent)
        begin = f"{folder} belongs to another run: {holder.words or 'one that begins just now'}.\n  "
        if is_alive:
            return RunLockedError(f"{begin}Wait for it, stop it, or name another folder with --run-dir.")
        return RunLockedError(
            f"{begin}From here nobody can see whether that process lives: it is on another machine, or in another"
            f" container. If it has ended, start this run with --take-over, which waits {SILENT_S:g} s for a sign of"
            " life first. Else name another folder with --run-dir."
        )

    def _changes(self, file: int) -> bool:
        """Whether the file's holder is seen to write to it. Waits for that."""
        before, end = os.pread(file, _LONGEST, 0), time.monotonic() + SILENT_S
        while time.monotonic() < end:
            time.sleep(_RETRY_S)
            with contextlib.suppress(FileNotFoundError):  # opened anew, so that a network file system asks its server
                if self.path.read_bytes()[:_LONGEST] != before:
                    return True
        return False

    def _remove_left(self, file: int) -> None:
        """Remove the file of a holder that has gone, on a file system without locks, so that one start makes a new one.

        Another start may have done so already: then its file is put back.
        """
        aside = self.path.with_name(f".{LOCK_NAME}.{secrets.token_hex(4)}")
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(aside)
            if not os.path.samestat(os.fstat(file), aside.stat()):
                with contextlib.suppress(FileExistsError):
                    self.path.hardlink_to(aside)
            aside.unlink()

    def _keep(self, file: int) -> None:
        """Name this process in the file, and begin to show that it is alive."""
        pid = os.getpid()
        self._head = (
            f"process {pid} on {_host()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
            f"{process.boot()} {process.pid_namespace() or '-'} {pid} {process.began(pid) or '-'}\n"
        )
        self._write(file, 0)
        self._file = file
        self._ends = threading.Event()
        os.register_at_fork(after_in_child=self._forget)  # a child that outlives us holds no lock
        self._thread = threading.Thread(target=self._beat, args=(file, self._ends), name="run-lock", daemon=True)
        self._thread.start()

    def _forget(self) -> None:
        file, self._file, self._thread = self._file, None, None
        if file is not None:
            os.close(file)

    def _write(self, file: int, count: int) -> None:
        os.ftruncate(file, os.pwrite(file, f"{self._head}beat {count:08}\n".encode(), 0))
        os.fsync(file)

    def _beat(self, file: int, ends: threading.Event) -> None:
        count = 0
        while not ends.wait(BEAT_S):
            with contextlib.suppress(OSError):  # a full disk, or a folder that was removed: what saves says so
                held = self.path.read_text(encoding="utf-8", errors="replace")
                if ends.is_set():
                    return
                if held and not held.startswith(self._head):
                    self._end_for(_Holder.parse(held))
                self._write(file, count := count + 1)

    def _end_for(self, holder: _Holder) -> None:
        sys.stderr.write(
            f"shardwise: {printable(self.path.parent)} was taken over by {holder.words}. This run ends at once.\n"
        )
        sys.stderr.flush()
        os._exit(RunLockedError.exit_code)

    def _is_in_place(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), self.path.stat())
        except FileNotFoundError:
            return False


def _host() -> str:
    return printable(socket.gethostname())
