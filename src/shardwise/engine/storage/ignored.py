"""Parameters that the engine leaves alone, as FSDP's ``ignored_modules``, ``ignored_states`` and ``ignored_params``.

They stay unsharded in their modules, and may differ between ranks. They are not compared, sent, gathered, reduced or
cast, and the optimizer updates them as any other parameter. This is for experts that differ between ranks, and for
modules that another library communicates.

==========================================  ============================================================================
``sw.full_state_dict``                      rank 0's values; the full tensor if ranks store slices (``spec.slice``)
``sw.load_full_state_dict``                 the state's values, on every rank (of slices each rank's part)
``sw.save``, ``sw.load``                    if ranks differ, each rank's own values with optimizer state (the checkpoint
                                            then loads on as many ranks); once, if all ranks have the same values
``sw.clip_grad_norm``, ``sw.summary``       not part of the norm and not scaled, except sharded rows; listed
``sw.ExponentialMovingAverage``             not averaged, except sharded rows: evaluation uses the model's
==========================================  ============================================================================
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.comm.dtype import dtype_name
from shardwise.engine.engine import Engine
from shardwise.spec.errors import PlanError
from shardwise.spec.layout import ParamSpec
from shardwise.spec.policies import name_matcher


@dataclass(frozen=True)
class Ignored:
    """Parameters and buffers that the engine leaves alone.

    Attributes:
        parameters: Parameters by name; tied ones by their first name.
        buffers: Names of the buffers of ignored modules.
        row_sharded: Names of the parameters of which every rank stores different rows (``ParallelPlan.row_sharded``).
            Their gradients arrive already reduced, and they are part of the model's norm and average.
    """

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()
    row_sharded: frozenset[str] = frozenset()

    def __contains__(self, parameter: object) -> bool:
        """Whether a parameter is ignored."""
        return id(parameter) in self._ids

    @functools.cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(map(id, self.parameters.values()))

    @property
    def names(self) -> frozenset[str]:
        """Names of parameters and buffers."""
        return self.buffers | self.parameters.keys()

    @property
    def specs(self) -> list[ParamSpec]:
        """The parameters as records of ``spec.layout``."""
        return [
            ParamSpec(name, tuple(p.shape), dtype_name(p.dtype), is_trainable=p.requires_grad)
            for name, p in self.parameters.items()
        ]

    def without(self, units: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        """The units that have a parameter that is not ignored."""
        return {name: module for name, module in units.items() if any(p not in self for p in module.parameters())}

    def inside(self, model: nn.Module) -> Ignored:
        """The ignored parameters and buffers that are in ``model``, a part of the model with the same names."""
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        remaining = {name: p for name, p in self.parameters.items() if parameters.get(name) is p}
        return Ignored(remaining, self.buffers & buffers.keys(), self.row_sharded & remaining.keys())

    def with_row_sharded(self, parameters: Mapping[str, nn.Parameter]) -> Ignored:
        """The same, and in addition parameters whose rows are sharded over the ranks."""
        return Ignored(self.parameters | dict(parameters), self.buffers, frozenset(parameters))

    @property
    def row_sharded_parameters(self) -> dict[str, nn.Parameter]:
        """The rows that this rank stores, by name of the full parameter."""
        return {name: self.parameters[name] for name in sorted(self.row_sharded)}


#: No ignored parameters.
NOTHING = Ignored()


def ignored_of(engine: Engine) -> Ignored:
    """The parameters and buffers that the engine ignores."""
    return engine.extras.find(Ignored) or NOTHING


def find_ignored(model: nn.Module, entries: Iterable[Any]) -> Ignored:
    """Return the parameters and buffers of ``model`` that ``entries`` name.

    Args:
        model: The model.
        entries: Shell patterns of module or parameter names (``*`` does not cross a dot), modules, parameters. A module
            includes everything below it. A tied parameter is ignored wherever it is used.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    chosen: set[int] = set()
    tensors: set[int] = set()
    for entry in entries:
        found = list(_named(entry, modules, parameters))
        if not found:
            raise PlanError(_not_there(model, entry, modules, parameters))
        for each in found:
            if isinstance(each, nn.Module):
                chosen.update(id(part) for part in each.modules())
                tensors.update(id(parameter) for parameter in each.parameters())
            else:
                tensors.add(id(each))
    return Ignored(
        {name: parameter for name, parameter in model.named_parameters() if id(parameter) in tensors},
        frozenset(name for name, _ in model.named_buffers() if id(modules[name.rpartition(".")[0]]) in chosen),
    )


def _named(entry: Any, modules: dict[str, nn.Module], parameters: dict[str, nn.Parameter]) -> Iterator[Any]:
    everything: dict[str, Any] = {**modules, **parameters}
    if isinstance(entry, str):
        matches = name_matcher(entry)
        yield from (each for name, each in everything.items() if name and matches(name))
    elif any(each is entry for each in everything.values()):
        yield entry


def _not_there(model: nn.Module, entry: Any, modules: dict[str, nn.Module], parameters: dict[str, Any]) -> str:
    kind = type(model).__name__
    if isinstance(entry, str):
        shown = ", ".join([*list(modules)[1:6], *list(parameters)[:3]])
        return f"ignored: {entry!r} matches no module and no parameter of {kind}.\n  Names in it: {shown}, ..."
    what = f"a parameter of shape {list(entry.shape)}" if isinstance(entry, torch.Tensor) else type(entry).__name__
    return f"ignored: {what} is not in {kind}.\n  Pass modules and parameters of this very model, or their names."
