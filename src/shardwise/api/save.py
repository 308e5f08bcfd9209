"""Saving and loading a model with its optimizer; the number of ranks and the strategy may differ between the two."""

from __future__ import annotations

import atexit
import os
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.api.extra_state import pack_extra_state, unpack_extra_state
from shardwise.api.saved_optimizer import (
    SavedOptimizer,
    changed_settings,
    describe_changes,
    groups_of,
    members_here,
    read_average,
    read_optimizer,
    refuse_unknown,
    refuse_wrappers,
    refused,
    settings_by_group,
    settings_of_code,
    shared_members,
    tied_names,
)
from shardwise.checkpoint import plain
from shardwise.checkpoint.background import Background
from shardwise.checkpoint.publish import update_latest
from shardwise.checkpoint.reader import Checkpoint, open_checkpoint
from shardwise.checkpoint.storage import Url, place_of, step_of
from shardwise.checkpoint.writer import Saving, begin_write, write
from shardwise.comm.control import check_same, digest_text, fail_together
from shardwise.engine.engine import Engine
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.ignored import ignored_of
from shardwise.launch.log_once import log_once
from shardwise.optim import checks
from shardwise.spec.errors import CheckpointError, ShardwiseError
from shardwise.spec.extent import Extent
from shardwise.spec.text import printable
from shardwise.weights.state import model as states
from shardwise.weights.state.average import ExponentialMovingAverage
from shardwise.weights.state.extents import Pairs, Targets
from shardwise.weights.state.optimizer import OptimizerState, optimizer_extents, optimizer_scalars
from shardwise.weights.state.stored_ranges import count_holders, ignored_ranges, stored_names, written_names

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

_OPTIMIZER, _AVERAGE, _RANK = "optimizer", "average", "rank"
#: Set in a checkpoint that leaves out frozen parameters.
_WITHOUT_FROZEN = "without_frozen"
#: Key of the extra state of modules.
_EXTRA = "extra_state"
#: Settings that schedulers change, which are therefore expected to differ in a resumed run.
_SCHEDULED = {"lr", "initial_lr"}
#: Maximum number of values in the state of one rank.
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
    frozen: bool = True,
    allow_non_finite: bool = False,
) -> Path:
    """Write a checkpoint: parameters, buffers, optimizer state, averaged weights, and ``state``, as logical tensors.

    Frozen parameters are stored in separate files, named by their content: checkpoints in one folder share these files
    as hard links, so they are written only once. Every checkpoint is complete, and can be removed or copied alone.

    Extra state of modules (``get_extra_state``) may contain tensors and the types allowed in ``state``. If ranks have
    different values, the value of the first rank is saved and every rank loads it, as in ``sw.full_state_dict``.

    Args:
        path: A folder that does not exist yet.
        model: A parallelized model.
        optimizer: An optimizer of the model's parameters, or several, each with a part of them.
        state: Anything that JSON can represent (and bytes), equal on all ranks. If it has the keys ``step`` and
            ``run_id``, they also go into the manifest.
        average: An average of the model's weights, saved with them.
        rank_state: As ``state``, but with different values on each rank, such as the state of random number generators.
        keep: Remove older checkpoints in the same folder, except for the newest ``keep``, and files of interrupted
            saves. At least two verified ones are always kept. Folders must be named by their steps, ``step-00000100``;
            ``sw.newest_checkpoint`` finds the newest. ``None`` removes nothing.
        frozen: ``False`` leaves out frozen parameters, for a model that is always built with their values, such as the
            base below an adapter. ``sw.load`` then does not change them.
        allow_non_finite: Save NaN and infinity in parameters and optimizer state too. By default they are refused, so
            that a diverged run does not overwrite its last good checkpoints. Buffers may always contain them.

    Returns:
        The folder.

    Collective:
        Each rank writes the ranges that it owns; replicated ranges are written by the first rank that has them. The
        ranks exchange small JSON. All ranks must call.

    Raises:
        NonFiniteError: A parameter or optimizer state is NaN or infinite.
        RankDisagreement: The optimizer's settings differ between ranks.
        CheckpointError, StorageError: The save failed on some rank. All ranks raise the same error, and no partial
            checkpoint is left.
    """
    content = _content(
        path, model, optimizer, state=state, average=average, rank_state=rank_state, keep=keep, frozen=frozen
    )
    finish_save(model)
    engine = content.engine
    write(
        content.path,
        engine.comms.world,
        content.tensors,
        content.data,
        step=content.step,
        run_id=content.run_id,
        frozen=states.frozen_names(model),
        allow_non_finite=allow_non_finite,
    )
    if keep is not None:
        open_checkpoint(content.path, comm=engine.comms.world).verify(engine.comms.world)
        _update_latest(content.path, engine, keep, content.run_id)
    return content.path


def save_async(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    state: dict[str, Any] | None = None,
    average: ExponentialMovingAverage | None = None,
    rank_state: dict[str, Any] | None = None,
    keep: int | None = None,
    frozen: bool = True,
    allow_non_finite: bool = False,
) -> Path:
    """Save as :func:`save`, but return as soon as everything has been copied to the host's memory.

    A separate process of each rank writes while training continues. The first such save starts it, and rank 0's process
    publishes the checkpoint when all files are complete. Only one save runs at a time: the next one waits for it, and
    raises its error. So does :func:`finish_save`, which belongs after the last step. The exit of the interpreter also
    waits, but can only print an error. The copy needs as much host memory as this rank saves, from the first save on.

    The arguments are those of :func:`save`. With ``keep`` the files are read again and compared before any is removed.

    Returns:
        The folder, which does not exist yet.

    Collective:
        The ranks exchange small JSON. All ranks must call.

    Raises:
        CheckpointError, StorageError, NonFiniteError: The previous save failed, or this one cannot start. All ranks
            raise the same error. If the previous save failed, call this again to save now.
    """
    finish_save(model)
    content = _content(
        path, model, optimizer, state=state, average=average, rank_state=rank_state, keep=keep, frozen=frozen
    )
    engine = content.engine
    background = _background.setdefault(engine, Background())
    _saving[engine] = begin_write(
        content.path,
        engine.comms.world,
        content.tensors,
        content.data,
        background,
        step=content.step,
        run_id=content.run_id,
        frozen=states.frozen_names(model),
        keep=keep,
        known_good=_verified.get(engine, ()),
        allow_non_finite=allow_non_finite,
    )
    return content.path


def finish_save(model: nn.Module) -> None:
    """Wait until the checkpoint of :func:`save_async` is published. Returns at once if no save is running.

    Collective:
        If a save is running, a gather of small JSON to rank 0 and a broadcast from there. All ranks must call.

    Raises:
        CheckpointError, StorageError: The save failed. All ranks raise the same error; no partial checkpoint is left.
    """
    engine = engine_of(model, "sw.finish_save")
    saving = _saving.pop(engine, None)
    if saving is None:
        return
    outcome = saving.finish()
    if "after" in outcome and engine.comms.world.rank == 0:
        log_once(f"{saving.directory} is saved, but not all older checkpoints were removed: {outcome['after']}")
    _verified[engine] = tuple(outcome["good"])
    if engine.comms.world.rank == 0:
        _log_refused(outcome["refused"])


def save_failure(model: nn.Module) -> str | None:
    """Return the error of the running save if this rank knows of one, else ``None``. Rank 0 knows of all errors.

    Does not wait, so a training loop can report the error at the next step. :func:`finish_save` raises it.
    """
    saving = _saving.get(engine_of(model, "sw.save_failure"))
    return None if saving is None else saving.failure()


@dataclass
class _Content:
    """The tensors and data that this rank has to save."""

    engine: Engine
    path: Path
    tensors: Pairs
    data: dict[str, Any]
    step: int
    run_id: str


def _content(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None,
    *,
    state: dict[str, Any] | None,
    average: ExponentialMovingAverage | None,
    rank_state: dict[str, Any] | None,
    keep: int | None,
    frozen: bool,
) -> _Content:
    engine = engine_of(model, "sw.save")
    path, named_step = place_of(path), step_of(Path(path).name)
    if isinstance(path, Url):
        raise CheckpointError(
            f"sw.save({path}): expected a folder.\n  Save to one and copy it, manifest.json last: checkpoint.upload_to"
            " of shardwise train and sw.Run does so. sw.load reads it there."
        )
    if keep is not None and (keep < 1 or named_step is None):
        raise CheckpointError(
            f"sw.save({path}, keep={keep}): expected a folder named by its step, and at least 1 to keep.\n"
            '  Call sw.save(folder / f"step-{step:08d}", ..., keep=3).'
        )
    engine.sync_buffers()
    state = dict(state or {})
    data: dict[str, Any] = {
        "state": state,
        "strategy": engine.placements.describe(),
        "mesh": engine.comms.sizes,
    }
    optimizers = _as_list(optimizer)
    refuse_wrappers(optimizers)
    ignored = written_names(ignored_of(engine), optimizers, engine.comms)
    if optimizers:
        entry: dict[str, Any] = {
            "class": _class_names(optimizers),
            "groups": [_plain(settings) for settings in groups_of(optimizers)],
            "scalars": optimizer_scalars(model, optimizers, ignored),
        }
        members = shared_members(model, optimizers)
        if members is not None:
            entry["members"] = members
        _check_settings(engine, entry["groups"])
        data[_OPTIMIZER] = entry
    if tied := tied_names(model):
        data["tied"] = tied
    if extra := pack_extra_state(model):
        data[_EXTRA] = extra
    tensors = states.owned_extents(model) + optimizer_extents(model, optimizers, ignored)
    tensors += Targets(ignored_ranges(ignored)).extents
    if average is not None:
        data[_AVERAGE] = average.settings
        tensors += average.owned_extents()
    if rank_state is not None:
        packed = plain.dumps(plain.pack(rank_state, "rank_state"))
        raw = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        tensors.append((_rank_extent(engine.comms.world.rank, raw.numel()), raw))
    if not frozen:
        data[_WITHOUT_FROZEN] = True
        left_out = states.frozen_extents(model, tensors)
        tensors = [pair for pair in tensors if pair[0].name not in left_out]
    step = state.get("step", named_step or 0)
    run_id = str(state.get("run_id") or uuid.UUID(int=0))
    return _Content(engine, path, tensors, data, int(step), run_id)


def _check_settings(engine: Engine, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise if ranks update parameters by different settings, such as two learning rates.

    Raises:
        RankDisagreement: On all ranks; the message names a setting and two ranks.

    Collective:
        An all-gather of eight bytes per rank.
    """
    lines = [
        f"{key}={value!r} in parameter group {i}" for i, group in enumerate(groups) for key, value in group.items()
    ]
    check_same(
        engine.comms.world,
        digest_text("\n".join(lines)),
        "the optimizer's settings differ from rank to rank, so that each has made updates of its own kind",
        "Nothing was saved. Give every rank the same settings, and go back to a checkpoint from before;"
        " sw.check_replicas(model, optimizer) compares them at any step.",
        show=lambda: lines,
    )


def _rank_extent(rank: int, num_bytes: int) -> Extent:
    return Extent(f"{_RANK}/{rank:05d}", (num_bytes,), "uint8", 0, num_bytes)


#: By engine: the running save, the writing process, and the checkpoints that were verified.
_saving: weakref.WeakKeyDictionary[Engine, Saving] = weakref.WeakKeyDictionary()
_background: weakref.WeakKeyDictionary[Engine, Background] = weakref.WeakKeyDictionary()
_verified: weakref.WeakKeyDictionary[Engine, tuple[str, ...]] = weakref.WeakKeyDictionary()


def _update_latest(path: Path, engine: Engine, keep: int, run_id: str) -> None:
    """On rank 0, point to a new checkpoint and remove checkpoints older than the kept ones.

    Collective:
        An all-gather of JSON.
    """
    problem: ShardwiseError | None = None
    if engine.comms.world.rank == 0:
        try:
            good, refused = update_latest(path, keep=keep, run_id=run_id, known_good=_verified.get(engine, ()))
            _verified[engine] = tuple(good)
            _log_refused(refused)
        except ShardwiseError as error:
            problem = error
    fail_together(engine.comms.world, problem)


def _log_refused(refused: Iterable[tuple[str, str]]) -> None:
    for name, reason in refused:
        log_once(f"checkpoint {name} is left: {reason}")


def abandon_save(model: nn.Module) -> None:
    """Abort the running save, which would wait for a peer that has exited. Not a collective."""
    engine = engine_of(model, "sw.save_async")
    _saving.pop(engine, None)
    if engine in _background:
        _background.pop(engine).close()


#: Seconds that the exit of the interpreter waits for saves without a ``finish_save``.
_LAST_WAIT_S = 20.0


@atexit.register
def _finish_all() -> None:
    for saving in list(_saving.values()):
        problem = saving.wait(_LAST_WAIT_S)
        if problem is not None:
            log_once(f"{saving.directory} was not saved: {problem}")


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    average: ExponentialMovingAverage | None = None,
    verify: bool = True,
    keep_settings: bool = False,
) -> dict[str, Any]:
    """Fill a model, and its optimizer, from a checkpoint that any number of ranks wrote under any strategy.

    Args:
        path: The checkpoint's folder, local or on an object store
            (``s3://bucket/runs/demo/checkpoints/step-00000100``), of which each rank reads the ranges that it needs.
        model: A parallelized model with the same parameters.
        optimizer: An optimizer of the class that was saved, with as many parameter groups; or several, in the saved
            order. Its state and settings are replaced, as by torch's ``load_state_dict``, and changed settings are
            printed, except for the learning rate. ``None`` does not read optimizer state.
        average: Receives the averaged weights, their decay and number of updates. ``None`` does not read them.
        verify: First compare every file that is read with the hash in the manifest.
        keep_settings: Keep the settings of the optimizer's groups (learning rate, betas, ...).

    Returns:
        The ``state`` given to :func:`save`. If as many ranks load as saved, ``rank_state`` is this rank's.

    Collective:
        Each rank reads the ranges that it needs; the ranks exchange small JSON. All ranks must call.

    Raises:
        CheckpointError: The checkpoint is missing, damaged, or of another model or optimizer, or has no average. Raised
            on every rank, before model, optimizer and average are changed.
    """
    engine = engine_of(model, "sw.load")
    comm = engine.comms.world
    checkpoint = open_checkpoint(path, comm=comm)
    state = checkpoint.data.get("state")
    if not isinstance(state, dict):
        raise CheckpointError(
            f"checkpoint {checkpoint.path} was not written by sw.save: its state is a {type(state).__name__}.\n"
            "  Load another checkpoint."
        )
    holders = count_holders(ignored_of(engine), engine.comms)
    problem: ShardwiseError | None = None
    targets = _Targets(checkpoint, tied_names(model), keeps_settings=keep_settings)
    try:  # a pipeline stage may refuse data that the other stages accept
        targets.add_model(model, _as_list(optimizer), holders)
        if average is not None:
            targets.add_average(average)
    except ShardwiseError as error:
        problem = error
    fail_together(comm, problem)
    with torch.no_grad():
        checkpoint.read_into(targets.extents, ignored=targets.unread, verify=verify, comm=comm)
        for install in targets.installs:
            install()
    unfilled = engine.extras.find(states.Unfilled)
    if unfilled is not None:
        unfilled.detach(engine)
    engine.invalidate()
    return state | targets.rank_state()


class _Targets:
    """The ranges and tensors of this rank that a checkpoint is read into.

    Attributes:
        extents: Ranges, each with the tensor that receives it.
        unread: Prefixes of names that no rank needs to read.
        installs: Functions to call once everything has been read.
    """

    def __init__(self, checkpoint: Checkpoint, tied: Collection[str], *, keeps_settings: bool) -> None:
        self._keeps_settings = keeps_settings
        self.extents: Pairs = []
        # Imported checkpoints contain tied parameters under all of their names.
        self.unread = {f"{_OPTIMIZER}/", f"{_AVERAGE}/", f"{_RANK}/", *tied}
        self.installs: list[Callable[[], object]] = []
        self._checkpoint = checkpoint
        self._rank_state: torch.Tensor | None = None

    def add_model(self, model: nn.Module, optimizers: list[torch.optim.Optimizer], holders: Mapping[str, int]) -> None:
        """Add parameters, buffers, this rank's state, and optimizers.

        Raises:
            ShardwiseError: This rank cannot load something that was saved.
        """
        engine, checkpoint, stored = engine_of(model, "sw.load"), self._checkpoint, self._checkpoint.tensors
        leaves_frozen = bool(checkpoint.data.get(_WITHOUT_FROZEN))
        if leaves_frozen and engine.extras.find(states.Unfilled) is not None:
            raise CheckpointError(
                f"checkpoint {checkpoint.path} leaves out frozen parameters, and those of this model have no values.\n"
                "  Build the model with the values of its base, as it was when it was saved."
            )
        values = states.load_targets(model, stored, with_frozen=not leaves_frozen)
        ignored = stored_names(ignored_of(engine), engine.comms, holders, stored)
        others = Targets(ignored_ranges(ignored))
        self.extents += values.extents + others.extents
        self.installs += [values.install, others.install, unpack_extra_state(model, checkpoint.data.get(_EXTRA, {}))]
        own = stored.get(_rank_extent(engine.comms.world.rank, 0).name)
        if own is not None and checkpoint.world_size == engine.comms.world.size:
            self._rank_state = torch.empty(own.numel, dtype=torch.uint8)
            self.extents.append((own, self._rank_state))
        if not optimizers:
            return
        self.unread.discard(f"{_OPTIMIZER}/")
        saved = _matching(checkpoint, optimizers)
        for each in optimizers:
            checks.check_optimizer(each)
        fresh = [OptimizerState(model, each, ignored, stored) for each in optimizers]
        problems = [problem for each in fresh for problem in each.problems]
        if problems and all(_is_alike(extent, stored.get(extent.name)) for extent, _ in self.extents):
            raise CheckpointError(
                f"optimizer state of checkpoint {checkpoint.path} does not fit this layout:\n"
                + "\n".join(f"  - {problem}" for problem in problems[:8])
                + "\n  Load it with the granularity that it was saved with, with 'tensor', or without the optimizer."
            )
        changed, found = [], settings_by_group(members_here(model, optimizers), saved.groups, saved.members)
        if self._keeps_settings:
            found = [{} for _ in found]
        else:
            added = settings_of_code(optimizers, found)
            refuse_unknown(checkpoint.path, found, groups_of(optimizers), added)
            changed = changed_settings(checkpoint.path, found, groups_of(optimizers), added)
        given = {id(group): settings for group, settings in zip(groups_of(optimizers), found, strict=True)}
        odd = [f"{name} is no parameter" for name in saved.scalars if name not in stored]
        for each in fresh:
            odd += each.set_numbers(saved.scalars, given)
            self.extents += each.extents
            self.installs.append(each.install)
        if odd:
            raise refused(checkpoint.path, odd[:5])
        if shown := [each for each in changed if each[0].rpartition(".")[2] not in _SCHEDULED]:
            log_once(f"checkpoint {checkpoint.path} changes settings of the optimizer:\n{describe_changes(shown)}")
        self.installs += [partial(_restore, group, given[id(group)]) for group in groups_of(optimizers)]

    def add_average(self, average: ExponentialMovingAverage) -> None:
        """Add an average of the weights.

        Raises:
            CheckpointError: The checkpoint has no average.
        """
        if _AVERAGE not in self._checkpoint.data:
            raise CheckpointError(
                f"checkpoint {self._checkpoint.path} holds no averaged weights.\n"
                "  Call sw.load without average, and begin one anew."
            )
        settings = read_average(self._checkpoint.path, self._checkpoint.data[_AVERAGE])
        new_averages, extents = average.fresh()
        self.extents += extents
        self.installs.append(partial(average.install, new_averages, settings))
        self.unread.discard(f"{_AVERAGE}/")

    def rank_state(self) -> dict[str, Any]:
        """Return a dict with this rank's state, empty if the checkpoint has none for it."""
        if self._rank_state is None:
            return {}
        raw = self._rank_state.numpy().tobytes()
        try:
            return {"rank_state": plain.unpack(plain.loads(raw, max_items=_MAX_ITEMS))}
        except ValueError as error:
            raise CheckpointError(
                f"the state of this rank in checkpoint {self._checkpoint.path} cannot be read: {printable(error)}.\n"
                "  It was changed by hand or damaged. Load another checkpoint."
            ) from None


def _as_list(optimizer: Optimizers | None) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


def _class_names(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    return " + ".join(type(optimizer).__name__ for optimizer in optimizers)


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group's settings without its parameters, with tensors of one number as numbers."""
    return {
        key: value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
        for key, value in settings.items()
        if key != "params"
    }


def _restore(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Restore the settings of a group; a number that the group stores in a tensor is copied into that tensor."""
    for key, value in settings.items():
        present = group.get(key)
        if isinstance(present, torch.Tensor) and present.dim() == 0 and isinstance(value, (int, float)):
            present.fill_(value)
        else:
            group[key] = value


def _is_alike(extent: Extent, saved: Extent | None) -> bool:
    """Return whether a tensor was saved with the same shape and dtype. If not, the error about shapes comes first."""
    return saved is not None and (saved.shape, saved.dtype) == (extent.shape, extent.dtype)


def _matching(checkpoint: Checkpoint, optimizers: Sequence[torch.optim.Optimizer]) -> SavedOptimizer:
    """Return the checkpoint's entry about its optimizers, checked against the caller's optimizers."""
    path, entry, name = checkpoint.path, checkpoint.data.get(_OPTIMIZER), _class_names(optimizers)
    if entry is None:
        raise CheckpointError(
            f"checkpoint {path} holds no optimizer state.\n  Call sw.load(path, model) without an optimizer."
        )
    saved = read_optimizer(path, entry)
    if saved.kind != name:
        raise CheckpointError(
            f"checkpoint {path} holds the state of {printable(saved.kind)}, the optimizer is {name}.\n"
            f"  Build a {printable(saved.kind)}, or call sw.load(path, model) to start with a fresh optimizer."
        )
    num_groups = len(groups_of(optimizers))
    if len(saved.groups) != num_groups:
        raise CheckpointError(
            f"checkpoint {path} holds {len(saved.groups)} parameter groups, the optimizer has"
            f" {num_groups}.\n  Build the optimizer with the same groups."
        )
    return saved
