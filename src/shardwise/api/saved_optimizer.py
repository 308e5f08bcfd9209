"""The optimizer's section of a checkpoint, checked before anything is changed; names of groups and tied parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from shardwise.comm.control import all_gather_json
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.flat_parameters import FlatParameter
from shardwise.engine.storage.ignored import ignored_of
from shardwise.spec.errors import CheckpointError
from shardwise.spec.text import aligned, printable

#: A number of an optimizer is less, also an integer, which JSON does not limit.
_MOST = 2.0**1000


class SavedOptimizer(BaseModel):
    """The entry ``optimizer`` of a checkpoint that ``sw.save`` wrote.

    Attributes:
        kind: Name of the optimizer's class.
        groups: Settings of each parameter group.
        scalars: Per-parameter state that is a number, by the parameter's name.
        members: Names of the parameters in each group; ``None`` where one group has all.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    kind: str = Field(alias="class", max_length=1024)
    groups: list[dict[str, Any]]
    scalars: dict[str, dict[str, bool | int | float]]
    members: list[list[str]] | None = None


class _SavedAverage(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    decay: float = Field(ge=0, lt=1)
    num_updates: int = Field(ge=0, lt=2**60)


def read_average(path: Path, entry: Any) -> dict[str, Any]:
    """The entry ``average`` of a checkpoint: the decay of averaged weights, and their number of updates.

    Raises:
        CheckpointError: It is not such an entry.
    """
    try:
        return _SavedAverage.model_validate(entry).model_dump()
    except pydantic.ValidationError as error:
        raise refused(path, [f"average: {item['msg']}" for item in error.errors(include_url=False)[:5]]) from None


def read_optimizer(path: Path, entry: Any) -> SavedOptimizer:
    """The entry, or an error that names what is wrong in it.

    Raises:
        CheckpointError: It is not such an entry.
    """
    try:
        found = SavedOptimizer.model_validate(entry)
    except pydantic.ValidationError as error:
        lines = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_url=False)[:5]]
        raise refused(path, lines) from None
    wrong = [
        f"{name}.{key} is {value}"
        for name, numbers in found.scalars.items()
        for key, value in numbers.items()
        if (key == "step" and not (0 <= value < 2**60 and value == int(value))) or abs(value) >= _MOST
    ]
    num_members = 1 if found.members is None else len(found.members)
    if num_members != len(found.groups):
        wrong.append(f"members has {num_members} groups, groups has {len(found.groups)}")
    if wrong:
        raise refused(path, wrong[:5])
    return found


def changed_settings(
    path: Path, saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> list[tuple[str, Any, Any]]:
    """The settings that loading would change: which one, its value here and the saved one.

    Args:
        path: The checkpoint, for messages.
        saved: Settings of each group, in the order of ``groups``.
        groups: The optimizer's own groups.

    Raises:
        CheckpointError: A saved setting is of another kind than the optimizer's own, or it has none of this name.
    """
    changed, wrong = [], []
    for number, (settings, group) in enumerate(zip(saved, groups, strict=True)):
        for key, value in settings.items():
            where = f"groups.{number}.{key}"
            own = group.get(key)
            own = own.item() if isinstance(own, Tensor) and own.dim() == 0 else own
            if key == "params" or (key not in group and key != "initial_lr"):
                wrong.append(f"{where}: the optimizer has no such setting")
            elif not _are_alike(own, value):
                wrong.append(f"{where} is {value!r}, and {own!r} in the optimizer")
            elif key in group and own != value and own != tuple(_listed(value)):
                changed.append((where, own, value))
    if wrong:
        raise refused(path, wrong[:5])
    return changed


def refuse_unknown(path: Path, saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse settings that the optimizer does not have, or not yet; arguments as of :func:`changed_settings`.

    Raises:
        CheckpointError: There are some; it names them.
    """
    unknown = [
        f"groups.{number}.{key}"
        for number, (settings, group) in enumerate(zip(saved, groups, strict=True))
        for key in settings.keys() - group.keys() - {"params", "initial_lr"}
    ]
    if unknown:
        more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
        raise CheckpointError(
            f"checkpoint {printable(path)} holds settings that the optimizer does not have:"
            f" {printable(', '.join(sorted(unknown)[:8]))}{more}. A scheduler adds such keys when it is made"
            " (OneCycleLR: max_lr, min_lr), or the code that builds the parameter groups does (timm: lr_scale).\n"
            "  Build the same groups and make the scheduler before sw.load, as before the save; or call"
            " sw.load(..., keep_settings=True), which leaves all settings as they are."
        )


def describe_changes(changed: Sequence[tuple[str, Any, Any]]) -> str:
    """A table of settings that differ."""
    rows = [("setting", "in the optimizer", "saved"), *((key, str(own), str(value)) for key, own, value in changed)]
    return "\n".join(f"  {line}" for line in aligned(rows, words=range(3)))


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _are_alike(own: Any, value: Any) -> bool:
    """Whether a saved value can take the place of the optimizer's own."""
    if own is None or value is None:
        return True
    if isinstance(own, bool) or isinstance(value, bool):
        return isinstance(own, bool) and isinstance(value, bool)
    if isinstance(own, int | float):
        return isinstance(value, int | float) and (abs(value) < _MOST or not math.isfinite(own))
    if isinstance(own, list | tuple):
        return isinstance(value, list | tuple) and len(own) == len(value) and all(map(_are_alike, own, value))
    return isinstance(value, type(own))


def refused(path: Path, lines: Sequence[str]) -> CheckpointError:
    """The error for what cannot be right in a checkpoint's entry."""
    listed = "".join(f"\n  - {printable(line)}" for line in lines)
    return CheckpointError(
        f"checkpoint {printable(path)}: what it says of its optimizer cannot be right:{listed}\n"
        "  It was changed by hand or damaged. Resume from another checkpoint, or load without the optimizer."
    )


# -- names

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
