"""This rank's current activity, in a small file that other processes read during a hang: ``logs/heartbeat-RANK.json``.

The main thread writes the file whenever it enters another phase or step; a thread writes it twice a second with the
main thread's current collective. A record has a fixed size and is written by one ``pwrite`` without fsync, which takes
some microseconds. ``launch.hang`` reads the files.

:func:`begin` also makes this process write the stacks of all threads to ``logs/stack-RANK.txt`` when it receives
``STACKS_SIGNAL``. faulthandler does that in C, so it works while a thread holds the interpreter's lock. The thread that
writes the records also answers requests for torch's flight recorders (``launch.flight_recorder``).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.launch import flight_recorder
from shardwise.launch.process import peak_rss_bytes

#: A real-time signal that neither Python nor torch, NCCL, Slurm or torch elastic uses.
STACKS_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2

#: Seconds between the thread's records.
INTERVAL_S = 0.5

RECORD_BYTES = 1024
_LONGEST_COLLECTIVE = 300


@dataclass(slots=True)
class Heartbeat:
    """One record."""

    rank: int
    pid: int = field(default_factory=os.getpid)  # process number
    host: str = field(default_factory=socket.gethostname)  # name of the machine
    step: int = 0  # the current step; 0 before the first
    #: Phase of the main thread: ``start``, ``step``, ``evaluation``, ``save``, ``load`` or ``end``.
    phase: str = "start"
    moves: int = 0  # progress of the main thread within the phase, such as the number of microbatches
    limit_s: float = 0.0  # seconds that the main thread may take for the next move, phase or step; 0: no limit
    saved_step: int = 0  # the newest step of this run that is in a checkpoint; 0 for none
    collective: str = ""  # the collective that the main thread waits in, or the last one
    is_waiting: bool = False  # whether the main thread, or the device, waits in that collective
    peak_rss_bytes: int = 0  # peak host memory of the process; 0 if unknown
    time_s: float = 0.0  # time of the record, in seconds since the epoch

    @property
    def progress(self) -> tuple[int, int, str, int]:
        """The values that change while the main thread makes progress."""
        return self.pid, self.step, self.phase, self.moves


class HeartbeatWriter:
    """Writes the records of this process.

    Attributes:
        directory: The folder of the records.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.beat = Heartbeat(rank)  # the newest record
        self._find_collective: Callable[[], tuple[str, bool]] | None = None
        self._file = os.open(path_of(directory, rank), os.O_RDWR | os.O_CREAT, 0o644)
        self._stacks = stacks_of(directory, rank).open("a", encoding="utf-8")
        if threading.current_thread() is threading.main_thread():
            signal.signal(STACKS_SIGNAL, signal.SIG_IGN)  # stays after end(), so that a late signal does not kill
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)
        self.directory, self._request = directory, flight_recorder.requested(directory)
        self._stop = threading.Event()
        self.write()
        self._thread = threading.Thread(target=self._run, name="shardwise-heartbeat", daemon=True)
        self._thread.start()

    def write(self) -> None:
        """Write a record. Errors of the disk are ignored: a run must not end because of a heartbeat."""
        beat = self.beat
        beat.time_s = time.time()
        record = json.dumps({name: getattr(beat, name) for name in beat.__slots__}).encode()
        with contextlib.suppress(OSError):
            os.pwrite(self._file, record.ljust(RECORD_BYTES - 1) + b"\n", 0)

    def update_collective(self) -> None:
        """Record the main thread's collective, and the process's peak memory."""
        if self._find_collective is not None:
            collective, self.beat.is_waiting = self._find_collective()
            self.beat.collective = collective[:_LONGEST_COLLECTIVE]
        self.beat.peak_rss_bytes = peak_rss_bytes()

    def set_collective_source(self, where: Callable[[], tuple[str, bool]]) -> None:
        """Set the function that returns the main thread's collective, and whether the thread waits in it."""
        self._find_collective = where

    def end(self) -> None:
        """Stop the thread; the last record is kept."""
        self._stop.set()
        self._thread.join(timeout=2 * INTERVAL_S)
        faulthandler.unregister(STACKS_SIGNAL)
        self._stacks.close()
        os.close(self._file)

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self.update_collective()
            self.write()
            self._answer_recorder_request()

    def _answer_recorder_request(self) -> None:
        request = flight_recorder.requested(self.directory)
        if request not in (None, self._request):
            flight_recorder.write(self.directory, self.beat.rank)
        self._request = request


#: The heartbeat of this process, if it writes one.
_heart: HeartbeatWriter | None = None


def begin(directory: Path, rank: int) -> HeartbeatWriter:
    """Start writing this process's records into ``directory``; no effect if that was already done.

    Raises:
        OSError: The files cannot be created.
    """
    global _heart  # noqa: PLW0603 - one per process, as its main thread is one
    if _heart is None:
        _heart = HeartbeatWriter(directory, rank)
    return _heart


def end() -> None:
    """Stop writing."""
    global _heart
    heart, _heart = _heart, None
    if heart is not None:
        heart.end()


def enter(phase: str, *, step: int | None = None, limit_s: float | None = None, saved_step: int | None = None) -> None:
    """Record that the main thread enters a phase or a step. Values that are ``None`` stay. No effect before begin()."""
    if _heart is None:
        return
    _heart.update_collective()
    beat = _heart.beat
    beat.phase, beat.moves = phase, 0
    beat.step = beat.step if step is None else step
    beat.limit_s = beat.limit_s if limit_s is None else limit_s
    beat.saved_step = beat.saved_step if saved_step is None else saved_step
    _heart.write()


def record_progress() -> None:
    """Record progress of the main thread within its phase; the thread writes it soon."""
    if _heart is not None:
        _heart.beat.moves += 1


def directory() -> Path | None:
    """Return the folder of this process's records; ``None`` if it writes none."""
    return None if _heart is None else _heart.directory


def path_of(directory: Path, rank: int) -> Path:
    """Return the file of a rank's records."""
    return directory / f"heartbeat-{rank}.json"


def stacks_of(directory: Path, rank: int) -> Path:
    """Return the file of a rank's stacks."""
    return directory / f"stack-{rank}.txt"


def read(directory: Path, rank: int) -> Heartbeat | None:
    """Return a rank's newest record; ``None`` if there is none or it is incomplete."""
    try:
        with path_of(directory, rank).open("rb") as file:
            return Heartbeat(**json.loads(file.read(RECORD_BYTES)))
    except (OSError, ValueError, TypeError):
        return None


def clear(directory: Path) -> None:
    """Remove the records of an earlier attempt, so that they are not mistaken for records of this one."""
    for path in directory.glob("heartbeat-*.json"):
        path.unlink(missing_ok=True)
    flight_recorder.clear(directory)
