"""The launcher's supervision of its workers: forwards signals, and ends a run that hangs or does not stop."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from shardwise.launch import heartbeat
from shardwise.launch.hang import INTERVAL_S, Hang, HangWatch, explain
from shardwise.launch.process import parent_of
from shardwise.launch.stop_request import REQUESTS
from shardwise.launch.worker import LAUNCHER_PID

#: Seconds after which a worker gets a signal even without a heartbeat, because its logs may not be writable.
_LATEST_S = 10.0


class Supervisor:
    """Watches the workers of one launcher, in all attempts, from a thread.

    The first signal is forwarded to every worker as soon as the worker can handle it. A second one kills all workers at
    once, and so does the end of the grace period after the first.
    """

    def __init__(self, logs: Path, num_ranks: int, grace_s: float, stop_text: str) -> None:
        self.stopped_by: int | None = None  # the first signal received; ``None`` for none
        #: Whether this object has killed the workers: because of a second signal, a hang or the grace period.
        self.has_killed = False
        self.hang: Hang | None = None  # the hang because of which the workers were killed
        self._logs, self._num_ranks, self._grace_s, self._stop_text = logs, num_ranks, grace_s, stop_text
        self._stopped_at_s = 0.0
        self._signaled: set[int] = set()
        self._previous_handlers: dict[int, Any] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def __enter__(self) -> Self:
        """Install signal handlers if this is the main thread, and start watching."""
        if threading.current_thread() is threading.main_thread():
            for number in REQUESTS:
                self._previous_handlers[number] = signal.signal(number, self._on_signal)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching and restore the signal handlers."""
        self._stop.set()
        self._thread.join()
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.stopped_by is None:
            self.stopped_by, self._stopped_at_s = number, time.monotonic()
            name = signal.Signals(number).name
            sys.stderr.write(f"shardwise: {name}: {self._stop_text}; once more ends at once\n")
        else:
            self._kill()

    def _run(self) -> None:
        watch = HangWatch(self._logs, range(self._num_ranks))
        while not self._stop.wait(INTERVAL_S / 2):
            if self.stopped_by is not None:
                self._forward_signal(self.stopped_by)
                if time.monotonic() - self._stopped_at_s > self._grace_s and not self.has_killed:
                    self._kill()
            late = watch.overdue()
            if late is not None and self.hang is None and not self.has_killed and late.pid in self._workers():
                hang = explain(self._logs, range(self._num_ranks), late)
                if late.pid in self._workers():  # otherwise it has just exited
                    self.hang = hang
                    self._kill()

    def _forward_signal(self, number: int) -> None:
        beats = [heartbeat.read(self._logs, rank) for rank in range(self._num_ranks)]
        ready = {beat.pid for beat in beats if beat is not None}
        is_late = time.monotonic() - self._stopped_at_s > _LATEST_S
        for pid in self._workers() - self._signaled:
            if pid in ready or is_late:
                self._signaled.add(pid)
                with contextlib.suppress(OSError):
                    os.kill(pid, number)

    def _kill(self) -> None:
        self.has_killed = True
        kill_workers()

    def _workers(self) -> set[int]:
        """Return the workers without the processes that they have started."""
        return {pid for pid in _started_here() if parent_of(pid) == os.getpid()}


def kill_workers() -> None:
    """Kill all workers of this process and the processes that they have started. Each worker leads a session."""
    for pid in _started_here():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def num_killed_for_memory() -> int:
    """Return the number of processes that this machine's kernel has killed because of lack of memory since boot."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _started_here() -> set[int]:
    mark = f"{LAUNCHER_PID}={os.getpid()}\0".encode()
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes() and path.parent.name != str(os.getpid()):
                found.add(int(path.parent.name))
    return found
