"""The values that steps leave on the device, and when the ranks read and exchange them.

Between two readings a step does not wait for the device, and communicates only for the model and its optimizer. The
values of several steps are read together, with one exchange and one wait. Steps are timed on the device, by events on
its stream.
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

from shardwise.train.checkpoints.random_state import Generators
from shardwise.train.control import Control

#: Maximum seconds between readings, so that a request to stop or a NaN loss is noticed in time.
LONGEST_PENDING_S = 10.0
#: Name of the value with a step's tokens, if each rank counts its own tokens.
TOKENS = "tokens"


class StepTime:
    """Measures the time of a step without waiting for its end."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._seconds = 0.0
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events[0].record()
        self._begin = time.perf_counter()

    def stop(self) -> None:
        """Mark the end of the step, after its last operation was issued."""
        self._seconds = time.perf_counter() - self._begin
        if self._events is not None:
            self._events[1].record()

    def seconds(self) -> float:
        """Return the step's time on its device. Call it only after the device has finished the step."""
        return self._seconds if self._events is None else self._events[0].elapsed_time(self._events[1]) / 1000


@dataclass(slots=True)
class PendingStep:
    """One step whose values are on the device."""

    time: StepTime  # duration of the step
    generators: Generators  # states of this rank's random number generators before the step
    sent_bytes: int = 0  # bytes that this rank sent
    #: Seconds that this rank's host waited for communication; ``None`` if the host does not wait
    exposed_s: float | None = None
    is_guarded: bool = True  # whether the update is skipped for a gradient that is not finite
    #: The sum over ``num_losses`` microbatches of this rank; ``None`` on a rank without a loss
    loss: Tensor | float | None = None
    num_losses: int = 1  # microbatches of a step, the same on every rank
    norm: Tensor | float | None = None  # global norm of the gradient; ``None`` if backward updates
    is_skipped: bool = False  # whether loss scaling skipped this step, for which a norm that is not finite is expected
    update: StepTime | None = None  # time of clipping and the optimizer's step; ``None`` if backward updates
    lr: float = 0.0  # learning rate of the step
    scale: float | None = None  # loss scale of the step; ``None`` without scaling
    data_s: float = 0.0  # seconds that this rank's host spent on data
    samples: list[list[int]] = field(default_factory=list)  # samples of each microbatch of this rank
    tokens: int | None = None  # tokens of the step, over all ranks; ``None``: ``values`` has them
    #: Other values of this rank by name, each as a sum and a count
    values: dict[str, tuple[Tensor | float, Tensor | float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReadStep:
    """A step whose values have been read."""

    losses: dict[int, float]  # mean loss by rank, of the ranks that have one
    norm: float | None  # global norm of the gradient
    step: PendingStep
    #: Other values by name: the sum over all ranks divided by the count over all ranks
    values: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float | None:
        """The mean loss over the ranks that have one; ``None`` if none has."""
        return sum(self.losses.values()) / len(self.losses) if self.losses else None

    @property
    def tokens(self) -> int:
        """Tokens of the step, over all ranks."""
        return round(self.values.get(TOKENS, 0)) if self.step.tokens is None else self.step.tokens


def not_finite(values: ReadStep) -> str | None:
    """Describe the first value of a step that is not finite: a rank's loss, or the gradient norm; else ``None``."""
    bad = [rank for rank, value in values.losses.items() if not math.isfinite(value)]
    if bad:
        others = f" on rank{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad))}" if len(values.losses) > 1 else ""
        return f"the loss is {values.losses[bad[0]]}{others}"
    if values.norm is not None and not values.step.is_skipped and not math.isfinite(values.norm):
        return f"the gradient norm is {values.norm}"
    return None


@dataclass(slots=True)
class PendingMetrics:
    """The steps since the last reading."""

    control: Control  # communication of the ranks
    every: int  # steps between two readings
    #: Whether steps may have values other than loss and norm, whose names the ranks must exchange
    has_values: bool = False
    steps: list[PendingStep] = field(default_factory=list)
    peak_bytes: int = 0  # peak bytes of tensors over all ranks, as of the last reading
    signal_number: int = 0  # signal that any rank had received at the last reading; 0 for none
    warning: str | None = None  # warning about a slow rank from the last reading
    slow: SlowRanks = field(init=False)
    _read_at: float = field(default_factory=time.perf_counter)
    _has_read: bool = False
    _max_pending: int = 1  # steps until the next reading is due by time; the first step is read at once

    def __post_init__(self) -> None:
        """Start the comparison of the ranks' speed."""
        self.slow = SlowRanks(self.control.size)

    def is_due(self, step: int) -> bool:
        """Return whether values must be read after ``step``, the same on every rank."""
        return step % self.every == 0 or len(self.steps) >= self._max_pending

    def read(self, *, own_peak_bytes: int, own_signal: int) -> list[ReadStep]:
        """Exchange and read the values of the steps.

        Collective:
            One all-gather of 24 bytes per step and rank, plus 40 bytes. If there are other values, one of small JSON
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
        if self._has_read:  # not for the first steps, which compile
            self.warning = self.slow.add(len(steps), [row[3] for row in rows], [row[4] for row in rows])
        self._has_read = True
        pace_s = rows[0][0] / max(len(steps), 1)  # rank 0's time, so that all ranks use the same number
        self._max_pending = max(1, math.floor(LONGEST_PENDING_S / pace_s)) if pace_s > 0 else self.every
        found, column = [], 5
        for step, of_step in zip(steps, names, strict=True):
            losses = {rank: row[column] / step.num_losses for rank, row in enumerate(rows) if row[column + 2]}
            norms = [row[column + 1] for row in rows]  # equal, unless a rank's memory is corrupted
            norm = next((each for each in norms if not math.isfinite(each)), norms[self.control.rank])
            norm = None if step.norm is None else norm
            column += 3
            values = {}
            for name in of_step:
                total, count = (sum(row[column + which] for row in rows) for which in (0, 1))
                values[name] = total / count if count else math.nan
                column += 2
            found.append(ReadStep(losses, norm, step, values))
        return found


def _own_work_s(steps: Sequence[PendingStep]) -> tuple[float, float]:
    """Return the seconds of this rank's own work in ``steps``, and the part of them spent on data.

    Own work is the time of a step without waiting for other ranks. On a GPU, where the host does not wait, it is only
    the time for data.
    """
    data_s = sum(step.data_s for step in steps)
    work_s = sum(step.data_s if step.exposed_s is None else step.time.seconds() - step.exposed_s for step in steps)
    return work_s, data_s


#: Number of steps over which ranks are compared.
COMPARED_STEPS = 20
#: A rank is slow if it takes this multiple of the others' median time, and this many seconds more per step.
SLOW_TIMES, SLOW_S = 2.0, 0.02


class SlowRanks:
    """Sums up each rank's own work, without waiting for others, and warns of a slow rank once."""

    def __init__(self, size: int) -> None:
        self._steps = 0
        self._work_s, self._data_s = [0.0] * size, [0.0] * size
        self._is_reported = False

    def add(self, num_steps: int, work_s: Sequence[float], data_s: Sequence[float]) -> str | None:
        """Add each rank's work in ``num_steps`` steps, and the part for data; return a warning if a rank is slow."""
        if self._is_reported or len(self._work_s) < 2:
            return None
        self._steps += num_steps
        self._work_s = [total + new for total, new in zip(self._work_s, work_s, strict=True)]
        self._data_s = [total + new for total, new in zip(self._data_s, data_s, strict=True)]
        if self._steps < COMPARED_STEPS:
            return None
        text = self._slowest()
        self._is_reported = text is not None
        self._steps, self._work_s, self._data_s = 0, [0.0] * len(work_s), [0.0] * len(data_s)
        return text

    def _slowest(self) -> str | None:
        slow = max(range(len(self._work_s)), key=self._work_s.__getitem__)
        own_s = self._work_s[slow]
        median_s = statistics.median(seconds for rank, seconds in enumerate(self._work_s) if rank != slow)
        if own_s < SLOW_TIMES * median_s or own_s - median_s < SLOW_S * self._steps:
            return None
        times = f"{own_s / median_s:.1f}x slower than" if median_s > 0 else "the only one that works, beside"
        return (
            f"WARNING: rank {slow} is {times} the median of the other ranks (data {self._data_s[slow] / own_s:.0%}):"
            f" {own_s / self._steps * 1000:.0f} ms of work in a step, not {median_s / self._steps * 1000:.0f} ms."
            f" All ranks wait for it."
        )
