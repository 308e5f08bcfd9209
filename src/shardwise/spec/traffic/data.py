"""The collectives of one training step, predicted from layouts and order alone: kind, axis, unit, bytes, sequence."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from shardwise.spec.facts import GroupFacts, UnitFacts
from shardwise.spec.memory.footprint import Replicas, own_part, summed_numel
from shardwise.spec.precision import item_bytes
from shardwise.spec.quantize import summed_cuts


class Collective(NamedTuple):
    """One predicted collective: its kind, the unit that it serves, the bytes that this rank sends, and the axis."""

    kind: str
    unit: str
    sent_bytes: int
    axis: str = "dp_shard"


def gather_bytes(group: GroupFacts, rank: int) -> int:
    """Bytes that a rank sends in the all-gather of a group: its slice, to every other rank."""
    return (group.layout.size - 1) * group.slice_bytes(group.place(rank))


def reduction_bytes(group: GroupFacts, rank: int) -> int:
    """Bytes that a rank sends to reduce a group: every slice but its own; in an all-reduce also its own to every other.

    Where sums are sent quantized, the second part of an all-reduce is a collective of its own (:func:`spread_bytes`).
    """
    if group.reduced_as is not None:
        return sum(group.summed_bytes) - group.summed_bytes[group.place(rank)]
    if not group.row.shards_optimizer:
        return (
            all_reduced_numel(group.reduce_layout.numel, group.layout.size, group.place(rank)) * group.reduce_item_bytes
        )
    return (group.reduce_layout.numel - summed_numel(group, rank)) * group.reduce_item_bytes


def spread_bytes(group: GroupFacts, rank: int) -> int:
    """Bytes that a rank sends to gather the parts of a sum that was sent quantized: its part, to every other rank."""
    cuts, place = summed_cuts(group.reduce_layout), group.place(rank)
    return (group.layout.size - 1) * (cuts[place + 1] - cuts[place]) * group.reduce_item_bytes


def inner_gather_bytes(group: GroupFacts, rank: int) -> int:
    """Bytes that a rank sends to gather a group that was kept sharded over an inner group of ranks."""
    return (group.inner_size - 1) * group.inner_numel(group.place(rank)) * group.gather_item_bytes


def replicate_bytes(group: GroupFacts, rank: int, replicas: Replicas) -> int:
    """Bytes that a rank sends to sum a group over ``dp_replicate``: an all-reduce of its reduced slice."""
    held = group.reduce_layout.slice_numel(group.place(rank))
    return all_reduced_numel(held, replicas.size, replicas.rank) * group.reduce_item_bytes


def all_reduced_numel(numel: int, size: int, rank: int) -> int:
    """Elements that a rank sends in an all-reduce of ``numel``: all parts but its own, then its own to every other."""
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

    Forward gathers every unit once, in its order; a prefetch does not change the sequence. Backward gathers released
    units again, one unit ahead, and reduces a unit when it enters one that neither encloses it nor lies in it. Where a
    module that encloses units is recomputed, its units are gathered in the order of forward when backward reaches the
    module. A sum over ``dp_replicate`` is issued when the next unit is reduced.

    Args:
        units: By number.
        rank: Coordinate on ``dp_shard``.
        forward_order: Unit numbers in the order of their forward calls.
        backward_order: Unit numbers as backward enters them.
        is_synchronising: Whether gradients are reduced; ``False`` inside ``gradient_sync(model, False)``, where sums
            stay on the rank, or inside the group (``replicas.is_deferred``).
        is_first_of_window: Whether replicated parameters are gathered after an update of the optimizer; ``False`` for
            the later microbatches of an accumulation.
        replicas: Coordinate on ``dp_replicate``; ``None``: gradients are not summed over it.
    """
    step = _Step(
        units, rank, is_synchronising=is_synchronising, is_first_of_window=is_first_of_window, replicas=replicas
    )
    step.forward(forward_order)
    step.backward(backward_order)
    return step.trace


def window_order(units: Iterable[int], stages: Mapping[int, Collection[int]] = MappingProxyType({})) -> list[int]:
    """The order in which a pipeline's step reduces units: later stages first, in a stage the last unit first.

    In every schedule the last backward of a rank's later stage ends before that of an earlier one. Units that belong to
    no single stage are reduced at the end of the step.

    Args:
        units: Numbers of all units.
        stages: By stage, the units that belong to it alone.
    """
    alone = [unit for stage in sorted(stages, reverse=True) for unit in sorted(stages[stage], reverse=True)]
    return [*alone, *sorted(set(units).difference(alone), reverse=True)]


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
        units: By number, in the order of forward.
        rank: Coordinate on ``dp_shard``.
        stages: As in :func:`window_order`; not needed where only the root belongs to no single stage.
        is_synchronising: ``False`` inside ``gradient_sync(model, False)``: nothing is reduced.
        replicas: Coordinate on ``dp_replicate``; ``None``: gradients are not summed over it.
    """
    step = _Step(units, rank, is_synchronising=is_synchronising, is_first_of_window=True, replicas=replicas)
    step.forward(sorted(units))
    step.reduce(window_order(units, stages))
    return step.trace


class _Step:
    """Walks through one step.

    ``_resident`` are the units whose gathered buffer is up to date, ``_kept`` those that stay sharded over an inner
    group of ranks (``reshard_after_forward`` as a number).
    """

    def __init__(
        self,
        units: Mapping[int, UnitFacts],
        rank: int,
        *,
        is_synchronising: bool,
        is_first_of_window: bool,
        replicas: Replicas | None,
    ) -> None:
        self.trace: list[Collective] = []
        self._units = units
        self._rank = rank
        self._replicas = replicas
        self._goes_on = replicas is not None and is_synchronising
        self._reduces = is_synchronising or (replicas is not None and replicas.is_deferred)
        self._refreshes = is_first_of_window
        self._resident: set[int] = set()
        self._kept: set[int] = set()
        self._entered: list[int] = []
        self._recomputed: set[str] = set()
        self._forward_order: Sequence[int] = ()
        self._reducing: list[tuple[str, GroupFacts]] = []

    def forward(self, order: Sequence[int]) -> None:
        self._forward_order = order
        if not self._refreshes:  # the microbatch before has left them there
            self._kept = {unit for unit in order[:-1] if self._units[unit].is_released}
        for place, unit in enumerate(order):
            self._need(unit)
            is_last = place == len(order) - 1
            if self._units[unit].is_released and not is_last:
                self._resident.discard(unit)
                self._kept.add(unit)

    def backward(self, order: Sequence[int]) -> None:
        for place, unit in enumerate(order):
            later = order[place + 1 :]
            for other in [other for other in self._entered if other not in self._units[unit].family]:
                if other not in later:
                    self._leave(other)
            self._need(unit)
            if unit not in self._entered:
                self._entered.append(unit)
            if later:
                self._need(later[0])
            self._recompute(unit)
        for unit in reversed(self._entered.copy()):
            self._leave(unit)
        self._go_on()

    def reduce(self, order: Sequence[int]) -> None:
        """Reduce units in this order; all gradients are there."""
        for unit in order:
            self._entered.append(unit)
            self._leave(unit)
        self._go_on()

    def _recompute(self, entered: int) -> None:
        """Gather what is recomputed when backward enters a unit: the module of that name, or one around the unit."""
        for place in (self._units[entered].name, self._units[entered].recomputed_in):
            if place is not None and place not in self._recomputed:
                self._recomputed.add(place)
                for unit in self._forward_order:
                    if self._units[unit].recomputed_in == place:
                        self._need(unit)

    def _need(self, unit: int) -> None:
        if unit in self._resident:
            return
        self._resident.add(unit)
        shape = self._units[unit]
        for group in shape.groups:
            if group.inner_size and unit in self._kept:
                sent = inner_gather_bytes(group, self._rank)
                self.trace.append(Collective("all_gather", shape.name, sent, "dp_shard_inner"))
            elif group.row.shards_optimizer and (group.row.shards_parameters or self._refreshes):
                self.trace.append(Collective("all_gather", shape.name, gather_bytes(group, self._rank), group.axis))

    def _leave(self, unit: int) -> None:
        self._entered.remove(unit)
        shape = self._units[unit]
        trained = [group for group in shape.groups if group.is_trainable and self._reduces]
        if trained:
            self._go_on()
        for group in trained:
            sent = reduction_bytes(group, self._rank)
            kind = group.row.gradient_move if group.reduced_as is None else "all_to_all"
            self.trace.append(Collective(kind, shape.name, sent, group.axis))
            self._reducing.append((shape.name, group))
        if any(group.row.shards_parameters for group in shape.groups):
            self._resident.discard(unit)

    def _go_on(self) -> None:
        """Continue the sums that are complete inside their group: over ``dp_replicate``."""
        for name, group in self._reducing:
            if group.reduced_as is not None and not group.row.shards_optimizer:
                self.trace.append(Collective("all_gather", name, spread_bytes(group, self._rank), group.axis))
            if self._goes_on and self._replicas is not None:
                sent = replicate_bytes(group, self._rank, self._replicas)
                self.trace.append(Collective("all_reduce", name, sent, "dp_replicate"))
        self._reducing.clear()


#: What ``sync_buffers`` may be. ``auto``: those that are saved with the model are broadcast.
BUFFER_SYNCS = ("auto", "broadcast", "mean", "none")

#: The unit that is named in collectives about buffers.
BUFFERS = "buffers"


@dataclass(frozen=True)
class BufferMessage:
    """The buffers of one dtype, in one flat message.

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


def sync_trace(messages: Sequence[BufferMessage], *, rank: int, size: int, axis: str = "dp_shard") -> list[Collective]:
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
