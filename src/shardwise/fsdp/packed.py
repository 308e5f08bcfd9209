"""Gathers of packed bytes: received into a buffer that all units share, unpacked into the unit's slot."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from shardwise.comm.base import Comm, Handle
from shardwise.comm.dtype import dtype_name
from shardwise.fsdp import quantize
from shardwise.spec.quantize import packed_bytes

if TYPE_CHECKING:
    from shardwise.fsdp.group import Group


def packed_cuts(group: Group) -> tuple[int, ...]:
    """Where the packed slices begin, in bytes, and where the last one ends."""
    layout, form = group.layout, group.sent_as
    assert form is not None
    sizes = (packed_bytes(layout.slice_numel(rank), form, dtype_name(group.dtype)) for rank in range(layout.size))
    return (0, *itertools.accumulate(sizes))


def gather_packed(group: Group, comm: Comm, fill: Callable[[Tensor], object]) -> Handle:
    """Issue the all-gather of ``group`` in the form in which it is sent.

    Args:
        group: Its slot is its own already.
        comm: Carries the gather.
        fill: Writes this rank's packed slice.

    Collective:
        All-gather of bytes; every rank sends its packed slice to each other. All ranks must call in the same order.
    """
    pool, cuts = group.packed_pool, packed_cuts(group)
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
