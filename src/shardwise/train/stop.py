"""A request to stop, from SIGTERM or Ctrl-C, remembered until the next step boundary."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

#: Finished steps are saved: resubmit.
STOPPED = 75
INTERRUPTED = 128 + signal.SIGINT


class StopRequest:
    """Catches SIGTERM and SIGINT while it is open. A second Ctrl-C ends the process at once.

    Attributes:
        signal_number: The first signal that came, 0 for none.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._kept: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Take over the signals. Only the main thread can; elsewhere nothing is caught."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._kept[number] = signal.signal(number, self._note)
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
            os._exit(INTERRUPTED)
        self.signal_number = self.signal_number or number


def exit_code(signal_number: int) -> int:
    """What a run leaves with that was stopped by a signal and has saved its steps."""
    return INTERRUPTED if signal_number == signal.SIGINT else STOPPED
