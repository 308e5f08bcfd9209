"""Losses that stand out from those before them."""

from __future__ import annotations

import collections
import math
import statistics

#: Losses of so many steps are compared with, and so few are too few.
_WINDOW, _LEAST = 100, 20
#: A median absolute deviation times this is a standard deviation, where values are normally distributed.
_DEVIATIONS = 1.4826


class LossSpikes:
    """Compares each loss with the median of those before it, in units of their spread.

    A median and the median of distances from it are not moved by a few losses that stand out themselves.
    """

    def __init__(self, threshold: float) -> None:
        """Take how many standard deviations above the median a loss stands out."""
        self._threshold = threshold
        self._losses: collections.deque[float] = collections.deque(maxlen=_WINDOW)

    def look(self, loss: float) -> str | None:
        """Say how far a loss stands out, if it does, and keep it for the next ones."""
        before = list(self._losses)
        if math.isfinite(loss):
            self._losses.append(loss)
        if len(before) < _LEAST or not math.isfinite(loss):
            return None
        median = statistics.median(before)
        spread = _DEVIATIONS * statistics.median(abs(each - median) for each in before)
        spread = max(spread, 1e-3 * abs(median))  # losses that are all but equal
        if not spread or loss - median <= self._threshold * spread:
            return None
        return (
            f"the loss is {loss:.4f}, {(loss - median) / spread:.0f} standard deviations above the median {median:.4f}"
            f" of the {len(before)} steps before"
        )
