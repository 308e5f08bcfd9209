"""Settings of a process that runs tests: cached state to reset between tests, and the time limit for stalls."""

from __future__ import annotations

import torch

from shardwise.comm import stall
from shardwise.engine.storage import optimizer
from shardwise.launch import log_once


def forget_notices() -> None:
    """Forget which notices were printed, so that each is printed once again."""
    log_once._printed.clear()  # noqa: SLF001


def forget_declaration(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """Undo ``sw.declare_elementwise`` or ``sw.declare_granularity`` for a class."""
    del optimizer._NEEDS[optimizer_class]  # noqa: SLF001


def report_stalls_after(seconds: float, *, idle_interval_s: float | None = None) -> None:
    """Report a collective as stalled after ``seconds``, for the rest of this process, a rank of a test.

    Args:
        seconds: Time after which ranks search for the cause of a wait; must exceed delays on a busy machine.
        idle_interval_s: Seconds between two checks while no collective is running; ``None``: unchanged.
    """
    stall.STALL_S, stall.INTERVAL_S = seconds, 0.1
    if idle_interval_s is not None:
        stall.IDLE_INTERVAL_S = idle_interval_s
