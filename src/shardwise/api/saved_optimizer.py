"""The optimizer's section of a checkpoint, checked before anything is changed; names of groups and tied parameters."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Collection, Mapping, Sequence
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

Optimizers = Sequence[torch.optim.Optimizer]

#: Upper bound of the numbers in an optimizer's state, also of integers, which JSON does not limit.
_MOST = 2.0**1000

#: Settings that a group gets later: from a scheduler, and in the first step of optimizers that count in the group.
_ADDED = {"initial_lr", "step"}


class SavedOptimizer(BaseModel):
    """The entry ``optimizer`` of a checkpoint that ``sw.save`` wrote.

    Attributes:
        kind: Name of the optimizer's class.
        groups: Settings of each parameter group.
        scalars: Per-parameter state that is a number, by the parameter's name.
        members: Names of the parameters in each group; ``None`` if there is only one group.
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
    """Return the entry ``average`` of a checkpoint: the decay of averaged weights, and their number of updates.

    Raises:
        CheckpointError: The entry is not valid.
    """
    try:
        return _SavedAverage.model_validate(entry).model_dump()
    except pydantic.ValidationError as error:
        raise refused(path, [f"average: {item['msg']}" for item in error.errors(include_url=False)[:5]]) from None


def read_optimizer(path: Path, entry: Any) -> SavedOptimizer:
    """Return the entry ``optimizer``, validated.

    Raises:
        CheckpointError: The entry is not valid; the message names the wrong fields.
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


def settings_of_code(optimizers: Optimizers, saved: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the saved settings that the optimizers' own code names: some count in a group from their first step on."""
    found: set[str] = set()
    for optimizer in optimizers:
        with contextlib.suppress(OSError, TypeError):  # a class without source
            code = inspect.getsource(type(optimizer))
            found |= {key for settings in saved for key in settings if f'"{key}"' in code or f"'{key}'" in code}
    return found


def changed_settings(
    path: Path,
    saved: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    added: Collection[str] = (),
) -> list[tuple[str, Any, Any]]:
    """Return the settings that loading would change: name, current value and saved value.

    Args:
        path: The checkpoint, for messages.
        saved: Settings of each group, in the order of ``groups``.
        groups: The optimizer's own groups.
        added: Settings that groups may get later (:func:`settings_of_code`).

    Raises:
        CheckpointError: A saved setting has another type than the optimizer's, or the optimizer has no such setting.
    """
    changed, wrong = [], []
    for number, (settings, group) in enumerate(zip(saved, groups, strict=True)):
        for key, value in settings.items():
            where = f"groups.{number}.{key}"
            own = group.get(key)
            own = own.item() if isinstance(own, Tensor) and own.dim() == 0 else own
            if key == "params" or key not in group.keys() | _ADDED | set(added):
                wrong.append(f"{where}: the optimizer has no such setting")
            elif not _are_alike(own, value):
                wrong.append(f"{where} is {value!r}, and {own!r} in the optimizer")
            elif key in group and own != value and own != tuple(_as_list(value)):
                changed.append((where, own, value))
    if wrong:
        raise refused(path, wrong[:5])
    return changed


def refuse_unknown(
    path: Path, saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], added: Collection[str]
) -> None:
    """Refuse saved settings that the optimizer does not have, or not yet; arguments as of :func:`changed_settings`.

    Raises:
        CheckpointError: There are such settings; the message names them.
    """
    unknown = [
        f"groups.{number}.{key}"
        for number, (settings, group) in enumerate(zip(saved, groups, strict=True))
        for key in settings.keys() - group.keys() - _ADDED - {"params", *added}
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
    """Return a table of settings that differ."""
    rows = [("setting", "in the optimizer", "saved"), *((key, str(own), str(value)) for key, own, value in changed)]
    return "\n".join(f"  {line}" for line in aligned(rows, words=range(3)))


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _are_alike(own: Any, value: Any) -> bool:
    """Return whether a saved value may replace the optimizer's value: both have the same type."""
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
    """Return the error for invalid content in a checkpoint's entry about its optimizer."""
    listed = "".join(f"\n  - {printable(line)}" for line in lines)
    return CheckpointError(
        f"checkpoint {printable(path)}: what it says of its optimizer cannot be right:{listed}\n"
        "  Another version of shardwise wrote it, or it was changed by hand or damaged. Resume from another checkpoint,"
        " or load without the optimizer."
    )


# -- names


def refuse_wrappers(optimizers: Optimizers) -> None:
    """Refuse an optimizer around another one if each has state, because a checkpoint holds that of one.

    Raises:
        CheckpointError: There is such an optimizer.
    """
    for outer in optimizers:
        for attribute, inner in vars(outer).items():
            if isinstance(inner, torch.optim.Optimizer) and inner.state is not outer.state:
                name, inside = type(outer).__name__, type(inner).__name__
                raise CheckpointError(
                    f"sw.save got a {name} around a {inside}, and each keeps state of its own: that of the {inside}"
                    " would be missing from the checkpoint.\n"
                    f"  Pass the {inside} to sw.save and sw.load (optimizer.{attribute}). The {name}'s own state then"
                    " begins anew with a resumed run."
                )


def groups_of(optimizers: Optimizers) -> list[dict[str, Any]]:
    """Return the parameter groups of all optimizers in one list."""
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def shared_members(model: nn.Module, optimizers: Optimizers) -> list[list[str]] | None:
    """Return the names of the parameters in each group, equal on all ranks; ``None`` if there is only one group.

    Collective:
        An all-gather of JSON if there are several groups.
    """
    if len(groups_of(optimizers)) == 1:
        return None
    everyone = all_gather_json(engine_of(model, "sw.save").comms.world, members_here(model, optimizers))
    return [sorted(set[str]().union(*names)) for names in zip(*everyone, strict=True)]


def members_here(model: nn.Module, optimizers: Optimizers) -> list[list[str]]:
    """Return the names of the parameters in each group of which this rank owns a part."""
    engine = engine_of(model, "sw.save")
    names: dict[Tensor, str] = {parameter: name for name, parameter in ignored_of(engine).parameters.items()}
    for group in engine.groups:
        names |= {shard: spec.name for spec, shard in zip(group.layout.params, group.shards, strict=True)}
    found = []
    for settings in groups_of(optimizers):
        parameters = [
            parameter
            for given in settings["params"]
            for parameter in (given.shards if isinstance(given, FlatParameter) else (given,))
        ]
        found.append([names[parameter] for parameter in parameters if parameter in names])
    return found


def settings_by_group(
    members: Sequence[Sequence[str]], groups: list[dict[str, Any]], before: Sequence[Sequence[str]] | None
) -> list[dict[str, Any]]:
    """Return the saved settings for each group of an optimizer.

    Args:
        members: Names in each group, as far as this rank owns parts of them.
        groups: Settings of each saved group.
        before: Names in each saved group; ``None``: groups are matched by position.

    Raises:
        CheckpointError: Parameters of one group were saved in different groups.
    """
    if before is None:
        return groups
    place_of = {name: index for index, names in enumerate(before) for name in names}
    found = []
    for index, names in enumerate(members):
        found_in = {place_of[name]: name for name in names if name in place_of} or {index: ""}
        if len(found_in) > 1:
            first, second, *_ = found_in.values()
            raise CheckpointError(
                f"{first!r} and {second!r} are in one parameter group of the optimizer, and were in different ones when"
                " the checkpoint was saved.\n  Build the optimizer with the same groups."
            )
        found.append(groups[next(iter(found_in))])
    return found


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map the other names of tied parameters to the name under which a checkpoint stores them; equal on all ranks.

    Collective:
        With ``pp``, where each rank has the modules of one stage, an all-gather of JSON.
    """
    first: dict[int, str] = {}
    found = {
        name: known
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if (known := first.setdefault(id(parameter), name)) != name
    }
    comms = engine_of(model, "sw.save").comms
    everyone = [found] if comms.pp is None else all_gather_json(comms.world, found)
    return {name: known for names in everyone for name, known in names.items()}
