"""Counts products and attention that are computed, as selective recomputation keeps them."""

from __future__ import annotations

from typing import Any

from shardwise.engine.extensions import selective
from shardwise.torch_private import TorchDispatchMode

FAMILIES = ("matmul", "attention")


class Products(TorchDispatchMode):
    """Counts the operators of the families."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen = {operator for name in FAMILIES for operator in selective.operators(name)}
        self.count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operator in self.chosen
        return operator(*args, **(kwargs or {}))
