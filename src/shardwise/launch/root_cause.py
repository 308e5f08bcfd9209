"""Finds the rank that ended an attempt, and why, from exit notes, exit codes and heartbeats, and describes it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.launch import heartbeat
from shardwise.launch.exit_codes import PEER_LOST, STOPPED, TIMED_OUT, ExitNote
from shardwise.launch.hang import Hang
from shardwise.launch.stop_request import INTERRUPTED
from shardwise.spec.run_files import CHECKPOINTS
from shardwise.spec.text import printable, size

#: Exit codes after which a restart can help: an uncoded exception, a lost peer, a hang. Signals count too.
RESTARTABLE = {1, PEER_LOST, TIMED_OUT}
#: Signals that other processes send, or, for SIGABRT, that a library raises when a peer has died.
_OTHERS_KILL_WITH = {signal.SIGTERM, signal.SIGINT, signal.SIGABRT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1}
#: Signals that an error in the process itself raises; faulthandler has written the stack.
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
#: Seconds after the first end from which on a rank is taken to have been ended by the launcher.
_LATER_S = 2.0
_LOG_TAIL_LINES = 12
#: Maximum number of ranks whose memory a message lists.
_MOST_RANKS = 16


@dataclass(frozen=True, slots=True)
class Cause:
    """Why an attempt ended."""

    code: int
    rank: int | None = None  # the rank that ended it; ``None`` if none did
    text: str = ""  # what happened to the rank; follows the rank's name in messages
    step: int | None = None  # the step at which the rank ended
    signal_number: int | None = None  # the signal that killed the rank, or that asked the launcher to stop
    is_shown: bool = False  # whether the rank has printed the reason on the terminal
    victims: tuple[int, ...] = ()  # ranks that ended in consequence

    @property
    def can_restart(self) -> bool:
        """Whether starting all ranks again can help."""
        if self.rank is None:
            return False
        return self.signal_number is not None or self.code in RESTARTABLE


def find_root_cause(
    notes: Mapping[int, ExitNote],
    failures: Mapping[int, tuple[int, float]],
    stopped_by: int | None,
    hang: Hang | None = None,
) -> Cause:
    """Find the rank that failed first; the other failed ranks are its victims.

    ``failures`` are exit code (negative: signal) and time of the failed workers; ``stopped_by`` is the signal that
    asked this process to stop.
    """
    if hang is not None:
        return Cause(TIMED_OUT, hang.beat.rank, hang.text, hang.beat.step)
    ends = _ends(notes, failures)
    if stopped_by is not None:
        own = [
            end for end in ends if end[0] < 2 and (end[3].code < 128 or end[3].is_shown)
        ]  # the rank has reported what it saved
        if not own:
            all_finished = bool(notes) and all(note.code == 0 for note in notes.values()) and not failures
            if all_finished:
                return Cause(0)
            return Cause(128 + stopped_by, text=_stopped(stopped_by), signal_number=stopped_by)
        ends = [end for end in own if end[3].code not in {STOPPED, INTERRUPTED}] or own
    if not ends:
        return Cause(1, text="the workers failed, and none of them said why") if failures else Cause(0)
    _, _, rank, cause = min(ends, key=lambda end: end[:3])
    is_shown = any(end[3].is_shown and end[3].code == cause.code for end in ends)  # rank 0 reports for all
    return replace(cause, is_shown=is_shown, victims=tuple(end[2] for end in ends if end[2] != rank and end[0] > 1))


def _ends(
    notes: Mapping[int, ExitNote], failures: Mapping[int, tuple[int, float]]
) -> list[tuple[int, float, int, Cause]]:
    """Return the end of each failed rank as (order, time, rank, cause); a low order means a likely root cause."""
    ends: list[tuple[int, float, int, Cause]] = []
    first_s = min((time_s for _, time_s in failures.values()), default=0.0)
    for rank in sorted({*notes, *failures}):
        note = notes.get(rank)
        status, time_s = failures.get(rank, (note.code if note is not None else 0, 0.0))
        if note is not None and note.code != 0:
            order = 2 if note.is_consequence else 1
            ends.append((order, note.time_s, rank, Cause(note.code, rank, note.reason, note.step, None, note.is_shown)))
        elif status < 0:
            number = -status
            order = 3 if number == signal.SIGTERM else 1 if number in _OTHERS_KILL_WITH else 0
            if time_s > first_s + _LATER_S:  # the agent ends the others, finally by SIGKILL
                order = 3
            text = f"killed by {signal_name(number)}"
            ends.append((order, time_s, rank, Cause(128 + number, rank, text, None, number)))
        elif status > 0:
            ends.append((1, time_s, rank, Cause(status, rank, f"left with exit code {status} without a message")))
    return ends


def signal_name(number: int) -> str:
    """Return the name of a signal, or its number if it is a real-time signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _stopped(number: int) -> str:
    return f"ended by {signal_name(number)}; the ranks did not save the steps since the last checkpoint"


def describe(cause: Cause, logs: Path, *, advice: str = "", with_tail: bool = False, out_of_memory: int = 0) -> str:
    """Describe an end: its cause, process and step, where to look, what is safe, and what to do next.

    ``with_tail`` includes the end of the rank's log instead of its path, because the file will be removed.
    ``out_of_memory`` counts the processes that this machine's kernel killed meanwhile because of lack of memory.
    """
    if cause.rank is None:
        lines = [f"shardwise: {cause.text}"]
        beat = heartbeat.read(logs, 0)
    else:
        beat = heartbeat.read(logs, cause.rank)
        lines = [
            _headline(cause, beat, out_of_memory),
            *([] if cause.code != TIMED_OUT else cause.text.split("\n")[1:]),
        ]
        if cause.victims:
            lines.append(f"  ranks {list(cause.victims)} ended in consequence")
        if cause.signal_number == signal.SIGKILL:
            lines += _memory_of_all(logs)
        log = logs / f"rank-{cause.rank}.log"
        if with_tail:
            with contextlib.suppress(OSError):
                lines += [f"  | {line}" for line in log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]]
        elif log.exists():
            is_crash = cause.signal_number in _CRASHES
            lines.append(f"  log{', with the stack at the crash' if is_crash else ''}: {log}")
    if advice:
        lines.append(describe_next(beat, logs, advice))
    return printable("\n".join(lines), is_block=True)


def has_begun(logs: Path) -> bool:
    """Return whether the run has started a step, so that it makes sense to continue it."""
    beat = heartbeat.read(logs, 0)
    return beat is not None and beat.step > 0


def describe_next(beat: heartbeat.Heartbeat | None, logs: Path, advice: str) -> str:
    """Return the last lines of a description: what is safe, and what to do next."""
    return f"  safe: {describe_checkpoint(beat, logs)}\n  next: {advice}"


def describe_checkpoint(beat: heartbeat.Heartbeat | None, logs: Path) -> str:
    """Describe the newest safe checkpoint, from a rank's heartbeat, or if that has none, from the folder."""
    folder = logs.parent / CHECKPOINTS
    step = 0 if beat is None else beat.saved_step
    if not step:
        found = (path.parent.name for path in folder.glob("step-*/manifest.json"))
        step = max((int(name[5:]) for name in found if name[5:].isdecimal()), default=0)
    if not step:
        return "nothing has been saved"
    path = folder / f"step-{step:08d}"
    return f"the checkpoint of step {step}{f', {path}' if path.is_dir() else ''}"


def _headline(cause: Cause, beat: heartbeat.Heartbeat | None, out_of_memory: int) -> str:
    if cause.code == TIMED_OUT and cause.text.startswith("rank "):
        return f"shardwise: {cause.text.split(chr(10))[0]}"
    process = f" (pid {beat.pid})" if beat is not None else ""
    step = cause.step if cause.step is not None else beat.step if beat is not None and beat.step else None
    at = f" at step {step}" if step is not None else ""
    if cause.signal_number is not None:
        what_happened = f" {cause.text}{at}{_memory(cause.signal_number, beat, out_of_memory)}"
    elif cause.text == f"left with exit code {cause.code}":
        what_happened = f" {cause.text}{at} while others were training" if at else f" {cause.text}"
    else:
        what_happened = f"{at}: {cause.text}"
    return f"shardwise: rank {cause.rank}{process}{what_happened}"


def _memory_of_all(logs: Path) -> list[str]:
    """Return a line with the peak memory of each process; empty if it is not known."""
    beats = [heartbeat.read(logs, int(path.stem.rpartition("-")[2])) for path in logs.glob("heartbeat-*.json")]
    known = sorted((beat.rank, beat.peak_rss_bytes) for beat in beats if beat is not None and beat.peak_rss_bytes)
    if len(known) < 2:
        return []
    shown = [f"rank {rank} {size(peak)}" for rank, peak in known[:_MOST_RANKS]]
    more = [f"{len(known) - _MOST_RANKS} more ranks"] if len(known) > _MOST_RANKS else []
    return [f"  most memory held: {', '.join(shown + more)}"]


def _memory(number: int, beat: heartbeat.Heartbeat | None, out_of_memory: int) -> str:
    if number != signal.SIGKILL:
        return ""
    peak = f"; the process held at most {size(beat.peak_rss_bytes)}" if beat is not None and beat.peak_rss_bytes else ""
    why = "the kernel has killed a process for want of memory" if out_of_memory else "often: out of memory"
    return f" ({why}{peak})"
