"""Compiling a model unit by unit.

What is compiled is each unit's ``forward``: the hooks around it (gathers, casts, tickets) stay outside of the graph. A
class is compiled once for all of its modules: their parameters are inputs of the graph, so blocks of equal shapes share
one. Compiling the model as a whole instead would trace the engine, with a graph break at every unit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.spec.replacement import Replacement


def compile_units(model: nn.Module, units: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Compile, at its first call, the forward of every unit that encloses no other; returns their names.

    Values agree with the uncompiled model's within rounding: the compiler fuses operations and orders sums otherwise.
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
