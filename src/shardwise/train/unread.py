"""What reaches a run from outside the steps: requests to stop, and the values that steps leave on the device.

Between two readings a step neither waits for the device nor exchanges anything beside what the model and its optimizer
do. Values of several steps are read together, with one exchange and one wait, when they are due. Steps are timed on the
device, by events on its stream.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from shardwise.train.control import Control

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


#: Values are read this often at least (in seconds), so that a request to stop or a loss of NaN is noticed in time.
LONGEST_UNREAD_S = 10.0


class StepTime:
    """How long a step takes, without waiting for its end."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._seconds = 0.0
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events[0].record()
        self._begin = time.perf_counter()

    def stop(self) -> None:
        """The step has been issued."""
        self._seconds = time.perf_counter() - self._begin
        if self._events is not None:
            self._events[1].record()

    def seconds(self) -> float:
        """The step's time on its device. Asked for after the device has finished it."""
        return self._seconds if self._events is None else self._events[0].elapsed_time(self._events[1]) / 1000


@dataclass(slots=True)
class UnreadStep:
    """One step whose values are on the device.

    Attributes:
        loss: The sum over ``num_losses`` microbatches of this rank; ``None`` on a rank that has no loss.
        num_losses: Microbatches of a step, the same on every rank.
        norm: The global norm of the gradient; ``None`` where backward updates.
        is_skipped: Loss scaling has left this step out: its norm is not finite, and rightly so.
        time: Duration of the step.
        update: Of that, clipping and the optimizer's step; ``None`` where backward updates.
        lr: Learning rate of the step.
        scale: Loss scale of the step; ``None`` where nothing is scaled.
        data_s: Seconds that this rank's host spent on data.
        sent_bytes: Bytes that this rank sent.
        exposed_s: Seconds that this rank's host waited for communication; ``None`` where the host does not wait.
    """

    loss: Tensor | None
    num_losses: int
    norm: Tensor | None
    is_skipped: bool
    time: StepTime
    update: StepTime | None
    lr: float
    scale: float | None
    data_s: float
    sent_bytes: int
    exposed_s: float | None = None


@dataclass(frozen=True, slots=True)
class ReadStep:
    """A step whose values have been read.

    Attributes:
        losses: The mean loss of every rank that has one, by rank.
        norm: The global norm of the gradient.
        step: The step itself.
    """

    losses: dict[int, float]
    norm: float | None
    step: UnreadStep


@dataclass(slots=True)
class UnreadSteps:
    """The steps since the last reading.

    Attributes:
        control: The ranks' channel.
        every: Steps between two readings.
        steps: In order.
        peak_bytes: Most bytes of tensors that any rank has held, as of the last reading.
        signal_number: A signal that any rank had got by then; 0 for none.
    """

    control: Control
    every: int
    steps: list[UnreadStep] = field(default_factory=list)
    peak_bytes: int = 0
    signal_number: int = 0
    _read_at: float = field(default_factory=time.perf_counter)
    _count: int = 1  # of steps before the next reading is due by time; the first step is read at once

    def is_due(self, step: int) -> bool:
        """Whether the values have to be read after ``step``. The same answer on every rank."""
        return step % self.every == 0 or len(self.steps) >= self._count

    def read(self, *, own_peak_bytes: int, own_signal: int) -> list[ReadStep]:
        """Exchange and read what the steps have left.

        Args:
            own_peak_bytes: The most bytes of tensors that this rank has held.
            own_signal: The signal that this rank has got; 0 for none.

        Collective:
            One all-gather of 16 bytes per step and rank, and 32 more. All ranks must call after the same step.
            The host waits for the device.
        """
        now = time.perf_counter()
        elapsed_s, self._read_at = now - self._read_at, now
        steps, self.steps = self.steps, []
        has_loss = any(step.loss is not None for step in steps)
        rows = self.control.rows(
            [elapsed_s, float(own_signal), float(own_peak_bytes), float(has_loss)],
            [value for step in steps for value in (step.loss, step.norm)],
        )
        self.signal_number = int(max(row[1] for row in rows))
        self.peak_bytes = max(self.peak_bytes, *(int(row[2]) for row in rows))
        pace_s = rows[0][0] / max(len(steps), 1)  # as rank 0 sees it: all ranks go by the same number
        self._count = max(1, math.floor(LONGEST_UNREAD_S / pace_s)) if pace_s > 0 else self.every
        found = []
        for index, step in enumerate(steps):
            place = 4 + 2 * index
            losses = {rank: row[place] / step.num_losses for rank, row in enumerate(rows) if row[3]}
            norm = None if step.norm is None else rows[self.control.rank][place + 1]
            found.append(ReadStep(losses, norm, step))
        return found
