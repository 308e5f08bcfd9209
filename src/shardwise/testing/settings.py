"""Settings of a process that runs tests: what it forgets between them, and how soon a stall is reported."""

from __future__ import annotations

import torch

from shardwise.comm import stall
from shardwise.engine.storage import optimizer
from shardwise.launch import notice


def forget_notices() -> None:
    """Print what is told once in a process again, when it comes up again."""
    notice._told.clear()  # noqa: SLF001


def forget_declaration(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """Take ``sw.declare_elementwise`` or ``sw.declare_granularity`` of a class back."""
    del optimizer._NEEDS[optimizer_class]  # noqa: SLF001


def report_stalls_after(seconds: float, *, idle_interval_s: float | None = None) -> None:
    """Take a collective for stalled after ``seconds``; for the rest of this process, which is a rank of a test.

    Args:
        seconds: After which ranks look for what keeps each other; a busy machine must not take as long by itself.
        idle_interval_s: Between two looks while nothing is under way; ``None``: as it is.
    """
    stall.STALL_S, stall.INTERVAL_S = seconds, 0.1
    if idle_interval_s is not None:
        stall.IDLE_INTERVAL_S = idle_interval_s
