"""An exponential moving average of the weights, sharded like the optimizer's state."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.engine.engine import Engine
from shardwise.engine.group import Group
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.ignored import ignored_of
from shardwise.engine.storage.optimizer import engines_of
from shardwise.spec.errors import StateError
from shardwise.spec.slice import slice_of
from shardwise.weights.state.extents import Pairs
from shardwise.weights.state.stored_ranges import make_extent, owned_pieces, pairs_of

#: Prefix of the names of averages in checkpoints.
_AVERAGE = "average/"
#: Number of elements that are swapped at a time, so that no second copy of the weights is needed.
_CHUNK_NUMEL = 1 << 20


class ExponentialMovingAverage:
    """Exponential moving average of weights: ``average = decay * average + (1 - decay) * weights`` at each update.

    ::

        average = sw.ExponentialMovingAverage(model, decay=0.999)
        for batch in batches:
            train_one_step(model, batch)
            average.update()
        with average.swapped_in():
            evaluate(model)  # sw.full_state_dict(model) returns the averaged weights here
        sw.save(path, model, optimizer, average=average)

    Each rank stores the average of the weights that its optimizer updates, in one flat tensor per group (and per
    row-sharded table). An update is one fused operation per group and sends nothing. 16-bit weights are averaged in
    fp32. Buffers, and weights that are frozen when this object is made, are not averaged: evaluation uses the model's.

    The values equal bitwise those of ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn`` in one
    process, whose first update copies the weights, as one with ``decay=0`` does here. The mean of the weights, which
    is ``AveragedModel``'s default, needs another decay before each update::

        average.decay = average.num_updates / (average.num_updates + 1)
        average.update()

    Args:
        model: A parallelized model; the average begins with its weights.
        decay: From 0 to less than 1.

    Attributes:
        decay: The decay of later updates; it may be changed.
        num_updates: Number of updates so far.

    Raises:
        StateError: ``decay`` is out of range, or the model is not parallelized.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise StateError(f"ExponentialMovingAverage(decay={decay}): expected a number from 0 up to, but not, 1.")
        self.decay = decay
        self.num_updates = 0
        self._model = weakref.ref(model)
        self._is_swapped_in = False
        engine = engine_of(model, "sw.ExponentialMovingAverage")
        self._averages: list[tuple[weakref.ref[Group], Tensor]] = []
        for group in engine.groups:
            if group.wants_gradients:
                group.apply_user_changes()
                self._averages.append((weakref.ref(group), _average_of(group.master)))
        self._rows = {
            name: _average_of(rows.detach().view(-1))
            for name, rows in ignored_of(engine).row_sharded_parameters.items()
            if rows.requires_grad
        }

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights, after an optimizer's step.

        Raises:
            StateError: Called inside :meth:`swapped_in`, a forward or a backward; or the model has been deleted.
        """
        engine = self._idle_engine("update")
        for weights, average in self._weights(engine):
            average.lerp_(weights.to(average.dtype), 1 - self.decay)
        self.num_updates += 1

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Replace the model's weights by the average inside the context, and restore them afterwards.

        Weights and average are swapped in place; 16-bit weights are copied. Inside, forwards, ``sw.full_state_dict``
        and ``sw.save`` use the average; an optimizer's step and updates of the average are refused.

        Collective:
            None; the next forward gathers again. All ranks must enter and leave.

        Raises:
            StateError: Called inside itself, a forward or a backward; or the model has been deleted.
        """
        engine = self._idle_engine("swapped_in")
        hook = register_optimizer_step_pre_hook(_refuse_steps_of(weakref.ref(engine)))
        overwritten = [_swap(weights, average) for weights, average in self._weights(engine)]
        self._is_swapped_in = True
        engine.invalidate()
        try:
            yield
        finally:
            hook.remove()
            for (weights, average), saved_weights in zip(self._weights(engine), overwritten, strict=True):
                if saved_weights is None:
                    _swap(weights, average)
                else:
                    weights.copy_(saved_weights)
            self._is_swapped_in = False
            engine.invalidate()

    def _idle_engine(self, call: str) -> Engine:
        call = f"ExponentialMovingAverage.{call}()"
        model = self._model()
        if model is None:
            raise StateError(f"{call}: the model is gone.\n  Keep it for as long as its average is used.")
        if self._is_swapped_in:
            raise StateError(f"{call} inside swapped_in(): the model holds the average.\n  Call it outside.")
        engine = engine_of(model, call)
        engine.require_idle(call)
        return engine

    def _pairs(self) -> Iterator[tuple[Group, Tensor]]:
        for reference, average in self._averages:
            group = reference()
            assert group is not None
            yield group, average

    def _weights(self, engine: Engine) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's weights that are averaged, flat, each with its average."""
        for group, average in self._pairs():
            group.apply_user_changes()
            yield group.master, average
        for rows, average in self._row_sharded(engine).values():
            yield rows.detach().view(-1), average

    def _row_sharded(self, engine: Engine) -> dict[str, tuple[nn.Parameter, Tensor]]:
        """Return this rank's rows of row-sharded tables, with their average, by name."""
        return {name: (ignored_of(engine).parameters[name], average) for name, average in self._rows.items()}

    # -- checkpoints

    def owned_extents(self) -> Pairs:
        """Return the ranges that this rank writes to a checkpoint, as ``average/<parameter name>``.

        Raises:
            StateError: As :meth:`update`.
        """
        engine = self._idle_engine("owned_extents")
        found: Pairs = []
        for name, (rows, average) in self._row_sharded(engine).items():
            found.append((make_extent(f"{_AVERAGE}{name}", average, rows.shape, slice_of(rows)), average))
        for group, average in self._pairs():
            found += pairs_of(group, owned_pieces(engine, group), average, _AVERAGE)
        return found

    def fresh(self) -> tuple[list[Tensor], Pairs]:
        """Make new averages for :meth:`install`, and this rank's ranges of the stored tensors as targets to load into.

        Raises:
            StateError: As :meth:`update`.
        """
        engine = self._idle_engine("fresh")
        made: list[Tensor] = []
        extents: Pairs = []
        for group, average in self._pairs():
            made.append(torch.zeros_like(average))
            extents += pairs_of(group, group.pieces, made[-1], _AVERAGE)
        for name, (rows, average) in self._row_sharded(engine).items():
            made.append(torch.zeros_like(average))
            extents.append((make_extent(f"{_AVERAGE}{name}", made[-1], rows.shape, slice_of(rows)), made[-1]))
        return made, extents

    def install(self, fresh: list[Tensor], settings: dict[str, Any]) -> None:
        """Set loaded averages and settings."""
        averages = [*(average for _, average in self._averages), *self._rows.values()]
        for average, loaded in zip(averages, fresh, strict=True):
            average.copy_(loaded)
        self.decay, self.num_updates = settings["decay"], settings["num_updates"]

    @property
    def num_bytes(self) -> int:
        """Bytes of the average on this rank."""
        return sum(average.nbytes for average in [*(average for _, average in self._pairs()), *self._rows.values()])

    @property
    def num_host_bytes(self) -> int:
        """Bytes of the average of offloaded weights, which is on the host."""
        return sum(average.nbytes for group, average in self._pairs() if group.facts.is_offloaded)

    @property
    def settings(self) -> dict[str, Any]:
        """The decay and the number of updates, for checkpoints."""
        return {"decay": self.decay, "num_updates": self.num_updates}


def _average_of(weights: Tensor) -> Tensor:
    return weights.to(torch.promote_types(weights.dtype, torch.float32), copy=True)


@torch.no_grad()
def _swap(weights: Tensor, average: Tensor) -> Tensor | None:
    """Swap weights and average in place; if dtypes differ, overwrite the weights and return a copy of them."""
    if average.dtype is not weights.dtype:
        saved_weights = weights.clone()
        weights.copy_(average)
        return saved_weights
    for weights_chunk, average_chunk in zip(weights.split(_CHUNK_NUMEL), average.split(_CHUNK_NUMEL), strict=True):
        saved_chunk = weights_chunk.clone()
        weights_chunk.copy_(average_chunk)
        average_chunk.copy_(saved_chunk)
    return None


def _refuse_steps_of(reference: weakref.ref[Engine]) -> Any:
    def refuse(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        engine = reference()
        row_sharded = ignored_of(engine).row_sharded_parameters.values() if engine is not None else ()
        steps_on = {id(parameter) for settings in optimizer.param_groups for parameter in settings["params"]}
        if engine in engines_of(optimizer) or any(id(rows) in steps_on for rows in row_sharded):
            raise StateError(
                "optimizer.step() inside ExponentialMovingAverage.swapped_in(): it would change the average.\n"
                "  Step outside of it."
            )

    return refuse
