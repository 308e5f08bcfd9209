"""Exit codes, and the notes in which workers report the code and the reason to their launcher.

A launcher sees only the exit codes of its workers, and torch elastic replaces them by 1. So each worker writes
``exit-RANK.json`` into the run's log directory, and the launcher returns the code of the root cause.

=====  ==============================================  =====  ==============================================
code   meaning                                         code   meaning
=====  ==============================================  =====  ==============================================
0      finished                                        81     peer lost, restarts exhausted
2      usage                                           82     hang or collective timeout
65     checkpoint or data unusable                     83     ranks disagree
74     I/O: disk full, permission                      84     another run owns the directory
75     stopped on request, checkpoint committed        128+n  killed by signal n
78     bad configuration                               1      an exception without a code
80     non-finite loss
=====  ==============================================  =====  ==============================================
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.launch.file import replace
from shardwise.spec.errors import ShardwiseError, StorageError
from shardwise.spec.text import printable

if TYPE_CHECKING:
    from shardwise.launch.world import World

#: Directory of logs and exit notes, set by our launcher.
LOG_DIR = "SHARDWISE_LOG_DIR"
#: Id of the attempt to which a worker belongs, set by our launcher; unique over all attempts of all runs.
ATTEMPT = "SHARDWISE_ATTEMPT"

FINISHED, STOPPED, PEER_LOST, TIMED_OUT = 0, 75, 81, 82
#: Codes with a meaning. A launcher returns no others, whatever exit code a rank has: a scheduler that knows this table
#: must not misinterpret the code of some library.
CODES = frozenset({0, 1, 2, 65, 74, 75, 78, 80, 81, 82, 83, 84, 130})

#: If all ranks raise the same error, rank 0 prints it and its note comes first.
_AFTER_RANK_0_S = 0.5

#: Errors of a disk that is full, over its quota, or read-only.
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}

#: Bytes reserved at the start for an exit note, and the maximum number of characters of a reason that always fit there,
#: in any encoding.
_RESERVE_BYTES, _SHORT_REASON = 4096, 600

#: Errors of a rank whose peer is gone: a consequence, not a cause.
PEER_LOST_TEXTS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")


@dataclass(frozen=True, slots=True)
class ExitNote:
    """The end of one rank."""

    code: int
    rank: int
    step: int | None = None  # the step at which the worker ended, if known
    reason: str = ""  # one readable line; may be empty
    is_shown: bool = False  # whether the reason was printed on the terminal
    time_s: float = 0.0  # time of the end, in seconds since the epoch
    attempt: str = ""  # id of the worker's attempt

    @property
    def is_consequence(self) -> bool:
        """Whether this rank ended because another rank had ended."""
        return is_consequence(self.code, self.reason)


def is_consequence(code: int, reason: str) -> bool:
    """Return whether this code and reason mean that the rank ended because another rank had ended."""
    return code == PEER_LOST or any(text in reason for text in PEER_LOST_TEXTS)


def note_exit(code: int, reason: str, *, step: int | None = None, is_shown: bool = False) -> None:
    """Write this rank's exit note (:class:`ExitNote`) if our launcher started it. An attempt's first note is kept."""
    directory = os.environ.get(LOG_DIR)
    if not directory:
        return
    rank = int(os.environ.get("RANK", "0"))
    if rank in read_exit_notes(Path(directory)):
        return
    path = Path(directory) / f"exit-{rank}.json"
    note = ExitNote(code, rank, step, reason, is_shown, time.time(), os.environ.get(ATTEMPT, ""))
    reserve = _reserve_of(Path(directory), rank)
    with contextlib.suppress(OSError):  # without the folder, only the exit code remains
        try:
            replace(path, json.dumps(asdict(note)) + "\n")
        except OSError:
            short = dataclasses.replace(note, reason=reason[:_SHORT_REASON])
            with reserve.open("r+b") as file:
                file.write(json.dumps(asdict(short)).encode().ljust(_RESERVE_BYTES))
            reserve.replace(path)
        reserve.unlink(missing_ok=True)


def reserve_exit_note(directory: Path, rank: int) -> None:
    """Reserve disk space for this rank's exit note, so that it can be written when the disk is full.

    Raises:
        OSError: The disk has no space left.
    """
    _reserve_of(directory, rank).write_bytes(b" " * _RESERVE_BYTES)


def _reserve_of(directory: Path, rank: int) -> Path:
    return directory / f".exit-{rank}.reserve"


def show_error(error: ShardwiseError) -> None:
    """Print an error to stderr: its class, what happened, what to do."""
    sys.stderr.write(f"{type(error).__name__}: {printable(error, is_block=True)}\n")
    sys.stderr.flush()


def run_worker(work: Callable[[], int], world: World, show: Callable[[ShardwiseError], object]) -> int:
    """Run one rank's part of a command.

    ``show`` prints an error; it is called only on rank 0, because most errors are the same on all ranks.

    Returns:
        The exit code of the process. For a ShardwiseError it is the error's code, which is also written in a note for
        the launcher; an error of a full or read-only disk counts as one. Other exceptions are raised.
    """
    try:
        return work()
    except (ShardwiseError, OSError) as raised:
        if not isinstance(raised, ShardwiseError) and raised.errno not in _DISK_ERRORS:
            raise
        error = raised if isinstance(raised, ShardwiseError) else to_storage_error(raised)
        to_log = getattr(sys.stderr, "write_to_log", None)
        is_shown = world.rank == 0
        if is_shown and error.exit_code == PEER_LOST and to_log is not None:
            to_log(f"{error}\n")  # the launcher reports why the peer is gone
            is_shown = False
        elif is_shown:
            show(error)
        else:
            time.sleep(_AFTER_RANK_0_S)
        note_exit(error.exit_code, str(error), is_shown=is_shown)
        return error.exit_code


def to_storage_error(error: OSError) -> StorageError:
    """Turn the system's error about a file into an error with an exit code."""
    where = f"{printable(error.filename)}: " if error.filename is not None else ""
    converted = StorageError(f"{where}{error.strerror or error}.\n  See to the disk and the permissions.")
    converted.__cause__ = error
    return converted


def read_exit_notes(directory: Path, attempt: str | None = None) -> dict[int, ExitNote]:
    """Return the notes of an attempt by rank, by default of this process's attempt. Invalid files are skipped."""
    attempt = os.environ.get(ATTEMPT, "") if attempt is None else attempt
    notes: dict[int, ExitNote] = {}
    for path in sorted(directory.glob("exit-*.json")):
        try:
            note = ExitNote(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue
        if note.attempt == attempt:
            notes[note.rank] = note
    return notes


def clear_exit_notes(directory: Path) -> None:
    """Remove the notes of an earlier attempt."""
    for path in [*directory.glob("exit-*.json"), *directory.glob(".exit-*.reserve")]:
        path.unlink(missing_ok=True)
