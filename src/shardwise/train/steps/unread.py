"""The values that steps leave on the device, and when the ranks read and exchange them.

Between two readings a step neither waits for the device nor exchanges anything beside what the model and its optimizer
do. Values of several steps are read together, with one exchange and one wait, when they are due. Steps are timed on the
device, by events on its stream.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from shardwise.train.control import Control
from shardwise.train.saves.random_state import Generators

#: Values are read this often at least (in seconds), so that a request to stop or a loss of NaN is noticed in time.
LONGEST_UNREAD_S = 10.0
#: Among the values of a step, its tokens, where each rank counts its own.
TOKENS = "tokens"


class StepTime:
    """The time of a step, taken without waiting for its end."""

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
    """One step whose values are on the device."""

    time: StepTime  # duration of the step
    generators: Generators  # the states of this rank's random number generators before the step
    sent_bytes: int = 0  # bytes that this rank sent
    #: Seconds that this rank's host waited for communication; ``None`` where the host does not wait
    exposed_s: float | None = None
    is_guarded: bool = True  # the update was left out where the gradient is not finite
    #: The sum over ``num_losses`` microbatches of this rank; ``None`` on a rank that has no loss
    loss: Tensor | float | None = None
    num_losses: int = 1  # microbatches of a step, the same on every rank
    norm: Tensor | float | None = None  # the global norm of the gradient; ``None`` where backward updates
    is_skipped: bool = False  # loss scaling has left this step out: its norm is not finite, and rightly so
    update: StepTime | None = None  # of the time, clipping and the optimizer's step; ``None`` where backward updates
    lr: float = 0.0  # learning rate of the step
    scale: float | None = None  # loss scale of the step; ``None`` where nothing is scaled
    data_s: float = 0.0  # seconds that this rank's host spent on data
    samples: list[list[int]] = field(default_factory=list)  # the samples of each microbatch of this rank
    tokens: int | None = None  # tokens of the step, over all ranks; ``None``: ``values`` has them
    #: Other values by name, each a sum and the count that it is of, on this rank
    values: dict[str, tuple[Tensor | float, Tensor | float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReadStep:
    """A step whose values have been read."""

    losses: dict[int, float]  # the mean loss of every rank that has one, by rank
    norm: float | None  # the global norm of the gradient
    step: UnreadStep  # the step itself
    #: Other values by name: the sums of all ranks over their counts
    values: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float | None:
        """The mean loss over the ranks that have one; ``None`` where none has."""
        return sum(self.losses.values()) / len(self.losses) if self.losses else None

    @property
    def tokens(self) -> int:
        """Tokens of the step, over all ranks."""
        return round(self.values.get(TOKENS, 0)) if self.step.tokens is None else self.step.tokens


def not_finite(values: ReadStep) -> str | None:
    """The first value of a step that is not finite: its loss on some ranks, or its gradient's norm; else ``None``."""
    bad = [rank for rank, value in values.losses.items() if not math.isfinite(value)]
    if bad:
        others = f" on rank{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad))}" if len(values.losses) > 1 else ""
        return f"the loss is {values.losses[bad[0]]}{others}"
    if values.norm is not None and not values.step.is_skipped and not math.isfinite(values.norm):
        return f"the gradient norm is {values.norm}"
    return None


@dataclass(slots=True)
class UnreadSteps:
    """The steps since the last reading."""

    control: Control  # the ranks' channel
    every: int  # steps between two readings
    #: Steps may have other values than loss and norm, under names that the ranks then tell each other
    has_values: bool = False
    steps: list[UnreadStep] = field(default_factory=list)
    peak_bytes: int = 0  # most bytes of tensors that any rank has held, as of the last reading
    signal_number: int = 0  # a signal that any rank had got by then; 0 for none
    warning: str | None = None  # what the last reading has found of a slow rank, once
    slow: SlowRanks = field(init=False)  # finds it
    _read_at: float = field(default_factory=time.perf_counter)
    _has_read: bool = False
    _count: int = 1  # of steps before the next reading is due by time; the first step is read at once

    def __post_init__(self) -> None:
        """Begin to compare the ranks."""
        self.slow = SlowRanks(self.control.size)

    def is_due(self, step: int) -> bool:
        """Whether the values have to be read after ``step``. The same answer on every rank."""
        return step % self.every == 0 or len(self.steps) >= self._count

    def read(self, *, own_peak_bytes: int, own_signal: int) -> list[ReadStep]:
        """Exchange and read what the steps have left.

        Collective:
            One all-gather of 24 bytes per step and rank, and 40 more; where there are other values one of small JSON
            before it, and 16 bytes per value. All ranks must call after the same step. The host waits for the device.
        """
        now = time.perf_counter()
        elapsed_s, self._read_at = now - self._read_at, now
        steps, self.steps = self.steps, []
        names = [sorted(step.values) for step in steps]
        if self.has_values:
            names = [sorted({*chain(*of_step)}) for of_step in zip(*self.control.all_json(names), strict=True)]
        columns: list[Tensor | float | None] = []
        for step, of_step in zip(steps, names, strict=True):
            columns += [step.loss, step.norm, float(step.loss is not None)]
            columns += chain(*(step.values.get(name, (0.0, 0.0)) for name in of_step))
        rows = self.control.rows([elapsed_s, float(own_signal), float(own_peak_bytes), *_own_work_s(steps)], columns)
        self.signal_number = int(max(row[1] for row in rows))
        self.peak_bytes = max(self.peak_bytes, *(int(row[2]) for row in rows))
        self.warning = None
        if self._has_read:  # the first steps compile
            self.warning = self.slow.add(len(steps), [row[3] for row in rows], [row[4] for row in rows])
        self._has_read = True
        pace_s = rows[0][0] / max(len(steps), 1)  # as rank 0 sees it: all ranks go by the same number
        self._count = max(1, math.floor(LONGEST_UNREAD_S / pace_s)) if pace_s > 0 else self.every
        found, place = [], 5
        for step, of_step in zip(steps, names, strict=True):
            losses = {rank: row[place] / step.num_losses for rank, row in enumerate(rows) if row[place + 2]}
            norms = [row[place + 1] for row in rows]  # equal, unless the memory of a rank is damaged
            norm = next((each for each in norms if not math.isfinite(each)), norms[self.control.rank])
            norm = None if step.norm is None else norm
            place += 3
            values = {}
            for name in of_step:
                total, count = (sum(row[place + which] for row in rows) for which in (0, 1))
                values[name] = total / count if count else math.nan
                place += 2
            found.append(ReadStep(losses, norm, step, values))
        return found


def _own_work_s(steps: Sequence[UnreadStep]) -> tuple[float, float]:
    """Seconds of this rank's own work in ``steps``, and of that for data.

    Work is what a step takes without waiting for other ranks. Where the host does not wait (on a GPU) only data counts.
    """
    data_s = sum(step.data_s for step in steps)
    work_s = sum(step.data_s if step.exposed_s is None else step.time.seconds() - step.exposed_s for step in steps)
    return work_s, data_s


#: Steps over which ranks are compared.
COMPARED_STEPS = 20
#: A rank is slow that takes so many times as long as the median of the others, and so much longer in a step.
SLOW_TIMES, SLOW_S = 2.0, 0.02


class SlowRanks:
    """Adds up each rank's own work, which is its time without waiting for others, and names a slow rank once."""

    def __init__(self, size: int) -> None:
        self._steps = 0
        self._work_s, self._data_s = [0.0] * size, [0.0] * size
        self._is_told = False

    def add(self, num_steps: int, work_s: Sequence[float], data_s: Sequence[float]) -> str | None:
        """Add each rank's work in ``num_steps`` steps, and its part for data; a warning where there is a new one."""
        if self._is_told or len(self._work_s) < 2:
            return None
        self._steps += num_steps
        self._work_s = [held + new for held, new in zip(self._work_s, work_s, strict=True)]
        self._data_s = [held + new for held, new in zip(self._data_s, data_s, strict=True)]
        if self._steps < COMPARED_STEPS:
            return None
        text = self._slowest()
        self._is_told = text is not None
        self._steps, self._work_s, self._data_s = 0, [0.0] * len(work_s), [0.0] * len(data_s)
        return text

    def _slowest(self) -> str | None:
        slow = max(range(len(self._work_s)), key=self._work_s.__getitem__)
        own_s = self._work_s[slow]
        median_s = statistics.median(held for rank, held in enumerate(self._work_s) if rank != slow)
        if own_s < SLOW_TIMES * median_s or own_s - median_s < SLOW_S * self._steps:
            return None
        times = f"{own_s / median_s:.1f}x slower than" if median_s > 0 else "the only one that works, beside"
        return (
            f"WARNING: rank {slow} is {times} the median of the other ranks (data {self._data_s[slow] / own_s:.0%}):"
            f" {own_s / self._steps * 1000:.0f} ms of work in a step, not {median_s / self._steps * 1000:.0f} ms."
            f" All ranks wait for it."
        )
