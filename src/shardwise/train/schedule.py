"""The learning rate as a pure function of the step. No torch.

With ``W`` warm-up steps of ``S`` in all, step ``s`` (counted from 0) is trained with ``lr * ratio(s)``:

- warm-up, ``s < W``: ``(s + 1) / W``, so that no step is wasted on a rate of zero;
- ``constant``: 1;
- afterwards, with ``t = (s - W) / max(1, S - 1 - W)`` from 0 at the first step to 1 at the last and ``m`` the
  ``min_lr_ratio``: ``linear``: ``1 - (1 - m) t``; ``cosine``: ``m + (1 - m) (1 + cos(pi t)) / 2``;
- ``warmup-stable-decay``: 1, but in the last ``D`` steps linear down to ``m`` at the very last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule with everything filled in."""

    name: str
    steps: int
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    decay_steps: int = 0

    def ratio(self, step: int) -> float:
        """Learning rate of ``step`` (from 0) over the peak rate."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.name == "constant":
            return 1.0
        last = self.steps - 1
        start = (
            max(self.warmup_steps, self.steps - self.decay_steps - 1)
            if self.name == "warmup-stable-decay"
            else self.warmup_steps
        )
        t = min(1.0, max(0.0, (step - start) / max(1, last - start)))
        if self.name == "cosine":
            return self.min_lr_ratio + (1 - self.min_lr_ratio) * (1 + math.cos(math.pi * t)) / 2
        return 1 - (1 - self.min_lr_ratio) * t
