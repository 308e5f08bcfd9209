"""A rank that is slower than the others, found in what the ranks exchange anyway."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

#: Steps over which ranks are compared.
WINDOW_STEPS = 20
#: A rank is slow that takes so many times as long as the median of the others, and so much longer in a step.
TIMES, LEAST_S = 2.0, 0.02


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
        if self._steps < WINDOW_STEPS:
            return None
        text = self._slowest()
        self._is_told = text is not None
        self._steps, self._work_s, self._data_s = 0, [0.0] * len(work_s), [0.0] * len(data_s)
        return text

    def _slowest(self) -> str | None:
        slow = max(range(len(self._work_s)), key=self._work_s.__getitem__)
        own_s = self._work_s[slow]
        median_s = statistics.median(held for rank, held in enumerate(self._work_s) if rank != slow)
        if own_s < TIMES * median_s or own_s - median_s < LEAST_S * self._steps:
            return None
        times = f"{own_s / median_s:.1f}x slower than" if median_s > 0 else "the only one that works, beside"
        return (
            f"WARNING: rank {slow} is {times} the median of the other ranks (data {self._data_s[slow] / own_s:.0%}):"
            f" {own_s / self._steps * 1000:.0f} ms of work in a step, not {median_s / self._steps * 1000:.0f} ms."
            f" All ranks wait for it."
        )
