"""Exit codes, and the notes in which workers tell their launcher the code and the reason.

A launcher sees only the exit codes of its workers, and torch elastic makes one of them: 1. So each worker writes
``exit-RANK.json`` into the run's log directory, and the launcher returns the code of the rank that is the cause.

=====  ==============================================  =====  ==============================================
code   meaning                                         code   meaning
=====  ==============================================  =====  ==============================================
0      finished                                        81     peer lost, restarts exhausted
2      usage                                           82     hang or collective timeout
65     checkpoint or data unusable                     83     ranks disagree
74     I/O: disk full, permission                      84     another run owns the directory
75     stopped on request, checkpoint committed        128+n  killed by signal n
78     bad configuration                               1      an exception that has no code of its own
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
#: Name of the attempt to which a worker belongs, set by our launcher; no other attempt of any run ever has it.
ATTEMPT = "SHARDWISE_ATTEMPT"

FINISHED, STOPPED, PEER_LOST, TIMED_OUT = 0, 75, 81, 82
#: Codes with a meaning. A launcher returns no others, whatever a program of its ranks leaves with: a scheduler that
#: knows the table must not take a number that a library chose for something else.
CODES = frozenset({0, 1, 2, 65, 74, 75, 78, 80, 81, 82, 83, 84, 130})

#: Where all ranks raise the same, rank 0 has shown it and its note comes first.
_AFTER_RANK_0_S = 0.5

#: What a disk says that is full, whose quota is used up, or that cannot be written any more.
_REFUSALS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}

#: Room for an exit note that is taken at the start, and the characters of its reason that fit there however they are
#: written.
_RESERVE_BYTES, _SHORT_REASON = 4096, 600

#: Errors that a rank sees when a peer is gone: a consequence, not a cause.
PEER_LOST_TEXTS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")


@dataclass(frozen=True, slots=True)
class ExitNote:
    """The end of one rank."""

    code: int
    rank: int
    step: int | None = None  # the step at which the worker ended, where known
    reason: str = ""  # one line for people; may be empty
    is_shown: bool = False  # whether the reason has been printed on the terminal
    time_s: float = 0.0  # time of the end, in seconds since the epoch
    attempt: str = ""  # the attempt in which the worker ran

    @property
    def is_consequence(self) -> bool:
        """Whether this rank ended because another one had."""
        return is_consequence(self.code, self.reason)


def is_consequence(code: int, reason: str) -> bool:
    """Whether a rank that ends with this code and this reason does so because another one has ended."""
    return code == PEER_LOST or any(text in reason for text in PEER_LOST_TEXTS)


def note_exit(code: int, reason: str, *, step: int | None = None, is_shown: bool = False) -> None:
    """Write this rank's exit note (:class:`ExitNote`), under a launcher of ours. An attempt's first note stays."""
    directory = os.environ.get(LOG_DIR)
    if not directory:
        return
    rank = int(os.environ.get("RANK", "0"))
    if rank in read_exit_notes(Path(directory)):
        return
    path = Path(directory) / f"exit-{rank}.json"
    note = ExitNote(code, rank, step, reason, is_shown, time.time(), os.environ.get(ATTEMPT, ""))
    reserve = _reserve_of(Path(directory), rank)
    with contextlib.suppress(OSError):  # without the folder, the process's exit code has to do
        try:
            replace(path, json.dumps(asdict(note)) + "\n")
        except OSError:
            short = dataclasses.replace(note, reason=reason[:_SHORT_REASON])
            with reserve.open("r+b") as file:
                file.write(json.dumps(asdict(short)).encode().ljust(_RESERVE_BYTES))
            reserve.replace(path)
        reserve.unlink(missing_ok=True)


def reserve_exit_note(directory: Path, rank: int) -> None:
    """Take room for this rank's exit note, so that it can be written when the disk is full.

    Raises:
        OSError: There is none.
    """
    _reserve_of(directory, rank).write_bytes(b" " * _RESERVE_BYTES)


def _reserve_of(directory: Path, rank: int) -> Path:
    return directory / f".exit-{rank}.reserve"


def show_error(error: ShardwiseError) -> None:
    """One block on stderr: the kind of error, what happened, what to do."""
    sys.stderr.write(f"{type(error).__name__}: {printable(error, is_block=True)}\n")
    sys.stderr.flush()


def run_worker(work: Callable[[], int], world: World, show: Callable[[ShardwiseError], object]) -> int:
    """Run one rank's part of a command.

    ``show`` prints an error; it is called on rank 0 alone, as most errors are the same on all ranks.

    Returns:
        The exit code with which the process is to leave. For a ShardwiseError it is the error's, and the launcher finds
        it in a note; what a disk refuses, wherever that was, counts as one. Other exceptions are raised.
    """
    try:
        return work()
    except (ShardwiseError, OSError) as raised:
        if not isinstance(raised, ShardwiseError) and raised.errno not in _REFUSALS:
            raise
        error = raised if isinstance(raised, ShardwiseError) else refusal_of(raised)
        to_log = getattr(sys.stderr, "write_to_log", None)
        is_shown = world.rank == 0
        if is_shown and error.exit_code == PEER_LOST and to_log is not None:
            to_log(f"{error}\n")  # the launcher says why the peer has gone, which comes first
            is_shown = False
        elif is_shown:
            show(error)
        else:
            time.sleep(_AFTER_RANK_0_S)
        note_exit(error.exit_code, str(error), is_shown=is_shown)
        return error.exit_code


def refusal_of(error: OSError) -> StorageError:
    """Turn the system's error about a file into one with an exit code."""
    where = f"{printable(error.filename)}: " if error.filename is not None else ""
    refused = StorageError(f"{where}{error.strerror or error}.\n  See to the disk and the permissions.")
    refused.__cause__ = error
    return refused


def read_exit_notes(directory: Path, attempt: str | None = None) -> dict[int, ExitNote]:
    """The notes of an attempt, by default of this process's, by rank. Files that are not notes are left out."""
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
