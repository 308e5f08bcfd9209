"""Collectives of packed bytes, which lie in buffers that all units share.

A gather is received there and unpacked into the unit's slot. Gradients are packed there by every rank, each part sent
to the rank that adds it up, and added up in fp32, in rank order, the rank's own as they would have been sent: the
result does not depend on who adds up what, and is the same under every strategy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from shardwise.comm.base import Chain, Comm, Handle
from shardwise.comm.dtype import dtype_name
from shardwise.engine.pool import PackedPool
from shardwise.forms import quantize
from shardwise.spec.quantize import packed_cuts, summed_cuts

if TYPE_CHECKING:
    from shardwise.engine.group import Group


def gathered_cuts(group: Group) -> tuple[int, ...]:
    """Where the slices of a gather begin, in bytes, and where the last one ends."""
    assert group.sent_as is not None
    return packed_cuts(group.layout.cuts, group.sent_as, dtype_name(group.dtype))


def reduced_cuts(group: Group) -> tuple[int, ...]:
    """The same of what is sent of its gradients to be added up."""
    assert group.reduced_as is not None
    return packed_cuts(summed_cuts(group.reduce_layout), group.reduced_as, dtype_name(group.reduce_dtype))


def gather_packed(group: Group, comm: Comm, fill: Callable[[Tensor], object]) -> Handle:
    """Issue the all-gather of ``group`` in the form in which it is sent.

    Args:
        group: Its slot is its own already.
        comm: Carries the gather.
        fill: Writes this rank's packed slice.

    Collective:
        All-gather of bytes; every rank sends its packed slice to each other. All ranks must call in the same order.
    """
    pool, cuts = group.packed_pool, gathered_cuts(group)
    assert pool is not None
    buffer = pool.take(cuts[-1], group.device)
    received = buffer[: cuts[-1]]
    fill(received[cuts[group.rank] : cuts[group.rank + 1]])
    handle = comm.all_gather(received, unit=group.unit.name, cuts=cuts if group.layout.uneven_cuts else None)
    return _Unpacking(handle, group, buffer, cuts)


class _Unpacking(Handle):
    """An all-gather of packed bytes under way."""

    def __init__(self, handle: Handle, group: Group, buffer: Tensor, cuts: tuple[int, ...]) -> None:
        self._handle = handle
        self._group = group
        self._buffer: Tensor | None = buffer
        self._cuts = cuts

    def wait(self) -> None:
        """Finish the all-gather and unpack every slice into the group's slot."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return
        self._handle.wait()
        group = self._group
        pool, form = group.packed_pool, group.sent_as
        assert pool is not None
        assert form is not None
        places = zip(itertools.pairwise(self._cuts), itertools.pairwise(group.layout.cuts), strict=True)
        for (start, stop), (first, last) in places:
            quantize.unpack(buffer[start:stop], group.gathered[first:last], form, group.dtype)
        pool.give(buffer)


def reduce_packed(
    group: Group, comm: Comm, pool: PackedPool, buffer: Tensor, result: Tensor, *, divisor: float
) -> Handle:
    """Issue the sum of a gradient buffer over the ranks.

    Args:
        group: Whose.
        comm: Along the axis.
        pool: Where packed bytes are sent from and received.
        buffer: This rank's gradients; packed at once.
        result: Where this rank's slice of the sum goes; the buffer itself where the optimizer is replicated.
        divisor: Of the sum.

    Collective:
        All-to-all of bytes; every rank sends each other its packed part. Where the optimizer is replicated, an
        all-gather of the summed parts in the reduce dtype follows when the handle advances. All ranks must call in the
        same order.
    """
    unit, rank = group.unit.name, group.rank
    cuts, places = summed_cuts(group.reduce_layout), reduced_cuts(group)
    sent = pool.take(places[-1], group.device)
    parts = [sent[start:stop] for start, stop in itertools.pairwise(places)]
    for part, (start, stop) in zip(parts, itertools.pairwise(cuts), strict=True):
        quantize.pack(buffer[start:stop], part, "int8")
    own = parts[rank]
    received = pool.take(comm.size * own.numel(), group.device)
    slots = received[: comm.size * own.numel()]
    is_even = len({part.numel() for part in parts}) == 1
    handle = comm.all_to_all(sent[: places[-1]], slots, unit=unit, cuts=None if is_even else places)
    terms = [own if peer == rank else slots.view(comm.size, -1)[peer] for peer in range(comm.size)]
    is_whole = not group.row.shards_optimizer
    target = buffer[cuts[rank] : cuts[rank + 1]] if is_whole else result

    def add_up() -> None:
        quantize.sum_packed(terms, target, group.reduce_dtype, divisor)
        pool.give(sent)
        pool.give(received)

    summed = _Summing(handle, add_up)
    if not is_whole:
        return summed
    is_even = len({stop - start for start, stop in itertools.pairwise(cuts)}) == 1
    return Chain(summed, lambda: comm.all_gather(buffer, unit=unit, cuts=None if is_even else cuts))


class _Summing(Handle):
    """An all-to-all under way; what it brings is added up once."""

    def __init__(self, handle: Handle, add_up: Callable[[], None]) -> None:
        self._handle = handle
        self._add_up: Callable[[], None] | None = add_up

    def wait(self) -> None:
        """Finish, and add up."""
        add_up, self._add_up = self._add_up, None
        if add_up is not None:
            self._handle.wait()
            add_up()
