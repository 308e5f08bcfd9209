"""Writes torch's flight recorders of a hanging run to files for torch's tool (``torchfrtrace``).

torch stores the newest NCCL collectives in each process (``TORCH_FR_BUFFER_SIZE``), and would write them when its NCCL
watchdog times out, which is later than ``launch.hang`` ends the run. Therefore ranks are asked for them through the
folder of heartbeats: the watching process creates the file ``flight-request`` (:func:`request`), and the thread that
writes the heartbeat answers with ``flight-rank-RANK``, in torch's format.

The message about a hang does not depend on these files: a missing file is ignored.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from pathlib import Path

_PREFIX, _REQUEST = "flight-rank-", "flight-request"


def path_of(directory: Path, rank: int) -> Path:
    """Return the file for a rank's flight recorder."""
    return directory / f"{_PREFIX}{rank}"


def request(directory: Path) -> None:
    """Ask all ranks for their recorders, once per attempt, because several ranks may find a hang at the same time."""
    with contextlib.suppress(OSError):
        (directory / _REQUEST).touch(exist_ok=False)


def clear(directory: Path) -> None:
    """Remove request and answers of an earlier attempt."""
    for path in [directory / _REQUEST, *directory.glob(f"{_PREFIX}*")]:
        path.unlink(missing_ok=True)


def requested(directory: Path) -> tuple[int, int] | None:
    """Return an identity of the newest request, to detect a new one; ``None`` if there is none."""
    try:
        found = (directory / _REQUEST).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def write(directory: Path, rank: int) -> None:
    """Write this process's recorder, or an empty file if it has none."""
    if "torch" not in sys.modules:  # without torch there is no recorder
        return
    with contextlib.suppress(Exception):  # a private function, in a process with a problem
        from shardwise.torch_private import recorded_collectives

        partial = directory / f"flight-partial-{rank}"
        partial.write_bytes(recorded_collectives())
        partial.replace(path_of(directory, rank))


def summary(directory: Path, ranks: Iterable[int]) -> list[str]:
    """Return a line that names the files and the tool for them; empty if there are none."""
    sizes = [path.stat().st_size if (path := path_of(directory, rank)).exists() else 0 for rank in ranks]
    if not any(sizes):
        return []
    incomplete = "" if all(sizes) else " --allow-incomplete-ranks"
    return [f"  torch's flight recorders, compared by: torchfrtrace {directory} --prefix {_PREFIX}{incomplete}"]
