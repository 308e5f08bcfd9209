"""Prediction of the collectives of one training step from layouts and order: kind, axis, unit, bytes, sequence."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from shardwise.spec.memory.footprint import Replicas, own_part, summed_numel
from shardwise.spec.precision import item_bytes
from shardwise.spec.quantize import summed_bounds
from shardwise.spec.traffic.moments import Event, Moment, Walk
from shardwise.spec.unit_facts import GroupFacts, UnitFacts


class Collective(NamedTuple):
    """One predicted collective: its kind, the unit that it serves, the bytes that this rank sends, and the axis."""

    kind: str
    unit: str
    sent_bytes: int
    axis: str = "dp_shard"


def gather_bytes(group: GroupFacts, rank: int) -> int:
    """Bytes that a rank sends in the all-gather of a group: its slice, to every other rank."""
    return (group.layout.size - 1) * group.slice_bytes(group.slice_index(rank))


def reduction_bytes(group: GroupFacts, rank: int) -> int:
    """Bytes that a rank sends to reduce a group: other ranks' slices; in an all-reduce also its own to each of them.

    With quantized sums, the second part of an all-reduce is a separate collective (:func:`spread_bytes`).
    """
    if group.reduced_as is not None:
        return sum(group.summed_bytes) - group.summed_bytes[group.slice_index(rank)]
    if not group.placements.shards_optimizer:
        numel = all_reduced_numel(group.reduce_layout.numel, group.layout.size, group.slice_index(rank))
        return numel * group.reduce_item_bytes
    return (group.reduce_layout.numel - summed_numel(group, rank)) * group.reduce_item_bytes


def spread_bytes(group: GroupFacts, rank: int) -> int:
    """Bytes that a rank sends to gather the parts of a quantized sum: its part, to every other rank."""
    bounds, index = summed_bounds(group.reduce_layout), group.slice_index(rank)
    return (group.layout.size - 1) * (bounds[index + 1] - bounds[index]) * group.reduce_item_bytes


def inner_gather_bytes(group: GroupFacts, rank: int) -> int:
    """Bytes that a rank sends to gather a group from an inner group of ranks."""
    return (group.inner_size - 1) * group.inner_numel(group.slice_index(rank)) * group.gather_item_bytes


def replicate_bytes(group: GroupFacts, rank: int, replicas: Replicas) -> int:
    """Bytes that a rank sends to sum a group over ``dp_replicate``: an all-reduce of its reduced slice."""
    numel = group.reduce_layout.slice_numel(group.slice_index(rank))
    return all_reduced_numel(numel, replicas.size, replicas.rank) * group.reduce_item_bytes


def all_reduced_numel(numel: int, size: int, rank: int) -> int:
    """Elements that a rank sends in an all-reduce of ``numel``: others' parts, then its own part to all other ranks."""
    own = own_part(numel, size, rank)
    return numel - own + own * (size - 1)


def step_trace(
    units: Mapping[int, UnitFacts],
    *,
    rank: int,
    forward_order: Sequence[int],
    backward_order: Sequence[int],
    is_synchronising: bool = True,
    is_first_of_window: bool = True,
    replicas: Replicas | None = None,
) -> list[Collective]:
    """The collectives of one forward and backward on ``rank``, in order, after the first step.

    Forward gathers every unit once, in order; a prefetch does not change the sequence. Backward gathers released units
    again, one unit ahead, and reduces a unit when it enters a unit that neither encloses the first nor is inside it. If
    a module that encloses units is recomputed, its units are gathered in the order of forward when backward reaches the
    module. A sum over ``dp_replicate`` is issued when the next unit is reduced.

    Args:
        units: Facts of each unit, by number.
        rank: Coordinate on ``dp_shard``.
        forward_order: Unit numbers in the order of their forward calls.
        backward_order: Unit numbers in the order in which backward enters them.
        is_synchronising: Whether gradients are reduced; ``False`` inside ``gradient_sync(model, False)``, where sums
            stay on the rank, or inside the group (``replicas.is_deferred``).
        is_first_of_window: Whether replicated parameters are gathered after an update of the optimizer; ``False`` for
            the later microbatches of an accumulation.
        replicas: Coordinate on ``dp_replicate``; ``None``: gradients are not summed over it.
    """
    walk = step_walk(units, is_synchronising=is_synchronising, is_first_of_window=is_first_of_window, replicas=replicas)
    walk.forward(forward_order)
    walk.backward(backward_order)
    return [
        collective
        for moment in walk.moments
        for collective in unit_collectives(
            units,
            moment,
            rank=rank,
            is_synchronising=is_synchronising,
            is_first_of_window=is_first_of_window,
            replicas=replicas,
        )
    ]


def window_order(units: Iterable[int], stages: Mapping[int, Collection[int]] = MappingProxyType({})) -> list[int]:
    """The order in which a pipeline's step reduces units: later stages first, in a stage the last unit first.

    In every schedule the last backward of a rank's later stage ends before that of an earlier stage. ``stages`` has,
    for each stage, the units that belong to no other stage. Other units are reduced at the end of the step.
    """
    ordered = [unit for stage in sorted(stages, reverse=True) for unit in sorted(stages[stage], reverse=True)]
    return [*ordered, *sorted(set(units).difference(ordered), reverse=True)]


def window_trace(
    units: Mapping[int, UnitFacts],
    *,
    rank: int,
    stages: Mapping[int, Collection[int]] = MappingProxyType({}),
    is_synchronising: bool = True,
    replicas: Replicas | None = None,
) -> list[Collective]:
    """The collectives of a pipeline's step on the data-parallel axes, for any number of microbatches.

    Every unit of the rank's stages is gathered once, when the first forward reaches it, and reduced once: in the last
    backward of its stage, or at the end of the step.

    Args:
        units: Facts of each unit, by number; numbers follow the order of forward.
        rank: Coordinate on ``dp_shard``.
        stages: As in :func:`window_order`; not needed if only the root belongs to several stages.
        is_synchronising: ``False`` inside ``gradient_sync(model, False)``: nothing is reduced.
        replicas: Coordinate on ``dp_replicate``; ``None``: gradients are not summed over it.
    """
    walk = step_walk(units, is_synchronising=is_synchronising, replicas=replicas)
    walk.forward(sorted(units))
    walk.reduce(window_order(units, stages))
    return [
        collective
        for moment in walk.moments
        for collective in unit_collectives(
            units, moment, rank=rank, is_synchronising=is_synchronising, replicas=replicas
        )
    ]


def unit_collectives(
    units: Mapping[int, UnitFacts],
    moment: Moment,
    *,
    rank: int,
    is_synchronising: bool,
    is_first_of_window: bool = True,
    replicas: Replicas | None,
) -> Iterator[Collective]:
    """The collectives that ``rank`` issues at one moment of a step; see :func:`step_trace` for the arguments."""
    if moment.event is Event.GATHER:
        unit = units[moment.unit]
        yield from _gathers(unit, rank, is_kept=moment.is_kept, is_first_of_window=is_first_of_window)
    elif moment.event is Event.REDUCE:
        unit = units[moment.unit]
        for group in filter(_is_trained, unit.groups):
            kind = group.placements.gradient_move if group.reduced_as is None else "all_to_all"
            yield Collective(kind, unit.name, reduction_bytes(group, rank), group.axis)
    elif moment.event is Event.ADVANCE and not moment.is_last:
        yield from _second_phases(units[moment.unit], rank, replicas if is_synchronising else None)


def _is_trained(group: GroupFacts) -> bool:
    return group.is_trainable


def _gathers(unit: UnitFacts, rank: int, *, is_kept: bool, is_first_of_window: bool) -> Iterator[Collective]:
    for group in unit.groups:
        if group.inner_size and is_kept:
            yield Collective("all_gather", unit.name, inner_gather_bytes(group, rank), "dp_shard_inner")
        elif group.placements.shards_optimizer and (group.placements.shards_parameters or is_first_of_window):
            yield Collective("all_gather", unit.name, gather_bytes(group, rank), group.axis)


def _second_phases(unit: UnitFacts, rank: int, replicas: Replicas | None) -> Iterator[Collective]:
    """Yield the collectives that follow a unit's reductions: gathers of packed sums, and sums over ``dp_replicate``."""
    for group in filter(_is_trained, unit.groups):
        if group.reduced_as is not None and not group.placements.shards_optimizer:
            yield Collective("all_gather", unit.name, spread_bytes(group, rank), group.axis)
        if replicas is not None:
            yield Collective("all_reduce", unit.name, replicate_bytes(group, rank, replicas), "dp_replicate")


def step_walk(
    units: Mapping[int, UnitFacts],
    *,
    is_synchronising: bool,
    is_first_of_window: bool = True,
    replicas: Replicas | None,
    num_left: int = 0,
) -> Walk:
    """The walk through a step of these units; see :func:`step_trace` and ``Walk`` for the arguments."""
    is_spread = any(
        group.reduced_as is not None and not group.placements.shards_optimizer
        for unit in units.values()
        for group in unit.groups
    )
    return Walk(
        units,
        num_phases=2 if is_spread or (is_synchronising and replicas is not None) else 1,
        num_left=0 if replicas is not None else num_left,
        reduces=is_synchronising or (replicas is not None and replicas.is_deferred),
        is_first_of_window=is_first_of_window,
    )


#: Values of ``sync_buffers``. ``auto``: buffers that are saved with the model are broadcast.
BUFFER_SYNCS = ("auto", "broadcast", "mean", "none")

#: The unit's name in collectives for buffers.
BUFFERS = "buffers"


@dataclass(frozen=True)
class BufferMessage:
    """One flat message with the buffers of one dtype.

    Attributes:
        dtype: Dtype of the buffers; ``bool`` is sent as bytes.
        numel: Elements of all buffers together.
        is_averaged: After rank 0's values are broadcast, the ranks' differences from them are averaged (all-reduce).
    """

    dtype: str
    numel: int
    is_averaged: bool = False

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return item_bytes(self.dtype)


def sync_trace(messages: Sequence[BufferMessage], *, rank: int, size: int, axis: str) -> list[Collective]:
    """The collectives that make buffers equal, as ``rank`` of ``axis`` issues them; rank 0 is the root."""
    trace = []
    for message in messages:
        sent = message.numel * (size - 1) if rank == 0 else 0
        trace.append(Collective("broadcast", BUFFERS, sent * message.item_bytes, axis))
        if message.is_averaged:
            sent = all_reduced_numel(message.numel, size, rank)
            trace.append(Collective("all_reduce", BUFFERS, sent * message.item_bytes, axis))
    return trace


def held_bytes(messages: Sequence[BufferMessage], *, rank: int, size: int, has_receive_buffers: bool) -> int:
    """Bytes of the flat messages, which stay allocated, and of the receive buffers of averages."""
    total = 0
    for message in messages:
        numel = message.numel
        if message.is_averaged:
            numel += message.numel
            numel += own_part(message.numel, size, rank) * (size - 1) if has_receive_buffers else 0
        total += numel * message.item_bytes
    return total
