"""The bytes that a rank holds, computed from the layouts.

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

The first three columns are table 1 of ZeRO (arXiv 1910.02054: 2+2+12 bytes in mixed precision) in single precision; the
live units come on top. Exceptions:

* With ``dp_replicate`` (``hsdp``), N is the number of ranks of one group.
* Under ``ep`` the experts are counted separately: Ψ/ep elements on N/ep ranks, with buffers of their own.
* With ``reshard_after_forward=k`` zero3 holds another 4Ψ/k gathered.
* Where the optimizer steps inside backward there are no gradients, and every row has the gradient buffers of zero3.
* With several microbatches, ``unsharded`` accumulation needs full-size gradients (4Ψ) under zero2, shard_grad_op and
  zero3, and ``sharded`` accumulation needs gradient buffers under ddp and zero1.

The functions here count padding, headers and the receive buffers of sums over Gloo. What is gathered and what is on its
way to a reduction has memory only while it is in use: these two columns are the most at one moment.
"""

from __future__ import annotations

import bisect
import enum
import functools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields

from shardwise.spec.facts import GroupFacts
from shardwise.spec.layout import ParamSpec, flat_ranges

#: Bytes of an optimizer's state of a parameter: its name, the elements of which a rank has state, bytes of each.
StateBytes = Callable[[str, int, int], int]


def size_class(numel: int) -> int:
    """Packed buffers whose sizes round to the same class are shared: up to an eighth of a power of two."""
    if numel <= 8:
        return numel
    step = 1 << ((numel - 1).bit_length() - 4)
    return -(-numel // step) * step


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank, by category; activations come on top.

    Attributes:
        parameters: Masters, and replicas where parameters are replicated.
        gradients: Memory of ``.grad``, and full-size local sums where the strategy keeps them.
        optimizer: Optimizer state of the elements that this rank updates.
        gathered: Gathered units, the most at one moment, and receive buffers of packed gathers.
        reduce: Full-size gradient buffers in use, the most at one moment, and the receive buffers of the sums.
        host: Masters, gradients and optimizer state of what is offloaded; all other categories are on the device.
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
    """The bytes that rank ``rank`` holds in the steady state.

    Args:
        groups: Every group of the model.
        rank: Coordinate on ``dp_shard``; slices differ in how much of them is padding.
        backward_order: Unit numbers as backward enters them; by default the root, then the others from last to first.
        num_gradient_buffers: Most gradient buffers in use at once.
        optimizer_tensors: State tensors per parameter, of its size and dtype: 2 for Adam, 1 for SGD with momentum, 0
            without momentum; or a function that says the bytes of each parameter's state.
        optimizer_scalar_bytes: Bytes of scalars per parameter: 4 for Adam's step counter.
        has_receive_buffers: Whether this library adds up sums itself (Gloo), and so receives the peers' slices first.
        replicas: Coordinate on ``dp_replicate``; ``None``: gradients are not summed over it.
        accumulations: Ways in which microbatches are added up, as in the plan; empty where every step has one backward.
            Repeated backwards that each reduce are ``sharded`` whatever the plan says.
        ignored: Parameters that the engine leaves alone; every rank holds them whole.
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
        place = group.place(rank)
        parameters += group.replica_bytes(place)
        states = 0
        if group.is_trainable:
            reduce = group.reduce_layout
            if not group.pools_gradients:
                gradients += group.reduce_item_bytes * reduce.numel
            if "defer_replicate" in accumulations and (group.is_reduced_apart or not group.pools_gradients):
                # Sums that wait for the others have memory of their own.
                gradients += group.reduce_item_bytes * reduce.slice_numel(place)
            for name, numel in _updated_numels(group, place):
                states += state_bytes(name, numel, group.item_bytes)
        if group.is_offloaded:
            landing = group.landing_bytes(place, is_added="sharded" in accumulations)
            host += group.master_bytes(place) + group.grad_bytes(place) + landing + states
        else:
            parameters += group.master_bytes(place)
            gradients += group.grad_bytes(place)
            optimizer += states
    return Footprint(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        host=host,
        gathered=gathered_bytes(groups, rank, backward_order)
        + packed_buffer_bytes(groups)
        + stage_bytes(groups, rank=rank),
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
    """Bytes of ``count`` state tensors, and of a counter where there are several."""
    return int(count * numel * item) + (scalar_bytes if count > 1 else 0)


def _updated_numels(group: GroupFacts, rank: int) -> list[tuple[str, int]]:
    """Elements of each tensor of a group that the optimizer updates, with the name of its first parameter."""
    layout = group.layout
    held = layout.owned(rank) if group.row.shards_optimizer else layout.whole
    if group.flat_kinds is None:
        return [(layout.params[piece.index].name, piece.numel) for piece in held]
    empty = [0 for piece in held if not piece.numel]  # in no range, but optimizers count their steps
    runs = [span.numel for span in flat_ranges(held, group.flat_kinds)]
    return [(layout.params[0].name, numel) for numel in empty + runs]


def gathered_bytes(groups: Sequence[GroupFacts], rank: int = 0, backward_order: Sequence[int] | None = None) -> int:
    """The most bytes of gathered parameters at one moment.

    Of the units of each depth one computes while ``num_ahead`` more travel. Units that stay gathered until backward
    remain from then on. Those of a recomputed module are there together, beside the unit that follows them, which
    backward may not have left yet. A unit that is not in ``backward_order``, such as a frozen one before the first
    trained one, is released after forward; without an order every unit is taken to be in it. Slices that units keep
    over an inner group of ranks after forward come on top.
    """
    total = 0
    by_depth: dict[int, dict[int, int]] = {}  # bytes by unit
    kept: set[int] = set()
    together: dict[tuple[int, str], list[int]] = {}
    ahead = max((group.num_ahead for group in groups), default=0)
    for group in groups:
        if group.is_resident or group.is_alone:
            continue
        num_bytes = group.layout.numel * group.gather_item_bytes
        if group.inner_size:
            total += group.inner_numel(group.place(rank)) * group.gather_item_bytes
        if group.depth == 0:
            total += num_bytes
            continue
        units = by_depth.setdefault(group.depth, {})
        units[group.unit] = units.get(group.unit, 0) + num_bytes
        if not group.reshards and (backward_order is None or group.unit in backward_order):
            kept.add(group.unit)
        elif group.recomputed_in is not None:
            together.setdefault((group.depth, group.recomputed_in), []).append(group.unit)
    for depth, units in by_depth.items():
        order = sorted(units)
        windows = [order[first : first + 1 + ahead] for first in range(len(order))]
        for (at, _), recomputed in together.items():
            if at == depth:
                following = [unit for unit in order if unit > max(recomputed)][:1]
                windows.append([*set(recomputed), *following])
        stay = kept.intersection(units)
        total += max(
            sum(units[unit] for unit in {*window, *(unit for unit in stay if unit <= max(window))})
            for window in windows
        )
    return total


def packed_buffer_bytes(groups: Sequence[GroupFacts]) -> int:
    """Bytes of the receive buffers of packed gathers, which one unit at a time uses."""
    largest: dict[int, int] = {}
    counts: Counter[tuple[int, int]] = Counter()
    for group in groups:
        if group.sent_as is None or not group.row.shards_optimizer:
            continue
        num_bytes = sum(group.slice_bytes(rank) for rank in range(group.layout.size))
        key = size_class(num_bytes)
        largest[key] = max(largest.get(key, 0), num_bytes)
        counts[key, group.unit] += 1
    return sum(
        num_bytes * max(count for (key, _), count in counts.items() if key == size_key)
        for size_key, num_bytes in largest.items()
    )


def stage_bytes(groups: Sequence[GroupFacts], *, rank: int) -> int:
    """Bytes of the device's buffers for masters from the host before their cast: one for each dtype of masters."""
    largest: dict[str, int] = {}
    for group in groups:
        if group.needs_stage:
            num_bytes = group.master_numel(group.place(rank)) * group.item_bytes
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
    """The most bytes of gradient and receive buffers at one moment, found by walking through the backwards of a step.

    At the end of a unit's backward the reductions of earlier units enter their next phase, the unit takes its buffer,
    and its own reduction is issued; with n > 2 buffers, those of the n - 2 units just before stay under way. Receive
    buffers are kept. Steps are repeated until no further one is made.
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
    homes = [  # memory of .grad of one group while the optimizer updates it
        group.reduce_layout.slice_numel(group.place(rank)) * group.item_bytes
        for group in trained
        if group.updates_in_backward and group.reduces_cast
    ]
    return walk.total_bytes + max(homes, default=0)


@dataclass(frozen=True)
class Replicas:
    """Coordinate on ``dp_replicate``, over which gradient shards are summed.

    Attributes:
        size: Ranks of the axis: the number of groups that hold the same shards.
        rank: Coordinate on the axis.
        is_deferred: Whether microbatches are added up before they are summed over the axis.
    """

    size: int
    rank: int = 0
    is_deferred: bool = False

    def received_numel(self, group: GroupFacts, rank: int) -> int:
        """Elements that a rank receives from the other groups to add up its part of a shard."""
        return own_part(group.reduce_layout.slice_numel(group.place(rank)), self.size, self.rank) * (self.size - 1)


def own_part(numel: int, size: int, rank: int) -> int:
    """Elements of part ``rank`` where ``numel`` elements are cut into ``size`` parts as evenly as possible."""
    return (rank + 1) * numel // size - rank * numel // size


class _Backward(enum.Enum):
    """The treatment of the gradients of a backward."""

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
    """A reduction: inside the group (phase 0), then added up over ``dp_replicate`` (1), then gathered there (2).

    Attributes:
        group: The group whose gradients are reduced.
        num_phases: Phases of the reduction.
        is_borrowed: Whether its buffer is freed after it.
        stays: Whether the sum stays in such a buffer until the end.
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
    """Counts the buffers that the reductions of backwards use. Receive and packed buffers are used again."""

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
        # Elements of the receive buffers that are free, smallest first; each Comm has its own.
        self._receiving: dict[tuple[str, str], list[int]] = {}
        for group in groups:
            for num_bytes in self._packed_sizes(group):
                key = size_class(num_bytes)
                self._packed_bytes[key] = max(self._packed_bytes.get(key, 0), num_bytes)

    @property
    def total_bytes(self) -> int:
        """The most bytes at one moment so far."""
        return self._kept_bytes + self._most_bytes

    def post_backward(self, groups: Sequence[GroupFacts], kind: _Backward) -> None:
        """One unit moves earlier reductions to their next phase, takes its buffers, and issues its own."""
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
            # A sum over dp_replicate is made in the memory of .grad. It is made in the pooled buffer where .grad has
            # another dtype, is on the host, will be in that buffer, or already holds the sum of earlier backwards.
            is_apart = group.is_reduced_apart or group.updates_in_backward or kind is _Backward.ADDED
            stays = is_apart and kind is not _Backward.DEFERRED
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
        """Whether gradients are collected in a buffer that is freed: always, or because .grad occupies its own."""
        is_occupied = kind is _Backward.ADDED and not group.is_reduced_apart
        return group.pools_gradients or is_occupied

    def _num_phases(self, group: GroupFacts) -> int:
        """Phases of a group's reduction; an all-reduce over Gloo, or a packed one, has two."""
        if self._replicas is not None:
            return 3 if self._has_receive_buffers else 2
        is_spread = not group.row.shards_optimizer and (self._has_receive_buffers or group.reduced_as is not None)
        return 2 if is_spread else 1

    def _advance(self, reduction: _UnderWay) -> None:
        """Return what the current phase has used, and begin the next phase, if there is one."""
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
        """Take the smallest free receive buffer that is large enough, else replace the largest by a new one."""
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
        """A gradient buffer of a group is allocated (1) or freed (-1)."""
        self._in_use[self._kind(group)] += change
        self._live_bytes += change * group.reduce_layout.numel * group.reduce_item_bytes
        self._most_bytes = max(self._most_bytes, self._live_bytes)

    @staticmethod
    def _kind(group: GroupFacts) -> tuple[str | None, ...]:
        return group.master_dtype, group.compute_dtype, group.reduce_dtype, group.axis

    def _packed_sizes(self, group: GroupFacts) -> tuple[int, ...]:
        """Bytes of the buffers from which packed gradients are sent, and into which they are received."""
        if group.reduced_as is None:
            return ()
        return sum(group.summed_bytes), group.layout.size * group.summed_bytes[group.place(self._rank)]


def received_numel(group: GroupFacts, rank: int, *, is_added: bool = False) -> int:
    """Elements of the buffer in which a rank receives slices of its peers of ``dp_shard``, to add up its own slice.

    Where the sum is made in the memory of ``.grad`` and that is free, one peer's slice is received there instead.
    """
    is_apart = group.is_reduced_apart or group.updates_in_backward
    goes_home = group.pools_gradients and not (is_apart or is_added)
    return summed_numel(group, rank) * max(group.layout.size - 1 - goes_home, 0)


def summed_numel(group: GroupFacts, rank: int) -> int:
    """Elements that a rank adds up: its slice, or in an all-reduce an equal part."""
    place = group.place(rank)
    if group.row.shards_optimizer:
        return group.reduce_layout.slice_numel(place)
    return own_part(group.reduce_layout.numel, group.layout.size, place)
