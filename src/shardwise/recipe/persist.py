"""Saving and loading a model with its optimizer: any number of ranks, any strategy, on either side."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint import open_checkpoint, write
from shardwise.fsdp import attach
from shardwise.fsdp import optimizer as checks
from shardwise.fsdp import state as states
from shardwise.fsdp.average import ExponentialMovingAverage
from shardwise.fsdp.ignored_state import LoadedIgnored, SavedIgnored
from shardwise.spec.errors import CheckpointError

_OPTIMIZER, _AVERAGE = "optimizer", "average"


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    state: dict[str, Any] | None = None,
    average: ExponentialMovingAverage | None = None,
) -> Path:
    """Write a checkpoint: parameters, buffers, optimizer state, averaged weights, and ``state``, as logical tensors.

    Args:
        path: A folder that does not exist yet.
        model: A parallelized model.
        optimizer: Built on its parameters.
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
    ignored = SavedIgnored(runtime.ignored, optimizer, runtime.comms.control)
    if optimizer is not None:
        data[_OPTIMIZER] = {
            "class": type(optimizer).__name__,
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
            "scalars": states.optimizer_scalars(model, optimizer) | ignored.scalars,
        }
    tensors = states.owned_extents(model, optimizer) + ignored.extents
    if average is not None:
        data[_AVERAGE] = average.settings
        tensors += average.owned_extents()
    step = state.get("step", 0)
    run_id = str(state.get("run_id") or uuid.UUID(int=0))
    return write(Path(path), runtime.comms.control, tensors, data, step=int(step), run_id=run_id)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    average: ExponentialMovingAverage | None = None,
    verify: bool = True,
) -> dict[str, Any]:
    """Fill a model, and its optimizer, from a checkpoint that any number of ranks wrote under any strategy.

    Args:
        path: The checkpoint's folder.
        model: A parallelized model with the same parameters.
        optimizer: Of the class that was saved, with as many parameter groups. Its state and settings are replaced.
            ``None`` leaves what the checkpoint holds of one unread.
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
    comm = runtime.comms.control
    checkpoint = open_checkpoint(path, comm=comm)
    dtypes = {name: extent.dtype for name, extent in checkpoint.tensors.items()}
    held, own = states.HeldValues(model), LoadedIgnored(runtime.ignored, optimizer, comm, dtypes)
    targets = [*held.extents, *own.extents]
    ignored = {f"{_OPTIMIZER}/", f"{_AVERAGE}/"}
    saved: dict[str, Any] = {}
    fresh: states.OptimizerState | None = None
    if optimizer is not None:
        saved = _compare_optimizers(path, checkpoint.data.get(_OPTIMIZER), optimizer)
        checks.accept(optimizer)
        stored = {name: dtype for name, dtype in dtypes.items() if name.startswith(f"{_OPTIMIZER}/")}
        fresh = states.OptimizerState(model, optimizer, stored)
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
    if optimizer is not None and fresh is not None:
        fresh.install(saved["scalars"])
        own.install(saved["scalars"])
        for group, settings in zip(optimizer.param_groups, saved["groups"], strict=True):
            group.update(settings)
    if average is not None:
        average.install(averages, checkpoint.data[_AVERAGE])
    runtime.invalidate()
    return checkpoint.data["state"]


def _compare_optimizers(path: object, saved: dict[str, Any] | None, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What was saved of the optimizer, if ``optimizer`` can take it."""
    name = type(optimizer).__name__
    if saved is None:
        raise CheckpointError(
            f"checkpoint {path} holds no optimizer state.\n  Call sw.load(path, model) without an optimizer."
        )
    if saved["class"] != name:
        raise CheckpointError(
            f"checkpoint {path} holds the state of {saved['class']}, the optimizer is {name}.\n"
            f"  Build a {saved['class']}, or call sw.load(path, model) to start with a fresh optimizer."
        )
    if len(saved["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"checkpoint {path} holds {len(saved['groups'])} parameter groups, the optimizer has"
            f" {len(optimizer.param_groups)}.\n  Build the optimizer with the same groups."
        )
    return saved
