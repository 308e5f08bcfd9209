"""Requests to stop that this process receives as signals, caught from the start of the process."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

#: Exit code: finished steps are saved, resubmit.
STOPPED = 75
INTERRUPTED = 128 + signal.SIGINT

#: Signals that ask a run to save and stop: schedulers send SIGTERM or a configured one (Slurm's --signal: often
#: SIGUSR1), a closed terminal sends SIGHUP, and its keys send SIGINT and SIGQUIT.
REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)

#: Set for workers whose program handles requests with a :class:`StopRequest`; other workers are killed by them.
CATCHES_STOPS = "SHARDWISE_CATCHES_STOPS"

#: Number and time of signals received before a :class:`StopRequest` existed.
_early: list[tuple[int, float]] = []


def catch_early() -> None:
    """Store requests for a later :class:`StopRequest`, so that they do not kill the process.

    A second request ends the process, because there may never be a :class:`StopRequest`.
    """
    for number in REQUESTS:
        signal.signal(number, _on_early_signal)


def _on_early_signal(number: int, frame: FrameType | None) -> None:
    del frame
    if _early:
        os._exit(128 + number)
    _early.append((number, time.monotonic()))


class StopRequest:
    """Catches requests to stop while it is open. A second Ctrl-C ends the process at once.

    A second SIGTERM does not, because torch elastic sends one to ranks that are still saving when the first has exited.
    """

    def __init__(self) -> None:
        self.signal_number = 0  # the first signal, 0 for none
        self.received_at_s = 0.0  # its time, on ``time.monotonic``
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Install the signal handlers. Outside of the main thread this is not possible, and nothing is caught."""
        if threading.current_thread() is threading.main_thread():
            for number in REQUESTS:
                self._previous_handlers[number] = signal.signal(number, self._on_signal)
            if _early:
                self.signal_number, self.received_at_s = _early[0]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous_handlers.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGINT and self.signal_number == signal.SIGINT:
            os.write(2, b"\ninterrupted again: ended at once.\n")
            os._exit(INTERRUPTED)
        if not self.signal_number:
            self.signal_number, self.received_at_s = number, time.monotonic()


def exit_code(signal_number: int) -> int:
    """Return the exit code of a run that was stopped by a signal and has saved its steps."""
    return INTERRUPTED if signal_number == signal.SIGINT else STOPPED
