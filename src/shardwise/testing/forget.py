"""What a process remembers, forgotten again, so that one test does not change the next."""

from __future__ import annotations

import torch

from shardwise.engine import notice
from shardwise.optim import checks


def forget_notices() -> None:
    """Print what is told once in a process again, when it comes up again."""
    notice._told.clear()  # noqa: SLF001


def forget_declaration(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """Take ``sw.declare_elementwise`` or ``sw.declare_granularity`` of a class back."""
    del checks._NEEDS[optimizer_class]  # noqa: SLF001
