"""Names in checkpoints: the parameters in each group of an optimizer, and the tied parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.control import all_gather_json
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.flat_parameters import FlatParameter
from shardwise.engine.storage.ignored import ignored_of
from shardwise.spec.errors import CheckpointError

Optimizers = Sequence[torch.optim.Optimizer]


def groups_of(optimizers: Optimizers) -> list[dict[str, Any]]:
    """The groups of all optimizers, one after the other."""
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def shared_members(model: nn.Module, optimizers: Optimizers) -> list[list[str]] | None:
    """Names of the parameters in each group, equal on all ranks; ``None`` where one group has all.

    Collective:
        Where there are several groups, an all-gather of JSON.
    """
    if len(groups_of(optimizers)) == 1:
        return None
    everyone = all_gather_json(engine_of(model, "sw.save").comms.world, members_here(model, optimizers))
    return [sorted(set[str]().union(*held)) for held in zip(*everyone, strict=True)]


def members_here(model: nn.Module, optimizers: Optimizers) -> list[list[str]]:
    """Names of the parameters in each group of which this rank has a part."""
    engine = engine_of(model, "sw.save")
    names: dict[Tensor, str] = {parameter: name for name, parameter in ignored_of(engine).parameters.items()}
    for group in engine.groups:
        names |= {shard: spec.name for spec, shard in zip(group.layout.params, group.shards, strict=True)}
    found = []
    for settings in groups_of(optimizers):
        held = [
            parameter
            for given in settings["params"]
            for parameter in (given.shards if isinstance(given, FlatParameter) else (given,))
        ]
        found.append([names[parameter] for parameter in held if parameter in names])
    return found


def settings_by_group(
    members: Sequence[Sequence[str]], groups: list[dict[str, Any]], before: Sequence[Sequence[str]] | None
) -> list[dict[str, Any]]:
    """The saved settings for each group of an optimizer.

    Args:
        members: Names in each group, as far as this rank has parts of them.
        groups: Settings of each saved group.
        before: Names in each saved group; ``None``: groups are taken in their order.

    Raises:
        CheckpointError: Parameters of one group were in different ones.
    """
    if before is None:
        return groups
    place_of = {name: place for place, names in enumerate(before) for name in names}
    found = []
    for place, names in enumerate(members):
        places = {place_of[name]: name for name in names if name in place_of} or {place: ""}
        if len(places) > 1:
            first, second, *_ = places.values()
            raise CheckpointError(
                f"{first!r} and {second!r} are in one parameter group of the optimizer, and were in different ones when"
                " the checkpoint was saved.\n  Build the optimizer with the same groups."
            )
        found.append(groups[next(iter(places))])
    return found


def tied_names(model: nn.Module) -> dict[str, str]:
    """The further names of tied parameters, with the name under which a checkpoint has each; equal on all ranks.

    Collective:
        With ``pp``, where a rank has the modules of one stage, an all-gather of JSON.
    """
    first: dict[int, str] = {}
    found = {
        name: known
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if (known := first.setdefault(id(parameter), name)) != name
    }
    comms = engine_of(model, "sw.save").comms
    everyone = [found] if comms.pp is None else all_gather_json(comms.world, found)
    return {name: known for held in everyone for name, known in held.items()}
