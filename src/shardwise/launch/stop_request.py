"""Requests to stop that reach this process as signals, caught from its first moment on."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

#: Finished steps are saved: resubmit.
STOPPED = 75
INTERRUPTED = 128 + signal.SIGINT

#: Each asks a run to save and end: schedulers send SIGTERM or what they are told (Slurm's --signal: often SIGUSR1), a
#: closed terminal sends SIGHUP, its keys SIGINT and SIGQUIT.
REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)

#: Set for workers whose program takes requests with a :class:`StopRequest`; others are ended by them.
CATCHES_STOPS = "SHARDWISE_CATCHES_STOPS"

#: What came before a :class:`StopRequest` was there to take it: number and time.
_early: list[tuple[int, float]] = []


def catch_early() -> None:
    """Keep requests for the :class:`StopRequest` that comes. Without one, the process would end in the middle of work.

    A second one ends the process: nothing in it may be going to take the first.
    """
    for number in REQUESTS:
        signal.signal(number, _note_early)


def _note_early(number: int, frame: FrameType | None) -> None:
    del frame
    if _early:
        os._exit(128 + number)
    _early.append((number, time.monotonic()))


class StopRequest:
    """Catches requests to stop while it is open. A second Ctrl-C ends the process at once.

    A second SIGTERM does not: torch elastic sends one to the ranks that are still saving when the first has left.
    """

    def __init__(self) -> None:
        self.signal_number = 0  # the first signal that came, 0 for none
        self.came_at_s = 0.0  # when, on ``time.monotonic``
        self.safe = ""  # what is said at the second Ctrl-C
        self._kept: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Take over the signals. Only the main thread can; elsewhere nothing is caught."""
        if threading.current_thread() is threading.main_thread():
            for number in REQUESTS:
                self._kept[number] = signal.signal(number, self._note)
            if _early:
                self.signal_number, self.came_at_s = _early[0]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the signals back."""
        for number, handler in self._kept.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._kept.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGINT and self.signal_number == signal.SIGINT:
            os.write(2, f"\ninterrupted again: ended at once. {self.safe}\n".encode())
            os._exit(INTERRUPTED)
        if not self.signal_number:
            self.signal_number, self.came_at_s = number, time.monotonic()


def exit_code(signal_number: int) -> int:
    """The exit code of a run that was stopped by a signal and has saved its steps."""
    return INTERRUPTED if signal_number == signal.SIGINT else STOPPED
