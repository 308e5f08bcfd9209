"""Parameters that the engine leaves alone, as FSDP's ``ignored_modules``, ``ignored_states`` and ``ignored_params``.

They stay what they are: whole, in their modules, each rank's own. Nothing of them is compared, sent, gathered, reduced
or cast, and the optimizer sees them as any other parameter. Experts that differ from rank to rank are what this is for,
and parts that another library moves.

==========================================  ============================================================================
``sw.full_state_dict``                      rank 0's values; the whole, where ranks hold slices (``spec.slice``)
``sw.load_full_state_dict``                 the state's values, on every rank (of slices each rank's part)
``sw.save``, ``sw.load``                    each rank's own, with optimizer state, where ranks differ (the checkpoint
                                            then loads on as many ranks); once, where all hold the same
``sw.clip_grad_norm``, ``sw.summary``       not part of the norm and not scaled (but :attr:`Ignored.spread`); named
``sw.ExponentialMovingAverage``             not averaged (but :attr:`Ignored.spread`): evaluation takes the model's own
==========================================  ============================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from shardwise.engine.unit import Ignored
from shardwise.spec.errors import PlanError
from shardwise.spec.policies import name_matcher


def find_ignored(model: nn.Module, entries: Iterable[Any]) -> Ignored:
    """The parameters and buffers of ``model`` that are left alone.

    Args:
        model: The model.
        entries: Shell patterns of module or parameter names (``*`` does not cross a dot), modules, parameters. Of a
            module, everything below it is meant. A tied parameter is ignored wherever it is used.

    Raises:
        PlanError: One of them is not in the model.
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
