"""``sw.join``: training loops in which ranks have different numbers of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from shardwise.comm.control import all_gather_ints
from shardwise.engine.attach import Observer
from shardwise.engine.engine import Engine
from shardwise.engine.extensions import batch_norm
from shardwise.engine.extensions.module_buffers import BufferSync
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.ignored import ignored_of
from shardwise.spec.errors import RankDisagreement, StateError

if TYPE_CHECKING:
    from shardwise.engine.unit import Unit

_T = TypeVar("_T")
_NONE, _HAS, _NOTHING_TO_REPEAT = range(3)


class _Repeats(Observer):
    """Makes a rank that repeats a batch add no gradients, not even zeros: a parameter that no real batch uses has none.

    Attributes:
        num_ranks_with_data: Number of ranks that have a real batch; mean losses are divided by it.
        is_repeat: Whether this rank's current batch is a repeated one.
    """

    def __init__(self) -> None:
        self.is_repeat = False
        self._has_sums = False  # whether gradients of real batches are accumulated on this rank and not reduced yet

    def before_reduce(self, engine: Engine, unit: Unit) -> None:  # noqa: ARG002
        """Drop the gradients that a repeated batch gave a unit."""
        if not self.is_repeat or self._has_sums:
            return
        for group in (each for each in unit.groups if not each.facts.is_expert):  # experts compute other ranks' tokens
            for index in range(len(group.unsharded) if not group.gradient.has_sums else 0):
                group.gradient.drop_parameter(index)

    def backward_ended(self, engine: Engine) -> None:
        """Record whether accumulated gradients wait for a reduction."""
        self._has_sums = not engine.window.syncs and (self._has_sums or not self.is_repeat)


def join(
    model: nn.Module,
    batches: Iterable[_T],
    *,
    like: _T | None = None,
    divide_by_initial_world_size: bool = True,
    throw_on_early_termination: bool = False,
) -> Iterator[tuple[_T, float]]:
    """Give every rank as many batches as the rank with the most has, each with a weight: 1.0, or 0.0 for a repeat.

    ::

        for batch, weight in sw.join(model, my_batches):  # some ranks have more of them
            (weight * model(**batch).loss).backward()
            sw.clip_grad_norm(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    A rank that runs out of batches gets its last one again, with the weight 0.0: multiply the loss, and everything else
    that is summed, by the weight. The gradients are then those of one process that sees only the real batches. Every
    rank makes the same steps, so schedulers, ``sw.save`` and evaluations in the loop work as without ``join``. In
    evaluation and with ``generate()``, call the model for every batch, and leave out results whose weight is 0.0.

    Args:
        model: A parallelized model. Ranks that differ only on ``tp``, ``cp`` or ``pp`` must have as many batches.
        batches: This rank's batches.
        like: A batch for a rank that has no batch at all.
        divide_by_initial_world_size: Divide sums of gradients by the number of all ranks. ``False``: divide by the
            number of ranks that still have a batch, so that every sample has the same weight.
        throw_on_early_termination: Raise on all ranks as soon as one rank has no batch left and another has one.

    Yields:
        A batch and its weight.

    Collective:
        An all-gather of eight bytes per rank for each batch; at the end the buffers are synchronized if that is due.
        All ranks must call, and iterate to the end or stop at the same batch.

    Raises:
        RankDisagreement: With ``throw_on_early_termination``: some ranks have no batch left.
        StateError: A rank has no batch at all and ``like`` is missing; or the model has batch norm over all ranks,
            which would count the repeats; or ``divide_by_initial_world_size=False`` with ``row_sharded`` embeddings.
    """
    engine = engine_of(model, "sw.join")
    engine.require_idle("sw.join()")
    if batch_norm.comms_of(model) and not throw_on_early_termination:
        raise StateError(
            "sw.join(): batch norm over all ranks would count samples that are repeated.\n"
            "  Use plain batch norm, drop_last=True, or sw.join(..., throw_on_early_termination=True)."
        )
    if ignored_of(engine).row_sharded and not divide_by_initial_world_size:
        raise StateError(
            "sw.join(): gradients of row-sharded embeddings are divided by all ranks.\n"
            "  Leave divide_by_initial_world_size out, or build the plan without row_sharded."
        )
    return _joined(
        engine, iter(batches), like, divides_by_all=divide_by_initial_world_size, throws=throw_on_early_termination
    )


def _joined(
    engine: Engine, batches: Iterator[_T], batch: _T | None, *, divides_by_all: bool, throws: bool
) -> Iterator[tuple[_T, float]]:
    comm, repeats = engine.comms.control, _Repeats()
    engine.extras.add(repeats)
    try:
        while True:
            has = _NOTHING_TO_REPEAT if batch is None else _NONE
            for batch in batches:  # noqa: B007, PLR1704  takes one batch, if there is one
                has = _HAS
                break
            flags = [row[0] for row in all_gather_ints(comm, [has], unit="join")]
            active = [rank for rank, each in enumerate(flags) if each == _HAS]
            if not active:
                break
            if throws and len(active) < comm.size:
                left = next(rank for rank in range(comm.size) if rank not in active)
                raise RankDisagreement(
                    f"rank {active[0]} has another batch, rank {left} has none left.\n"
                    "  Give every rank as many batches (drop_last=True), or leave throw_on_early_termination out."
                )
            if _NOTHING_TO_REPEAT in flags:
                raise StateError(
                    f"sw.join(): rank {flags.index(_NOTHING_TO_REPEAT)} has no batch at all, so none to repeat.\n"
                    "  Give all ranks one to take part with: sw.join(model, batches, like=batch)."
                )
            if len(active) != (repeats.num_ranks_with_data or comm.size):
                repeats.num_ranks_with_data = len(active)
                _count(engine, active, divides_by_all=divides_by_all)
            assert batch is not None
            repeats.is_repeat = has != _HAS
            yield batch, float(has == _HAS)
        engine.sync_buffers()
    finally:
        engine.extras.remove(repeats)
        _count(engine, range(comm.size), divides_by_all=divides_by_all)


def _count(engine: Engine, active: Sequence[int], *, divides_by_all: bool) -> None:
    """Set the ranks that have a batch as sources of buffers, and as the divisor of gradients unless all ranks count."""
    if not divides_by_all:
        for group in engine.groups:
            group.gradient.set_divisor(group.facts.num_ranks * len(active) // engine.comms.control.size)
    buffers = engine.extras.find(BufferSync)
    if buffers is not None:
        buffers.set_sources(active)
