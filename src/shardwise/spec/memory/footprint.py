"""A rank's memory in bytes, computed from the layouts.

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

The first three columns are table 1 of ZeRO (arXiv 1910.02054: 2+2+12 bytes in mixed precision) in single precision;
gathered units and gradient buffers are additional. Exceptions:

* With ``dp_replicate`` (``hsdp``), N is the number of ranks of one group.
* Under ``ep`` the experts are counted separately: Ψ/ep elements on N/ep ranks, with separate buffers.
* With ``reshard_after_forward=k`` zero3 has another 4Ψ/k gathered.
* If the optimizer steps inside backward, there are no gradients, and every preset has the gradient buffers of zero3.
* With several microbatches, ``unsharded`` accumulation needs full-size gradients (4Ψ) under zero2, shard_grad_op and
  zero3, and ``sharded`` accumulation needs gradient buffers under ddp and zero1.

The functions here also count padding, headers and the receive buffers of sums over Gloo. Gathered units and gradient
buffers have memory only while they are in use: these two columns are the peak.
"""

from __future__ import annotations

import bisect
import enum
import functools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields

from shardwise.spec.layout import ParamSpec, flat_ranges
from shardwise.spec.unit_facts import GroupFacts

#: Function that returns the bytes of an optimizer's state of a parameter. Arguments: the parameter's name, the elements
#: for which a rank has state, and bytes of an element.
StateBytes = Callable[[str, int, int], int]


def size_class(numel: int) -> int:
    """Round a size up to a class, in steps of an eighth of a power of two; packed buffers of one class are shared."""
    if numel <= 8:
        return numel
    step = 1 << ((numel - 1).bit_length() - 4)
    return -(-numel // step) * step


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank, by category, without activations.

    Attributes:
        parameters: Masters, and replicas of replicated parameters.
        gradients: Memory of ``.grad``, and full-size local sums if the strategy has them.
        optimizer: Optimizer state of the elements that this rank updates.
        gathered: Peak of gathered units, and receive buffers of packed gathers.
        reduce: Peak of full-size gradient buffers in use, and the receive buffers of the sums.
        host: Masters, gradients and optimizer state of offloaded groups; all other categories are on the device.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    reduce: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device and the host together."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def on_device(self) -> int:
        """Bytes on the compute device."""
        return self.total - self.host

    def as_dict(self) -> dict[str, int]:
        """Bytes by category name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        parts = ", ".join(f"{field.name} {getattr(self, field.name):,}" for field in fields(self)[:-1])
        host = f"; {self.host:,} on the host" if self.host else ""
        return f"{parts}; {self.on_device:,} in all, before activations{host}"


def footprint(
    groups: Sequence[GroupFacts],
    *,
    rank: int,
    backward_order: Sequence[int] | None = None,
    num_gradient_buffers: int = 2,
    optimizer_tensors: float | StateBytes = 2,
    optimizer_scalar_bytes: int = 4,
    has_receive_buffers: bool = True,
    replicas: Replicas | None = None,
    accumulations: Collection[str] = (),
    ignored: Sequence[ParamSpec] = (),
) -> Footprint:
    """The memory of rank ``rank`` in the steady state.

    Args:
        groups: Every group of the model.
        rank: Coordinate on ``dp_shard``; slices contain different amounts of padding.
        backward_order: Unit numbers in the order in which backward enters them; by default the root, then the others
            from last to first.
        num_gradient_buffers: Most gradient buffers in use at once.
        optimizer_tensors: State tensors per parameter, of its size and dtype: 2 for Adam, 1 for SGD with momentum, 0
            without momentum; or a function that returns the bytes of each parameter's state.
        optimizer_scalar_bytes: Bytes of scalars per parameter: 4 for Adam's step counter.
        has_receive_buffers: Whether this library computes sums (Gloo), and so needs memory to receive peers' slices.
        replicas: Coordinate on ``dp_replicate``; ``None``: gradients are not summed over it.
        accumulations: Ways in which microbatches are added up, as in the plan; empty if every step has one backward.
            Repeated backwards that each reduce are ``sharded`` whatever the plan says.
        ignored: Parameters that the engine ignores; every rank has them in full.
    """
    parameters = sum(param.num_bytes for param in ignored)
    gradients = sum(param.num_bytes for param in ignored if param.is_trainable)
    state_bytes = optimizer_tensors
    if isinstance(state_bytes, int | float):
        state_bytes = functools.partial(_bytes_of_tensors, state_bytes, optimizer_scalar_bytes)
    optimizer = 0
    for param in ignored:
        if param.is_trainable:
            optimizer += state_bytes(param.name, param.numel, param.num_bytes // max(param.numel, 1))
    host = 0
    for group in groups:
        index = group.slice_index(rank)
        parameters += group.replica_bytes(index)
        states = 0
        if group.is_trainable:
            reduce = group.reduce_layout
            if not group.pools_gradients:
                gradients += group.reduce_item_bytes * reduce.numel
            if "defer_replicate" in accumulations and (group.has_separate_grad or not group.pools_gradients):
                # Sums inside the group that wait for the sum over dp_replicate have separate memory.
                gradients += group.reduce_item_bytes * reduce.slice_numel(index)
            for name, numel in _updated_numels(group, index):
                states += state_bytes(name, numel, group.item_bytes)
        if group.is_offloaded:
            host_sums = group.host_sum_bytes(index, is_added="sharded" in accumulations)
            host += group.master_bytes(index) + group.grad_bytes(index) + host_sums + states
        else:
            parameters += group.master_bytes(index)
            gradients += group.grad_bytes(index)
            optimizer += states
    return Footprint(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        host=host,
        gathered=gathered_bytes(groups, rank, backward_order)
        + packed_buffer_bytes(groups)
        + staging_bytes(groups, rank=rank),
        reduce=reduce_bytes(
            groups,
            rank=rank,
            backward_order=backward_order,
            num_gradient_buffers=num_gradient_buffers,
            has_receive_buffers=has_receive_buffers,
            replicas=replicas,
            accumulations=accumulations,
        ),
    )


def _bytes_of_tensors(count: float, scalar_bytes: int, _name: str, numel: int, item: int) -> int:
    """Bytes of ``count`` state tensors, and of the scalars if there are several tensors."""
    return int(count * numel * item) + (scalar_bytes if count > 1 else 0)


def _updated_numels(group: GroupFacts, rank: int) -> list[tuple[str, int]]:
    """Elements of each tensor of a group that the optimizer updates, with the name of its first parameter."""
    layout = group.layout
    pieces = layout.owned(rank) if group.placements.shards_optimizer else layout.whole
    if group.flat_kinds is None:
        return [(layout.params[piece.index].name, piece.numel) for piece in pieces]
    empty = [0 for piece in pieces if not piece.numel]  # in no range, but with a step counter
    runs = [span.numel for span in flat_ranges(pieces, group.flat_kinds)]
    return [(layout.params[0].name, numel) for numel in empty + runs]


def gathered_bytes(groups: Sequence[GroupFacts], rank: int = 0, backward_order: Sequence[int] | None = None) -> int:
    """The peak bytes of gathered parameters.

    At each depth, one unit computes while ``num_ahead`` more are being gathered. Units that stay gathered until
    backward are counted from their forward on. The units of a recomputed module are gathered at the same time as the
    unit that follows them, which backward may not have released yet. A unit that is not in ``backward_order``, such as
    a frozen one before the first trained one, is released after forward; without an order every unit is assumed to be
    in it. Slices that an inner group of ranks keeps after forward are added.
    """
    total = 0
    by_depth: dict[int, dict[int, int]] = {}  # bytes by unit
    resident: set[int] = set()
    together: dict[tuple[int, str], list[int]] = {}
    ahead = max((group.num_ahead for group in groups), default=0)
    for group in groups:
        if group.is_resident or group.is_unsharded_locally:
            continue
        num_bytes = group.layout.numel * group.gather_item_bytes
        if group.inner_size:
            total += group.inner_numel(group.slice_index(rank)) * group.gather_item_bytes
        if group.depth == 0:
            total += num_bytes
            continue
        units = by_depth.setdefault(group.depth, {})
        units[group.unit] = units.get(group.unit, 0) + num_bytes
        if not group.reshards and (backward_order is None or group.unit in backward_order):
            resident.add(group.unit)
        elif group.recomputed_in is not None:
            together.setdefault((group.depth, group.recomputed_in), []).append(group.unit)
    for depth, units in by_depth.items():
        order = sorted(units)
        windows = [order[first : first + 1 + ahead] for first in range(len(order))]
        for (at, _), recomputed in together.items():
            if at == depth:
                following = [unit for unit in order if unit > max(recomputed)][:1]
                windows.append([*set(recomputed), *following])
        stay = resident.intersection(units)
        total += max(
            sum(units[unit] for unit in {*window, *(unit for unit in stay if unit <= max(window))})
            for window in windows
        )
    return total


def packed_buffer_bytes(groups: Sequence[GroupFacts]) -> int:
    """Bytes of the receive buffers of packed gathers. Only one unit at a time uses them."""
    largest: dict[int, int] = {}
    counts: Counter[tuple[int, int]] = Counter()
    for group in groups:
        if group.gathered_as is None or not group.placements.shards_optimizer:
            continue
        num_bytes = sum(group.slice_bytes(rank) for rank in range(group.layout.size))
        key = size_class(num_bytes)
        largest[key] = max(largest.get(key, 0), num_bytes)
        counts[key, group.unit] += 1
    return sum(
        num_bytes * max(count for (key, _), count in counts.items() if key == size_key)
        for size_key, num_bytes in largest.items()
    )


def staging_bytes(groups: Sequence[GroupFacts], *, rank: int) -> int:
    """Bytes of the device's buffers for offloaded masters before they are cast: one buffer for each master dtype."""
    largest: dict[str, int] = {}
    for group in groups:
        if group.needs_staging:
            num_bytes = group.master_numel(group.slice_index(rank)) * group.item_bytes
            largest[group.master_dtype] = max(largest.get(group.master_dtype, 0), num_bytes)
    return sum(largest.values())


def reduce_bytes(
    groups: Sequence[GroupFacts],
    *,
    rank: int,
    backward_order: Sequence[int] | None = None,
    num_gradient_buffers: int = 2,
    has_receive_buffers: bool = True,
    replicas: Replicas | None = None,
    accumulations: Collection[str] = (),
) -> int:
    """The peak bytes of gradient and receive buffers, found by simulating the backwards of a step.

    At the end of a unit's backward the reductions of earlier units enter their next phase, the unit's buffer is
    allocated, and its reduction is issued. With n > 2 buffers, reductions of the previous n - 2 units may still run.
    Receive buffers are never freed, so steps are repeated until no new one is allocated.
    """
    trained = [group for group in groups if group.is_trainable]
    last_first = sorted({group.unit for group in trained}, reverse=True)
    order = list(dict.fromkeys(backward_order)) if backward_order is not None else last_first
    walk = _Reductions(
        trained,
        rank,
        limit=num_gradient_buffers,
        has_receive_buffers=has_receive_buffers,
        replicas=replicas,
    )
    before = -1
    while before != walk.total_bytes:
        before = walk.total_bytes
        for kind in [kind for way in accumulations or (None,) for kind in _BACKWARDS[way]]:
            for unit in [*(unit for unit in order if unit != 0), 0]:
                walk.post_backward([group for group in trained if group.unit == unit], kind)
            walk.end()
    homes = [  # memory of .grad of a group while the optimizer updates the group
        group.reduce_layout.slice_numel(group.slice_index(rank)) * group.item_bytes
        for group in trained
        if group.updates_in_backward and group.reduces_cast
    ]
    return walk.total_bytes + max(homes, default=0)


@dataclass(frozen=True)
class Replicas:
    """Coordinate on ``dp_replicate``, over which gradient shards are summed.

    Attributes:
        size: Ranks of the axis: the number of groups with the same shards.
        rank: Coordinate on the axis.
        is_deferred: Whether microbatches are added up before they are summed over the axis.
    """

    size: int
    rank: int = 0
    is_deferred: bool = False

    def received_numel(self, group: GroupFacts, rank: int) -> int:
        """Elements that a rank receives from the other groups to sum its part of a shard."""
        numel = group.reduce_layout.slice_numel(group.slice_index(rank))
        return own_part(numel, self.size, self.rank) * (self.size - 1)


def own_part(numel: int, size: int, rank: int) -> int:
    """Elements of part ``rank`` where ``numel`` elements are cut into ``size`` parts as evenly as possible."""
    return (rank + 1) * numel // size - rank * numel // size


class _Backward(enum.Enum):
    """The treatment of a backward's gradients."""

    ALONE = "reduced; the sum is .grad"
    ADDED = "reduced; the sum is added to .grad"
    LOCAL = "kept in the gradient buffer, not reduced"
    HELD = "added to the kept ones, and reduced with them"
    DEFERRED = "reduced inside the group, and added to the sums that wait for dp_replicate"


#: The kinds of backwards in a step, by the way in which microbatches are added up.
_BACKWARDS = {
    None: (_Backward.ALONE,),
    "sharded": (_Backward.ALONE, _Backward.ADDED),
    "unsharded": (_Backward.LOCAL, _Backward.HELD),
    "defer_replicate": (_Backward.DEFERRED,),
}


@dataclass(eq=False)
class _UnderWay:
    """An unfinished reduction: inside the group (phase 0), then a sum over ``dp_replicate`` (1) and a gather there (2).

    Attributes:
        group: The group whose gradients are reduced.
        num_phases: Phases of the reduction.
        is_borrowed: Whether the gradient buffer is freed by this reduction.
        stays: Whether the sum stays in that buffer until the last phase.
        phase: The current phase.
        received: Elements of the receive buffer in use; ``None``: there is none.
    """

    group: GroupFacts
    num_phases: int
    is_borrowed: bool
    stays: bool
    phase: int = 0
    received: int | None = None


class _Reductions:
    """Counts the buffers that the reductions of backwards use. Receive and packed buffers are reused."""

    def __init__(
        self,
        groups: Sequence[GroupFacts],
        rank: int,
        *,
        limit: int,
        has_receive_buffers: bool,
        replicas: Replicas | None,
    ) -> None:
        self._live_bytes = self._most_bytes = self._kept_bytes = 0
        self._in_use: Counter[tuple[str | None, ...]] = Counter()
        self._rank = rank
        self._limit = limit
        self._has_receive_buffers = has_receive_buffers
        self._replicas = replicas
        self._under_way: list[_UnderWay] = []
        self._free: Counter[int] = Counter()  # packed buffers by size class
        self._packed_bytes: dict[int, int] = {}
        # Elements of the free receive buffers, smallest first; each Comm has separate ones.
        self._receiving: dict[tuple[str, str], list[int]] = {}
        for group in groups:
            for num_bytes in self._packed_sizes(group):
                key = size_class(num_bytes)
                self._packed_bytes[key] = max(self._packed_bytes.get(key, 0), num_bytes)

    @property
    def total_bytes(self) -> int:
        """The peak bytes so far."""
        return self._kept_bytes + self._most_bytes

    def post_backward(self, groups: Sequence[GroupFacts], kind: _Backward) -> None:
        """Move earlier reductions to their next phase, allocate a unit's buffers, and issue its reductions."""
        if kind is not _Backward.LOCAL:
            self._move_on(keep=0 if self._replicas is not None else self._limit - 2)
        for group in groups:
            if self._borrows(group, kind) and kind is not _Backward.HELD:
                while self._in_use[self._kind(group)] >= self._limit and self._under_way:
                    self._finish(self._under_way[0])
                self._use(group, 1)
        if kind is _Backward.LOCAL:
            return
        for group in groups:
            # A sum over dp_replicate is computed in the memory of .grad. It is computed in the pooled buffer if .grad
            # has another dtype, is on the host, will be in that buffer, or contains the sum of earlier backwards.
            is_separate = group.has_separate_grad or group.updates_in_backward or kind is _Backward.ADDED
            stays = is_separate and kind is not _Backward.DEFERRED
            self._under_way.append(_UnderWay(group, self._num_phases(group), self._borrows(group, kind), stays))
            if group.reduced_as is None:
                is_added = kind in {_Backward.ADDED, _Backward.DEFERRED}
                self._receive(self._under_way[-1], received_numel(group, self._rank, is_added=is_added))
            for num_bytes in self._packed_sizes(group):
                key = size_class(num_bytes)
                self._kept_bytes += 0 if self._free[key] else self._packed_bytes[key]
                self._free[key] = max(self._free[key] - 1, 0)

    def end(self) -> None:
        """End the backward: finish every reduction."""
        while self._under_way:
            self._move_on()

    def _move_on(self, *, keep: int = 0) -> None:
        """Move all reductions to their next phase, except those of the ``keep`` newest units."""
        units = list(dict.fromkeys(reduction.group.unit for reduction in reversed(self._under_way)))[: max(keep, 0)]
        for reduction in self._under_way.copy():
            if reduction.group.unit not in units:
                self._advance(reduction)

    def _finish(self, reduction: _UnderWay) -> None:
        while reduction in self._under_way:
            self._advance(reduction)

    @staticmethod
    def _borrows(group: GroupFacts, kind: _Backward) -> bool:
        """Whether gradients are collected in a pooled buffer: always, or because ``.grad`` occupies its usual one."""
        is_occupied = kind is _Backward.ADDED and not group.has_separate_grad
        return group.pools_gradients or is_occupied

    def _num_phases(self, group: GroupFacts) -> int:
        """Phases of a group's reduction; an all-reduce over Gloo, or a packed one, has two."""
        if self._replicas is not None:
            return 3 if self._has_receive_buffers else 2
        has_two = self._has_receive_buffers or group.reduced_as is not None
        return 2 if has_two and not group.placements.shards_optimizer else 1

    def _advance(self, reduction: _UnderWay) -> None:
        """Free the buffers of the current phase, and begin the next phase, if there is one."""
        group, replicas = reduction.group, self._replicas
        if reduction.phase == 0:
            self._free.update(map(size_class, self._packed_sizes(group)))
        if reduction.received is not None:
            bisect.insort(self._receive_buffers(reduction), reduction.received)
            reduction.received = None
        reduction.phase += 1
        is_done = reduction.phase == reduction.num_phases
        if reduction.is_borrowed and (is_done if reduction.stays else reduction.phase == 1):
            self._use(group, -1)
        if is_done:
            self._under_way.remove(reduction)
        elif reduction.phase == 1 and replicas is not None:
            self._receive(reduction, replicas.received_numel(group, self._rank))

    def _receive(self, reduction: _UnderWay, numel: int) -> None:
        """Use the smallest free receive buffer that is large enough, or replace the largest by a new one."""
        free, item = self._receive_buffers(reduction), reduction.group.reduce_item_bytes
        index = bisect.bisect_left(free, numel)
        if index < len(free):
            reduction.received = free.pop(index)
            return
        reduction.received = numel
        if self._has_receive_buffers:
            self._kept_bytes += (numel - free[-1] if free else numel) * item
        if free:
            free.pop()

    def _receive_buffers(self, reduction: _UnderWay) -> list[int]:
        axis = "dp_replicate" if reduction.phase else reduction.group.axis
        dtype = reduction.group.reduce_dtype or reduction.group.master_dtype
        return self._receiving.setdefault((axis, dtype), [])

    def _use(self, group: GroupFacts, change: int) -> None:
        """Allocate (1) or free (-1) a gradient buffer of a group."""
        self._in_use[self._kind(group)] += change
        self._live_bytes += change * group.reduce_layout.numel * group.reduce_item_bytes
        self._most_bytes = max(self._most_bytes, self._live_bytes)

    @staticmethod
    def _kind(group: GroupFacts) -> tuple[str | None, ...]:
        return group.master_dtype, group.compute_dtype, group.reduce_dtype, group.axis

    def _packed_sizes(self, group: GroupFacts) -> tuple[int, ...]:
        """Bytes of the send buffer and of the receive buffer of packed gradients."""
        if group.reduced_as is None:
            return ()
        return sum(group.summed_bytes), group.layout.size * group.summed_bytes[group.slice_index(self._rank)]


def received_numel(group: GroupFacts, rank: int, *, is_added: bool = False) -> int:
    """Elements of the buffer into which a rank receives peers' slices on ``dp_shard``, to sum its own slice.

    If the sum is computed in the memory of ``.grad`` and that is free, one peer's slice is received there instead.
    """
    is_separate = group.has_separate_grad or group.updates_in_backward
    goes_home = group.pools_gradients and not (is_separate or is_added)
    return summed_numel(group, rank) * max(group.layout.size - 1 - goes_home, 0)


def summed_numel(group: GroupFacts, rank: int) -> int:
    """Elements that a rank sums: its slice, or in an all-reduce an equal part."""
    index = group.slice_index(rank)
    if group.placements.shards_optimizer:
        return group.reduce_layout.slice_numel(index)
    return own_part(group.reduce_layout.numel, group.layout.size, index)
