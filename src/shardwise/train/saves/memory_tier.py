"""Checkpoints in memory, between those on the disk: what a run that loses a process goes on from.

They are ordinary checkpoints in a file system in memory, so they outlive the processes of the run (not the machine) and
load on any number of ranks. One is kept, and one is being written. Memory is given back when the run ends; where its
launcher gives up, the newest is copied to the disk first.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from shardwise.checkpoint import CHECKPOINTS, find_latest, step_directory, step_of
from shardwise.spec.errors import ConfigError, StorageError
from shardwise.spec.text import printable
from shardwise.train.folder import read_run_id

#: A file system in memory.
_BASE = Path("/dev/shm")  # noqa: S108  private: the folder is made with mode 0700, and refused where it is another's


class MemoryTier:
    """The checkpoints in memory of the run in a folder."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        place = hashlib.sha256(os.fsencode(run_dir.absolute())).hexdigest()[:16]
        self.root = _BASE / f"shardwise-{os.getuid()}-{place}"

    def create(self) -> None:
        """Make an empty folder, in place of what another run with this folder has left.

        Raises:
            StorageError: There is no file system in memory here, or the folder is somebody else's.
        """
        try:
            self.clear()
            self.root.mkdir(mode=0o700)
            (self.root / CHECKPOINTS).mkdir()
        except OSError as error:
            raise StorageError(
                f"{self.root} cannot be made for checkpoints in memory: {error.strerror}.\n"
                "  Leave checkpoint.memory_every away."
            ) from None

    def open(self) -> None:
        """As :meth:`create`, but what is there stays.

        Raises:
            StorageError: As :meth:`create`.
        """
        if not self._is_own():
            self.create()

    def directory(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return step_directory(self.root, step)

    def newest(self, after: int = 0) -> Path | None:
        """The newest good checkpoint of this run that is of a step later than ``after``; hashes are compared."""
        run_id = read_run_id(self._run_dir)
        found = find_latest(self.root, verify=True, run_id=run_id) if self._is_own() else None
        if found is None or found.path is None or found.step is None or found.step <= after:
            return None
        return found.path

    def make_room(self) -> None:
        """Remove all but the newest. Only rank 0 calls this, when no save is under way."""
        held = self.root / CHECKPOINTS
        names = [path.name for path in held.iterdir()] if held.is_dir() else []
        newest = max((step_of(name) or 0 for name in names), default=0)
        for name in names:
            if step_of(name) != newest:
                shutil.rmtree(held / name, ignore_errors=True)

    def clear(self) -> None:
        """Give the memory back."""
        if self._is_own():
            shutil.rmtree(self.root, ignore_errors=True)

    def rescue(self) -> str | None:
        """Copy the newest checkpoint to the run's folder where that has none as new, and give the memory back.

        The launcher calls this when no process of the run is left.

        Returns:
            What to tell the user; ``None`` where there was nothing to do.
        """
        path = self.newest(after=find_latest(self._run_dir).step or 0)
        said = None
        if path is not None:
            target = self._run_dir / CHECKPOINTS / path.name
            part = target.with_name(f"{path.name}.tmp-{os.urandom(8).hex()}")
            try:
                shutil.copytree(path, part)
                for held in (*part.iterdir(), part):
                    _sync(held)
                part.rename(target)
                _sync(target.parent)
            except OSError as error:
                return (
                    f"{printable(path)} is newer than what is on the disk, and was not copied there: {error.strerror}"
                )
            said = f"step {step_of(path.name)} was in memory and is now in {printable(target)}"
        self.clear()
        return said

    def _is_own(self) -> bool:
        return self.root.is_dir() and not self.root.is_symlink() and self.root.stat().st_uid == os.getuid()


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def check_one_machine(num_nodes: int) -> None:
    """Refuse checkpoints in memory for a run on several machines.

    Raises:
        ConfigError: It is one.
    """
    if num_nodes > 1:
        raise ConfigError(
            f"checkpoint.memory_every keeps checkpoints in the memory of one machine, and this run has {num_nodes}.\n"
            "  Use checkpoint.every with checkpoint.asynchronous=true."
        )
