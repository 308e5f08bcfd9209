"""Compilation of a model, unit by unit.

Each unit's ``forward`` is compiled: the hooks around it (gathers, casts, tickets) stay outside of the graph. A class is
compiled once for all its modules: their parameters are inputs of the graph, so that blocks of equal shapes share one.
Compiling the whole model would trace the engine, with a graph break at every unit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.spec.replacement import Replacement


def compile_units(model: nn.Module, units: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Make every unit that encloses no other compile its forward at the first call; returns their names.

    Values agree with the uncompiled model's up to rounding, because the compiler fuses operations and reorders sums.
    """
    innermost = {name: unit for name, unit in units.items() if not any(other.startswith(f"{name}.") for other in units)}
    for module in innermost.values() if units else (model,):
        _Compiled(module).install()
    return tuple(innermost) if units else ("",)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


class _Compiled(Replacement):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        if self._replaced is not None:
            self._replaced = torch.compile(self._replaced)
        self._of_class = _compiled(type(module).forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._replaced is not None:
            return self._replaced(*args, **kwargs)
        return self._of_class(self.module, *args, **kwargs)
