"""Saving and loading a model with its optimizer: any number of ranks, any strategy, on either side."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint import open_checkpoint, write
from shardwise.comm.control import all_gather_json
from shardwise.fsdp import attach
from shardwise.fsdp import optimizer as checks
from shardwise.fsdp import state as states
from shardwise.fsdp.average import ExponentialMovingAverage
from shardwise.fsdp.ignored_state import LoadedIgnored, SavedIgnored
from shardwise.fsdp.optimizer_state import OptimizerState, optimizer_extents, optimizer_scalars
from shardwise.spec.errors import CheckpointError

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

_OPTIMIZER, _AVERAGE = "optimizer", "average"


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    state: dict[str, Any] | None = None,
    average: ExponentialMovingAverage | None = None,
) -> Path:
    """Write a checkpoint: parameters, buffers, optimizer state, averaged weights, and ``state``, as logical tensors.

    Args:
        path: A folder that does not exist yet.
        model: A parallelized model.
        optimizer: Built on its parameters; or several, between which they are divided.
        state: Anything that JSON can hold (and bytes), equal on all ranks; ``step`` and ``run_id`` in it, where there,
            also go into the manifest.
        average: Of the model's weights.

    Returns:
        The folder.

    Collective:
        Each rank writes the slices that it owns, of groups that hold the same the first; what is sent is small JSON.
        All ranks must call.

    Raises:
        CheckpointError, StorageError: On every rank alike; then nothing is left behind.
    """
    runtime = attach.runtime_of(model, "sw.save")
    runtime.sync_buffers()
    state = dict(state or {})
    data: dict[str, Any] = {
        "state": state,
        "strategy": runtime.row.describe(),
        "mesh": runtime.comms.sizes,
    }
    optimizers = _listed(optimizer)
    ignored = SavedIgnored(runtime.ignored, optimizers, runtime.comms.world)
    if optimizers:
        data[_OPTIMIZER] = {
            "class": _class_names(optimizers),
            "groups": [_plain(settings) for settings in _groups_of(optimizers)],
            "scalars": optimizer_scalars(model, optimizers) | ignored.scalars,
        }
    tensors = states.owned_extents(model) + optimizer_extents(model, optimizers) + ignored.extents
    if average is not None:
        data[_AVERAGE] = average.settings
        tensors += average.owned_extents()
    step = state.get("step", 0)
    run_id = str(state.get("run_id") or uuid.UUID(int=0))
    return write(Path(path), runtime.comms.world, tensors, data, step=int(step), run_id=run_id)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    average: ExponentialMovingAverage | None = None,
    verify: bool = True,
) -> dict[str, Any]:
    """Fill a model, and its optimizer, from a checkpoint that any number of ranks wrote under any strategy.

    Args:
        path: The checkpoint's folder.
        model: A parallelized model with the same parameters.
        optimizer: Of the class that was saved, with as many parameter groups (several: in the same order). Its state
            and settings are replaced. ``None`` leaves what the checkpoint holds of one unread.
        average: Takes the averaged weights, their decay and number of updates. ``None`` leaves them unread.
        verify: Compare every file that is read with the hash in the manifest first.

    Returns:
        The ``state`` given to :func:`save`.

    Collective:
        Each rank reads the ranges that it holds; what is sent is small JSON. All ranks must call.

    Raises:
        CheckpointError: The checkpoint is missing, damaged, or of another model or optimizer, or holds no average; on
            every rank alike, and then model, optimizer and average are as they were.
    """
    runtime = attach.runtime_of(model, "sw.load")
    comm = runtime.comms.world
    checkpoint = open_checkpoint(path, comm=comm)
    optimizers = _listed(optimizer)
    held, own = states.HeldValues(model), LoadedIgnored(runtime.ignored, optimizers, comm, checkpoint.tensors)
    targets = [*held.extents, *own.extents]
    ignored = {f"{_OPTIMIZER}/", f"{_AVERAGE}/"}
    saved: dict[str, Any] = {}
    fresh: OptimizerState | None = None
    if optimizers:
        saved = _compare_optimizers(path, checkpoint.data.get(_OPTIMIZER), optimizers)
        for each in optimizers:
            checks.accept(each)
        stored = {name: extent for name, extent in checkpoint.tensors.items() if name.startswith(f"{_OPTIMIZER}/")}
        fresh = OptimizerState(model, optimizers, stored)
        problems = dict.fromkeys(problem for found in all_gather_json(comm, fresh.problems) for problem in found)
        if problems:
            raise CheckpointError(
                f"optimizer state of checkpoint {path} does not fit this layout:\n"
                + "\n".join(f"  - {problem}" for problem in list(problems)[:8])
                + "\n  Load it with the granularity that it was saved with, with 'tensor', or without the optimizer."
            )
        targets += fresh.extents
        ignored.discard(f"{_OPTIMIZER}/")
    averages: list[torch.Tensor] = []
    if average is not None:
        if _AVERAGE not in checkpoint.data:
            raise CheckpointError(
                f"checkpoint {path} holds no averaged weights.\n  Call sw.load without average, and begin one anew."
            )
        averages, extents = average.fresh_extents()
        targets += extents
        ignored.discard(f"{_AVERAGE}/")
    with torch.no_grad():
        checkpoint.read_into(targets, ignored=ignored, verify=verify, comm=comm)
        held.install()
    if fresh is not None:
        fresh.install(saved["scalars"])
        own.install(saved["scalars"])
        for group, settings in zip(_groups_of(optimizers), saved["groups"], strict=True):
            _restore(group, settings)
    if average is not None:
        average.install(averages, checkpoint.data[_AVERAGE])
    runtime.invalidate()
    return checkpoint.data["state"]


def _listed(optimizer: Optimizers | None) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


def _class_names(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    return " + ".join(type(optimizer).__name__ for optimizer in optimizers)


def _groups_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's settings without its parameters; a number in a tensor as the number."""
    return {
        key: value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
        for key, value in settings.items()
        if key != "params"
    }


def _restore(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Put settings back; where the group holds a number in a tensor, into that tensor."""
    for key, value in settings.items():
        held = group.get(key)
        if isinstance(held, torch.Tensor) and held.dim() == 0 and isinstance(value, (int, float)):
            held.fill_(value)
        else:
            group[key] = value


def _compare_optimizers(
    path: object, saved: dict[str, Any] | None, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Any]:
    """What was saved of the optimizers, if ``optimizers`` can take it."""
    name = _class_names(optimizers)
    if saved is None:
        raise CheckpointError(
            f"checkpoint {path} holds no optimizer state.\n  Call sw.load(path, model) without an optimizer."
        )
    if saved["class"] != name:
        raise CheckpointError(
            f"checkpoint {path} holds the state of {saved['class']}, the optimizer is {name}.\n"
            f"  Build a {saved['class']}, or call sw.load(path, model) to start with a fresh optimizer."
        )
    num_groups = len(_groups_of(optimizers))
    if len(saved["groups"]) != num_groups:
        raise CheckpointError(
            f"checkpoint {path} holds {len(saved['groups'])} parameter groups, the optimizer has"
            f" {num_groups}.\n  Build the optimizer with the same groups."
        )
    return saved
