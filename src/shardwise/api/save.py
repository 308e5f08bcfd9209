"""Saving and loading a model with its optimizer: any number of ranks, any strategy, on either side."""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint import Checkpoint, open_checkpoint, plain, retain, step_of, write
from shardwise.comm.control import fail_together
from shardwise.engine.engine import Engine
from shardwise.forms.attachment import engine_of
from shardwise.forms.ignored import ignored_of
from shardwise.launch.notice import tell_once
from shardwise.optim import checks
from shardwise.spec.errors import CheckpointError, ShardwiseError
from shardwise.spec.extent import Extent
from shardwise.state import model as states
from shardwise.state.average import ExponentialMovingAverage
from shardwise.state.extents import Pairs
from shardwise.state.held import count_holders, ignored_extents, stored_names, written_names
from shardwise.state.optimizer import OptimizerState, optimizer_extents, optimizer_scalars

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

_OPTIMIZER, _AVERAGE, _RANK = "optimizer", "average", "rank"
#: Most values in the state of one rank.
_MAX_ITEMS = 10**6


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    state: dict[str, Any] | None = None,
    average: ExponentialMovingAverage | None = None,
    rank_state: dict[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Write a checkpoint: parameters, buffers, optimizer state, averaged weights, and ``state``, as logical tensors.

    Parameters that require no gradient are in files of their own, named by their content: checkpoints in one folder
    share them as hard links, so they are written once. A checkpoint is complete by itself all the same, and any of them
    can be removed or copied.

    Args:
        path: A folder that does not exist yet.
        model: A parallelized model.
        optimizer: Built on its parameters; or several, between which they are divided.
        state: Anything that JSON can hold (and bytes), equal on all ranks; ``step`` and ``run_id`` in it, where there,
            also go into the manifest.
        average: An average of the model's weights, saved with them.
        rank_state: As ``state``, but this rank's own, such as the state of its random number generators.
        keep: Remove older checkpoints beside this one, but for the newest ``keep``, and what interrupted saves left.
            Two verified ones are always left. The folders must be named by their steps, ``step-00000100``;
            ``sw.newest_checkpoint`` finds the newest. ``None`` removes nothing.

    Returns:
        The folder.

    Collective:
        Each rank writes the ranges that it owns; of ranks that hold the same, the first. The ranks exchange small JSON.
        All ranks must call.

    Raises:
        CheckpointError, StorageError: The save failed on some rank. All ranks raise the same, and
            nothing is left behind.
    """
    engine = engine_of(model, "sw.save")
    path, named_step = Path(path), step_of(Path(path).name)
    if keep is not None and (keep < 1 or named_step is None):
        raise CheckpointError(
            f"sw.save({path}, keep={keep}): expected a folder named by its step, and at least 1 to keep.\n"
            '  Call sw.save(folder / f"step-{step:08d}", ..., keep=3).'
        )
    engine.sync_buffers()
    state = dict(state or {})
    data: dict[str, Any] = {
        "state": state,
        "strategy": engine.row.describe(),
        "mesh": engine.comms.sizes,
    }
    optimizers = _listed(optimizer)
    ignored = written_names(ignored_of(engine), optimizers, engine.comms)
    if optimizers:
        data[_OPTIMIZER] = {
            "class": _class_names(optimizers),
            "groups": [_plain(settings) for settings in _groups_of(optimizers)],
            "scalars": optimizer_scalars(model, optimizers, ignored),
        }
    tensors = states.owned_extents(model) + optimizer_extents(model, optimizers, ignored) + ignored_extents(ignored)
    if average is not None:
        data[_AVERAGE] = average.settings
        tensors += average.owned_extents()
    if rank_state is not None:
        packed = plain.dumps(plain.pack(rank_state, "rank_state"))
        held = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        tensors.append((_rank_extent(engine.comms.world.rank, held.numel()), held))
    step = state.get("step", named_step or 0)
    run_id = str(state.get("run_id") or uuid.UUID(int=0))
    write(path, engine.comms.world, tensors, data, step=int(step), run_id=run_id, frozen=states.frozen_names(model))
    if keep is not None:
        _retain(path, engine, keep, run_id)
    return path


def _rank_extent(rank: int, num_bytes: int) -> Extent:
    return Extent(f"{_RANK}/{rank:05d}", (num_bytes,), "uint8", 0, num_bytes)


#: Checkpoints that this process has verified, by engine.
_verified: weakref.WeakKeyDictionary[Engine, tuple[Path, ...]] = weakref.WeakKeyDictionary()


def _retain(path: Path, engine: Engine, keep: int, run_id: str) -> None:
    """Have rank 0 remove what is older than the kept ones.

    Collective:
        An all-gather of JSON.
    """
    problem: ShardwiseError | None = None
    if engine.comms.world.rank == 0:
        try:
            kept = retain(path.parent, keep, known_good=_verified.get(engine, ()), run_id=run_id)
            _verified[engine] = kept.good
            for refused, reason in kept.refused:
                tell_once(f"checkpoint {refused.name} is left: {reason}")
        except ShardwiseError as error:
            problem = error
    fail_together(engine.comms.world, problem)


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
        optimizer: An optimizer of the class that was saved, with as many parameter groups (several: in the same order).
            Its state and settings are replaced. ``None`` leaves optimizer state unread.
        average: Receives the averaged weights, their decay and number of updates. ``None`` leaves them unread.
        verify: Compare every file that is read with the hash in the manifest first.

    Returns:
        The ``state`` given to :func:`save`; under the key ``rank_state`` this rank's own, where as many ranks load as
        have saved.

    Collective:
        Each rank reads the ranges that it holds; the ranks exchange small JSON. All ranks must call.

    Raises:
        CheckpointError: The checkpoint is missing, damaged, or of another model or optimizer, or holds no average; on
            every rank alike, and then model, optimizer and average are as they were.
    """
    engine = engine_of(model, "sw.load")
    comm = engine.comms.world
    checkpoint = open_checkpoint(path, comm=comm)
    holders = count_holders(ignored_of(engine), engine.comms)
    problem: ShardwiseError | None = None
    targets = _Targets(checkpoint)
    try:  # a stage may refuse what the others can take
        targets.add_model(model, _listed(optimizer), holders)
        if average is not None:
            targets.add_average(average)
    except ShardwiseError as error:
        problem = error
    fail_together(comm, problem)
    with torch.no_grad():
        checkpoint.read_into(targets.extents, ignored=targets.unread, verify=verify, comm=comm)
        for install in targets.installs:
            install()
    unfilled = engine.observers.find(states.Unfilled)
    if unfilled is not None:
        engine.observers.remove(unfilled)
    engine.invalidate()
    return checkpoint.data["state"] | targets.rank_state()


class _Targets:
    """The ranges and tensors of this rank that a checkpoint is read into.

    Attributes:
        extents: Ranges with the tensors that take them.
        unread: Beginnings of names that no rank needs to ask for.
        installs: Called once everything has been read.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.extents: Pairs = []
        self.unread = {f"{_OPTIMIZER}/", f"{_AVERAGE}/", f"{_RANK}/"}
        self.installs: list[Callable[[], object]] = []
        self._checkpoint = checkpoint
        self._rank_state: torch.Tensor | None = None

    def add_model(self, model: nn.Module, optimizers: list[torch.optim.Optimizer], holders: Mapping[str, int]) -> None:
        """Parameters, buffers and the rank's own state, and optimizers.

        Raises:
            ShardwiseError: This rank cannot take something that was saved.
        """
        engine, checkpoint, stored = engine_of(model, "sw.load"), self._checkpoint, self._checkpoint.tensors
        held = states.held_values(model, stored)
        ignored = stored_names(ignored_of(engine), engine.comms, holders, stored)
        self.extents += held.extents + ignored_extents(ignored)
        self.installs.append(held.install)
        own = stored.get(_rank_extent(engine.comms.world.rank, 0).name)
        if own is not None and checkpoint.world_size == engine.comms.world.size:
            self._rank_state = torch.empty(own.numel, dtype=torch.uint8)
            self.extents.append((own, self._rank_state))
        if not optimizers:
            return
        self.unread.discard(f"{_OPTIMIZER}/")
        saved = _matching(checkpoint, optimizers)
        for each in optimizers:
            checks.accept(each)
        fresh = [OptimizerState(model, each, ignored, stored) for each in optimizers]
        problems = [problem for each in fresh for problem in each.problems]
        if problems:
            raise CheckpointError(
                f"optimizer state of checkpoint {checkpoint.path} does not fit this layout:\n"
                + "\n".join(f"  - {problem}" for problem in problems[:8])
                + "\n  Load it with the granularity that it was saved with, with 'tensor', or without the optimizer."
            )
        for each in fresh:
            self.extents += each.extents
            self.installs.append(partial(each.install, saved["scalars"]))
        for group, settings in zip(_groups_of(optimizers), saved["groups"], strict=True):
            self.installs.append(partial(_restore, group, settings))

    def add_average(self, average: ExponentialMovingAverage) -> None:
        """An average of the weights.

        Raises:
            CheckpointError: The checkpoint has none.
        """
        if _AVERAGE not in self._checkpoint.data:
            raise CheckpointError(
                f"checkpoint {self._checkpoint.path} holds no averaged weights.\n"
                "  Call sw.load without average, and begin one anew."
            )
        fresh, extents = average.fresh()
        self.extents += extents
        self.installs.append(partial(average.install, fresh, self._checkpoint.data[_AVERAGE]))
        self.unread.discard(f"{_AVERAGE}/")

    def rank_state(self) -> dict[str, Any]:
        """This rank's own state under its key; empty where there is none."""
        if self._rank_state is None:
            return {}
        raw = self._rank_state.numpy().tobytes()
        return {"rank_state": plain.unpack(plain.loads(raw, max_items=_MAX_ITEMS))}


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


def _matching(checkpoint: Checkpoint, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """The entry of a checkpoint about its optimizers, checked against those of the caller."""
    path, saved, name = checkpoint.path, checkpoint.data.get(_OPTIMIZER), _class_names(optimizers)
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
