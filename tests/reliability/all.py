"""All scenarios: importing a section registers its scenarios."""

from __future__ import annotations

from tests.reliability import baseline, inputs, numbers, processes, reads, writes  # noqa: F401
from tests.reliability.board import BASELINES, SCENARIOS

__all__ = ["BASELINES", "SCENARIOS"]
