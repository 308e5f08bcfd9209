"""Finds a rank that makes no progress, shows the ranks' stacks, and ends the run.

A run hangs when a rank's heartbeat (``launch.heartbeat``) does not change for longer than the limit that the rank
itself has written there. The ranks that wait for it are overdue at the same time. The message names the rank that the
others wait for: a stopped or ended one, else one that is in no collective, else the one with the lowest step.

Our launcher watches the ranks that it has started. Elsewhere (torchrun, Slurm) each rank has a thread that watches its
main thread. ``comm.stall`` answers a different question within seconds: whether waiting ranks disagree about the next
collective. Here any lack of progress counts, after a time limit.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.launch import flight_recorder, heartbeat
from shardwise.launch.exit_codes import TIMED_OUT, note_exit
from shardwise.launch.heartbeat import Heartbeat

#: Seconds between two checks.
INTERVAL_S = 0.5
#: Seconds over which the use of the processor is measured, and in which ranks must write their stacks.
_SAMPLE_S = 0.5
#: Further seconds for ranks to write their flight recorders; their threads check for a request twice a second.
_RECORDERS_S = 1.5
#: Seconds that a rank has to explain a hang and to exit.
_LONGEST_S = 60.0
#: Seconds after which a heartbeat of another machine is taken as that of a process that does not run.
_SILENT_S = 10.0
#: Seconds after which a heartbeat of this machine is taken as that of a process whose threads cannot run.
_LOCKED_S = 4.0
#: Maximum number of ranks in a message.
_MOST_LINES = 16

#: States of a main thread; the states that explain a hang come first.
GONE, STOPPED, SILENT, LOCKED, COMPUTING, ELSEWHERE, WAITING = (
    "gone: the process does not exist",
    "stopped: state T, by SIGSTOP, a debugger or a frozen container",
    "silent: its machine or process has written nothing lately",
    "holding the interpreter's lock: no other thread of it has run lately",
    "computing: its main thread uses the processor all the time",
    "not in a collective",
    "waiting for other ranks",
)
_ORDER = (GONE, STOPPED, SILENT, LOCKED, COMPUTING, ELSEWHERE, WAITING)


@dataclass(frozen=True, slots=True)
class Hang:
    """A run that makes no progress."""

    beat: Heartbeat  # heartbeat of the rank that the others wait for
    text: str  # the findings, in lines


class HangWatch:
    """Finds ranks whose heartbeat does not change.

    Only time during which this object is called counts, so that a machine that slept, or a container that was frozen
    for a while, is not taken for a hang.
    """

    def __init__(self, directory: Path, ranks: Iterable[int]) -> None:
        self._directory = directory
        self._progress: dict[int, tuple[object, float]] = dict.fromkeys(ranks, (None, 0.0))
        self._checked_at = time.monotonic()

    def overdue(self) -> Heartbeat | None:
        """Return a rank that has made no progress for longer than its limit. Call this every ``INTERVAL_S``."""
        now = time.monotonic()
        passed_s, self._checked_at = min(now - self._checked_at, 4 * INTERVAL_S), now
        found = None
        for rank, (progress, since_s) in self._progress.items():
            beat = heartbeat.read(self._directory, rank)
            if beat is None:
                continue
            same_s = since_s + passed_s if beat.progress == progress else 0.0
            self._progress[rank] = beat.progress, same_s
            if 0 < beat.limit_s <= same_s:
                found = beat
        return found


def explain(directory: Path, ranks: Sequence[int], late: Heartbeat) -> Hang:
    """Make the ranks write their stacks and flight recorders, and find the rank that the others wait for."""
    beats = [beat for rank in ranks if (beat := heartbeat.read(directory, rank)) is not None] or [late]
    local = [beat for beat in beats if beat.host == socket.gethostname()]
    before = {beat.pid: _main_thread(beat.pid) for beat in local}
    sizes = {beat.rank: _size(heartbeat.stacks_of(directory, beat.rank)) for beat in local}
    flight_recorder.request(directory)
    for beat in local:
        with contextlib.suppress(OSError):
            os.kill(beat.pid, heartbeat.STACKS_SIGNAL)
    time.sleep(_SAMPLE_S)
    states = {beat.rank: _state(beat, before.get(beat.pid), is_here=beat in local) for beat in beats}
    blocker = min(beats, key=lambda beat: (_ORDER.index(states[beat.rank]), beat.step, beat.rank))
    lines = [
        (
            f"rank {blocker.rank} (pid {blocker.pid}) has made no progress for {late.limit_s:g} s at step"
            f" {blocker.step}, in the phase '{blocker.phase}'; {states[blocker.rank]}"
        ),
        f"  rank {blocker.rank} was last seen {blocker.collective or 'before its first collective'}",
    ]
    others = [beat for beat in beats if beat is not blocker]
    for beat in others[: _MOST_LINES - 1]:
        where = beat.collective if beat.is_waiting else states[beat.rank]
        lines.append(f"  rank {beat.rank} (pid {beat.pid}): step {beat.step}, phase '{beat.phase}', {where}")
    if len(others) >= _MOST_LINES:
        lines.append(f"  and {len(others) - _MOST_LINES + 1} more ranks")
    num_hosts = len({beat.host for beat in beats})
    if num_hosts > 1 and set(states.values()) == {WAITING}:
        lines.append(f"  every rank waits for others, on {num_hosts} machines: see whether these reach each other")
    _await_recorders(directory, [beat.rank for beat in local if states[beat.rank] not in (GONE, STOPPED, LOCKED)])
    lines += flight_recorder.summary(directory, [beat.rank for beat in beats])
    with_stacks = [beat for beat in local if _size(heartbeat.stacks_of(directory, beat.rank)) > sizes[beat.rank]]
    if with_stacks:
        lines.append(
            f"  stacks: {', '.join(str(heartbeat.stacks_of(directory, b.rank)) for b in with_stacks[:_MOST_LINES])}"
        )
    silent = [str(beat.rank) for beat in local if beat not in with_stacks]
    if silent:
        lines.append(f"  no stack of rank {', '.join(silent)}: a process that is stopped or gone cannot write one")
    return Hang(blocker, "\n".join(lines))


def _await_recorders(directory: Path, ranks: Sequence[int]) -> None:
    deadline = time.monotonic() + _RECORDERS_S
    while time.monotonic() < deadline:
        if all(flight_recorder.path_of(directory, rank).exists() for rank in ranks):
            return
        time.sleep(0.05)


def watch_own_rank(directory: Path, rank: int, size: int, *, describe: Callable[[], str]) -> threading.Event:
    """Watch this process from a separate thread, and end it with code 82 when its main thread makes no progress.

    For worlds that our launcher has not started. The first rank that finds a hang prints the message, and kills stopped
    processes of its machine, which would not end otherwise.

    Returns:
        An event that ends the watch when it is set.
    """
    ends = threading.Event()
    report = directory / "hang.txt"
    if rank == 0:
        report.unlink(missing_ok=True)
        flight_recorder.clear(directory)

    def run() -> None:
        watch = HangWatch(directory, [rank])
        while not ends.wait(INTERVAL_S):
            late = watch.overdue()
            if late is not None:
                _end_own_rank(directory, range(size), late, report, describe)

    threading.Thread(target=run, name="shardwise-hang-watch", daemon=True).start()
    return ends


def _end_own_rank(
    directory: Path, ranks: Sequence[int], late: Heartbeat, report: Path, describe: Callable[[], str]
) -> None:
    # CUDA may hang in a call for the flight recorder and hold the interpreter's lock; this ends the process then.
    faulthandler.dump_traceback_later(_LONGEST_S, exit=True)
    hang = explain(directory, ranks, late)
    text = f"{hang.text}\n{describe()}"
    with contextlib.suppress(FileExistsError, OSError), report.open("x", encoding="utf-8") as file:
        file.write(text + "\n")
        sys.stderr.write(f"shardwise: {text}\n")
        sys.stderr.flush()
        if hang.beat.host == socket.gethostname() and _state(hang.beat, None, is_here=True) == STOPPED:
            with contextlib.suppress(OSError):
                os.kill(hang.beat.pid, signal.SIGKILL)
    note_exit(TIMED_OUT, hang.text.splitlines()[0], step=late.step)
    os._exit(TIMED_OUT)


def _state(beat: Heartbeat, before: tuple[str, float] | None, *, is_here: bool) -> str:
    if not is_here:
        return SILENT if time.time() - beat.time_s > _SILENT_S else WAITING if beat.is_waiting else ELSEWHERE
    now = _main_thread(beat.pid)
    if now is None or now[0] in "ZX":
        return GONE
    if now[0] in "Tt":
        return STOPPED
    if time.time() - beat.time_s > _LOCKED_S:
        return LOCKED
    if beat.is_waiting:
        return WAITING
    spins = before is not None and now[1] - before[1] > _SAMPLE_S / 2
    return COMPUTING if spins else ELSEWHERE


def _main_thread(pid: int) -> tuple[str, float] | None:
    """Return the state of a process's main thread, and the seconds in which it ran or waited for a processor.

    ``None`` if there is no such process. On kernels without ``schedstat`` the seconds include only running.
    """
    for folder in (Path(f"/proc/{pid}/task/{pid}"), Path(f"/proc/{pid}")):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            busy_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            with contextlib.suppress(OSError, ValueError):
                ran_ns, waited_ns, _ = (folder / "schedstat").read_text().split()
                busy_s = max(busy_s, (int(ran_ns) + int(waited_ns)) / 1e9)
            return fields[0], busy_s
    return None


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
