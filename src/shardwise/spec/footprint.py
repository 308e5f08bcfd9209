"""The bytes that a rank holds, in closed form from the layouts.

With Ψ parameter elements in fp32 on N ranks, AdamW, even shapes and no padding, per rank:

==============  ==========  =========  =========  =====================================  ==============================
preset          parameters  gradients  optimizer  gathered                               gradient buffers
==============  ==========  =========  =========  =====================================  ==============================
ddp             4Ψ          4Ψ         8Ψ         -                                      -
zero1           4Ψ          4Ψ         8Ψ/N       -                                      -
zero2           4Ψ          4Ψ/N       8Ψ/N       -                                      two units and the root
shard_grad_op   4Ψ/N        4Ψ/N       8Ψ/N       4Ψ                                     two units and the root
zero3           4Ψ/N        4Ψ/N       8Ψ/N       two units and the root                 two units and the root
==============  ==========  =========  =========  =====================================  ==============================

which is ZeRO's table 1 (arXiv 1910.02054: 2+2+12 bytes in mixed precision) in single precision, plus the live units.
The functions here count what is really held: padding, headers, slots of uneven units, and the receive buffers that sums
over Gloo need.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

from shardwise.spec.flat import flat_ranges
from shardwise.spec.layout import GroupLayout, ReduceLayout
from shardwise.spec.placement import Placements
from shardwise.spec.precision import item_bytes

#: Slots per size class for gathered units.
SLOTS_PER_CLASS = 2


def size_class(numel: int) -> int:
    """Groups whose sizes round to the same class share slots: sizes are rounded up to an eighth of a power of two."""
    if numel <= 8:
        return numel
    step = 1 << ((numel - 1).bit_length() - 4)
    return -(-numel // step) * step


@dataclass(frozen=True)
class GroupShape:
    """What the arithmetic needs to know of a group.

    Attributes:
        unit: Number of its unit, in order of registration, the root 0.
        layout: Its flat layout.
        row: Placements in force for it.
        depth: Units that enclose its unit.
        reshards: Its unit is released between forward and backward.
        is_trainable: It takes part in reductions.
        compute_dtype: Of the gathered buffer; by default the master's.
        reduce_dtype: Of gradient buffers and sums; by default the master's.
        flat_kinds: Weight-decay group of each parameter where the optimizer sees flat runs of them (``spec.flat``).
    """

    unit: int
    layout: GroupLayout
    row: Placements
    depth: int
    reshards: bool
    is_trainable: bool
    compute_dtype: str | None = None
    reduce_dtype: str | None = None
    flat_kinds: tuple[int | None, ...] | None = None

    @property
    def master_dtype(self) -> str:
        """Dtype of what the optimizer updates."""
        return self.layout.params[0].dtype

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of the master."""
        return item_bytes(self.master_dtype)

    @property
    def gather_item_bytes(self) -> int:
        """Bytes of one gathered element."""
        return item_bytes(self.compute_dtype or self.master_dtype)

    @property
    def reduce_item_bytes(self) -> int:
        """Bytes of one element of a gradient buffer."""
        return item_bytes(self.reduce_dtype or self.master_dtype)

    @property
    def is_cast(self) -> bool:
        """It computes in another dtype than the master's."""
        return self.compute_dtype not in {None, self.master_dtype}

    @property
    def reduces_cast(self) -> bool:
        """Its gradients are reduced in another dtype than the master's."""
        return self.reduce_dtype not in {None, self.master_dtype}

    @property
    def reduce_layout(self) -> ReduceLayout:
        """Layout of its gradient buffer."""
        return ReduceLayout(self.layout, self.layout.size if self.row.shards_optimizer else 1)


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank, by category. All of it persists from the second step on; activations come on top.

    Attributes:
        parameters: Masters, and replicas where parameters are replicated.
        gradients: What ``.grad`` lives in, and full-size local sums where the row keeps them.
        optimizer: State of the elements that this rank updates.
        gathered: Slots for gathered units.
        reduce: Pooled full-size gradient buffers, and the receive buffers of the sums.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    reduce: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))

    def as_dict(self) -> dict[str, int]:
        """Bytes by category name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        parts = ", ".join(f"{field.name} {getattr(self, field.name):,}" for field in fields(self))
        return f"{parts}; {self.total:,} in all, before activations"


def footprint(
    groups: Sequence[GroupShape],
    *,
    rank: int,
    backward_order: Sequence[int] | None = None,
    num_gradient_buffers: int = 2,
    optimizer_tensors: int = 2,
    optimizer_scalar_bytes: int = 4,
    has_receive_buffers: bool = True,
) -> Footprint:
    """The bytes that rank ``rank`` holds in the steady state.

    Args:
        groups: Every group of the model.
        rank: Coordinate on the data-parallel axis; slices differ in how much of them is padding.
        backward_order: Unit numbers as backward enters them; by default the root, then the others from last to first.
        num_gradient_buffers: Limit of the pool per size class.
        optimizer_tensors: State tensors per parameter: 2 for Adam, 1 for SGD with momentum, 0 without.
        optimizer_scalar_bytes: Per-parameter scalars: Adam's step counter, a float32.
        has_receive_buffers: Sums are made by the library (Gloo), which receives peers' slices before adding.
    """
    parameters = gradients = optimizer = 0
    for group in groups:
        layout, row, item = group.layout, group.row, group.item_bytes
        if row.shards_parameters:
            parameters += item * layout.slice_numel(rank)
        else:
            parameters += group.gather_item_bytes * layout.numel
            if group.is_cast:  # the replica is no longer the master
                parameters += item * (layout.slice_numel(rank) if row.shards_optimizer else layout.numel)
        if not group.is_trainable:
            continue
        reduce = group.reduce_layout
        if row.pools_gradients:
            gradients += item * reduce.slice_numel(rank)
        else:
            gradients += group.reduce_item_bytes * reduce.numel
            if group.reduces_cast:  # .grad no longer lives in the buffer that is reduced
                gradients += item * reduce.slice_numel(rank)
        held = _updated_numels(group, rank)
        optimizer += sum(item * optimizer_tensors * numel for numel in held)
        optimizer += optimizer_scalar_bytes * len(held) if optimizer_tensors > 1 else 0
    return Footprint(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        gathered=gathered_bytes(groups),
        reduce=reduce_bytes(
            groups,
            rank=rank,
            backward_order=backward_order,
            num_gradient_buffers=num_gradient_buffers,
            has_receive_buffers=has_receive_buffers,
        ),
    )


def _updated_numels(group: GroupShape, rank: int) -> list[int]:
    """Elements of each tensor that the optimizer has of a group."""
    layout = group.layout
    held = layout.owned(rank) if group.row.shards_optimizer else layout.whole
    if group.flat_kinds is None:
        return [piece.numel for piece in held]
    empty = [0 for piece in held if not piece.numel]  # in no range, but optimizers count their steps
    return empty + [span.numel for span in flat_ranges(held, group.flat_kinds)]


def waiting_bytes(groups: Sequence[GroupShape], *, eager_numel: int) -> int:
    """The most bytes of gradients that wait, as autograd made them, for the boundary of their unit.

    A gradient of at least ``eager_numel`` elements is moved into the flat buffer at once; smaller ones wait until
    backward leaves the unit. They are gone at the end of backward, and while activations are at their peak few of them
    exist: they come on top of :class:`Footprint` only where activations are small.
    """
    waiting: dict[int, int] = {}
    depths = {group.unit: group.depth for group in groups}
    for group in groups:
        if group.is_trainable:
            small = sum(param.numel for param in group.layout.params if param.numel < eager_numel)
            waiting[group.unit] = waiting.get(group.unit, 0) + group.gather_item_bytes * small
    # Units of one depth follow one another; those that enclose them wait as well.
    return sum(
        max((num_bytes for unit, num_bytes in waiting.items() if depths[unit] == depth), default=0)
        for depth in set(depths.values())
    )


def gathered_bytes(groups: Sequence[GroupShape]) -> int:
    """Bytes of the slots: dealt out in turn, ``SLOTS_PER_CLASS`` for each (depth, size class, dtype, trainable)."""
    total = 0
    turns: dict[tuple[int, int, str, bool], list[int]] = {}
    for group in groups:
        if not group.row.shards_parameters:
            continue
        numel, item = group.layout.numel, group.gather_item_bytes
        if not (group.reshards and group.depth > 0):
            total += numel * item
            continue
        key = (group.depth, size_class(numel), group.compute_dtype or group.master_dtype, group.is_trainable)
        turns.setdefault(key, []).append(numel * item)
    for sizes in turns.values():
        total += sum(max(sizes[turn::SLOTS_PER_CLASS]) for turn in range(min(SLOTS_PER_CLASS, len(sizes))))
    return total


def reduce_bytes(
    groups: Sequence[GroupShape],
    *,
    rank: int,
    backward_order: Sequence[int] | None = None,
    num_gradient_buffers: int = 2,
    has_receive_buffers: bool = True,
) -> int:
    """Bytes of pooled gradient buffers and receive buffers, found by walking through one backward.

    A unit takes its buffer while it runs; at its end the reduction before is finished, and its own is issued. Backwards
    are repeated until none makes a further buffer.
    """
    trained = [group for group in groups if group.is_trainable]
    last_first = sorted({group.unit for group in trained}, reverse=True)
    order = list(dict.fromkeys(backward_order)) if backward_order is not None else last_first
    walk = _Reductions(trained, rank, limit=num_gradient_buffers, has_receive_buffers=has_receive_buffers)
    before = -1
    while before != walk.total_bytes:
        before = walk.total_bytes
        for unit in [*(unit for unit in order if unit != 0), 0]:
            walk.reduce([group for group in trained if group.unit == unit])
        walk.finish()
    return walk.total_bytes


class _Reductions:
    """Counts the buffers that a backward's reductions make, while earlier ones are used again."""

    def __init__(self, groups: Sequence[GroupShape], rank: int, *, limit: int, has_receive_buffers: bool) -> None:
        self.total_bytes = 0
        self._rank = rank
        self._limit = limit
        self._has_receive_buffers = has_receive_buffers
        self._in_flight: list[tuple[GroupShape, int]] = []  # with the elements of its receive buffer
        self._pooled: Counter[tuple[int, str]] = Counter()  # gradient buffers that are free, by class
        self._made: Counter[tuple[int, str]] = Counter()
        self._receiving: dict[str, list[int]] = {}  # elements of the receive buffers that are free, smallest first
        self._pooled_bytes: dict[tuple[int, str], int] = {}
        for group in groups:
            key = self._pool_key(group)
            size = group.reduce_layout.numel * group.reduce_item_bytes
            self._pooled_bytes[key] = max(self._pooled_bytes.get(key, 0), size)

    def reduce(self, groups: Sequence[GroupShape]) -> None:
        """One unit takes its buffers, finishes the reductions issued before, and issues its own."""
        for group in groups:
            if group.row.pools_gradients:
                self._take(group)
        self.finish()
        self._in_flight = [(group, self._receive(group)) for group in groups]

    def finish(self) -> None:
        """Finish the reductions under way."""
        while self._in_flight:
            self._finish_oldest()

    def _take(self, group: GroupShape) -> None:
        """A gradient buffer; the pool waits for the oldest reduction rather than growing beyond its limit."""
        key = self._pool_key(group)
        while not self._pooled[key] and self._made[key] >= self._limit and self._in_flight:
            self._finish_oldest()
        if self._pooled[key]:
            self._pooled[key] -= 1
        else:
            self._made[key] += 1
            self.total_bytes += self._pooled_bytes[key]

    def _receive(self, group: GroupShape) -> int:
        """A receive buffer: the smallest free one that is large enough, else a new one in place of the largest."""
        if not self._has_receive_buffers:
            return 0
        numel, item = received_numel(group, self._rank), group.reduce_item_bytes
        free = self._receiving.setdefault(group.reduce_dtype or group.master_dtype, [])
        index = bisect.bisect_left(free, numel)
        if index < len(free):
            return free.pop(index)
        if free:
            self.total_bytes -= free.pop() * item
        self.total_bytes += numel * item
        return numel

    def _finish_oldest(self) -> None:
        group, received = self._in_flight.pop(0)
        if group.row.pools_gradients:
            self._pooled[self._pool_key(group)] += 1
        if self._has_receive_buffers:
            bisect.insort(self._receiving[group.reduce_dtype or group.master_dtype], received)

    def _pool_key(self, group: GroupShape) -> tuple[int, str]:
        return size_class(group.reduce_layout.numel), group.reduce_dtype or group.master_dtype


def received_numel(group: GroupShape, rank: int) -> int:
    """Elements that a rank receives from its peers to add up its own slice."""
    return summed_numel(group, rank) * (group.layout.size - 1)


def summed_numel(group: GroupShape, rank: int) -> int:
    """Elements that a rank adds up: its slice; of an all-reduce an equal part, to the nearest element."""
    if group.row.shards_optimizer:
        return group.reduce_layout.slice_numel(rank)
    size, numel = group.layout.size, group.reduce_layout.numel
    return (rank + 1) * numel // size - rank * numel // size
