"""torch's flight recorders of a run that hangs, in files for torch's own tool (``torchfrtrace``).

torch keeps the newest collectives of NCCL in each process (``TORCH_FR_BUFFER_SIZE``) and would write them when its own
watch over NCCL times out, which is later than ``launch.hang`` ends the run. A rank is therefore asked for them through
the folder of heartbeats: whoever watches makes the file ``flight-request`` (:func:`request`), and the thread that
writes the heartbeat answers with ``flight-rank-RANK``, in torch's format.

Everything here is for a message that can do without: what is missing is left out.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from pathlib import Path

_PREFIX, _REQUEST = "flight-rank-", "flight-request"


def path_of(directory: Path, rank: int) -> Path:
    """The file that a rank writes its recorder to."""
    return directory / f"{_PREFIX}{rank}"


def request(directory: Path) -> None:
    """Ask all ranks for their recorders, once in an attempt: several ranks may find a hang at the same time."""
    with contextlib.suppress(OSError):
        (directory / _REQUEST).touch(exist_ok=False)


def clear(directory: Path) -> None:
    """Remove what an earlier attempt has asked for and got."""
    for path in [directory / _REQUEST, *directory.glob(f"{_PREFIX}*")]:
        path.unlink(missing_ok=True)


def requested(directory: Path) -> tuple[int, int] | None:
    """The newest request, to be compared with the one before; ``None`` where there is none."""
    try:
        found = (directory / _REQUEST).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def write(directory: Path, rank: int) -> None:
    """Write this process's recorder; an empty file where it has none."""
    if "torch" not in sys.modules:  # where nobody has loaded it there is nothing to write
        return
    with contextlib.suppress(Exception):  # a private function, in a process that is in trouble
        from shardwise.torch_private import recorded_collectives

        partial = directory / f"flight-partial-{rank}"
        partial.write_bytes(recorded_collectives())
        partial.replace(path_of(directory, rank))


def summary(directory: Path, ranks: Iterable[int]) -> list[str]:
    """The line of a message that names the files and what reads them; empty where there are none."""
    sizes = [path.stat().st_size if (path := path_of(directory, rank)).exists() else 0 for rank in ranks]
    if not any(sizes):
        return []
    incomplete = "" if all(sizes) else " --allow-incomplete-ranks"
    return [f"  torch's flight recorders, compared by: torchfrtrace {directory} --prefix {_PREFIX}{incomplete}"]
