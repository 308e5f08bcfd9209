"""How far two numbers are apart."""

from __future__ import annotations

import math


def worst(*values: float) -> float:
    """The largest; infinite where one is not a number, which ``max`` passes over."""
    return max(math.inf if math.isnan(value) else value for value in values)
