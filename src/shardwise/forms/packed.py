"""Collectives of packed bytes, which lie in buffers that all units share.

A gather is received there and unpacked into the unit's slot. Gradients are packed there by every rank, each part sent
to the rank that adds it up, and added up in fp32, in rank order, the rank's own as they would have been sent: the
result does not depend on who adds up what, and is the same under every strategy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.comm.base import Chain, Comm, Handle
from shardwise.comm.dtype import dtype_name
from shardwise.engine.pool import PackedPool
from shardwise.spec.quantize import BLOCK_NUMEL, packed_bytes, packed_cuts, summed_cuts

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
            unpack(buffer[start:stop], group.gathered[first:last], form, group.dtype)
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
        pack(buffer[start:stop], part, "int8")
    own = parts[rank]
    received = pool.take(comm.size * own.numel(), group.device)
    slots = received[: comm.size * own.numel()]
    is_even = len({part.numel() for part in parts}) == 1
    handle = comm.all_to_all(sent[: places[-1]], slots, unit=unit, cuts=None if is_even else places)
    terms = [own if peer == rank else slots.view(comm.size, -1)[peer] for peer in range(comm.size)]
    is_whole = not group.row.shards_optimizer
    target = buffer[cuts[rank] : cuts[rank + 1]] if is_whole else result

    def add_up() -> None:
        sum_packed(terms, target, group.reduce_dtype, divisor)
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


#: Elements that are worked on at a time: temporaries stay in a CPU's cache, and small beside a slot on a GPU.
_CHUNK_NUMEL = {"cpu": 1 << 15, "cuda": 1 << 22}


def empty_packed(numel: int, form: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Bytes for ``numel`` elements of ``dtype``."""
    return torch.zeros(packed_bytes(numel, form, dtype_name(dtype)), dtype=torch.uint8, device=device)


def pack(source: Tensor, packed: Tensor, form: str) -> None:
    """Quantize ``source`` (flat, a multiple of a block) into ``packed``.

    A block with an inf or nan in it is read back as nan throughout.
    """
    if form == "bf16":
        packed.view(torch.bfloat16)[: source.numel()].copy_(source)
        return
    if not source.numel():
        return  # no bytes: they may begin anywhere, also where no scale could
    codes, scales = _split(packed, source.numel(), source.dtype)
    work = torch.float64 if source.dtype is torch.float64 else torch.float32
    for part in _parts(source):
        values = source[part].view(-1, BLOCK_NUMEL).to(work)
        largest = values.abs().amax(dim=1, keepdim=True)
        scales[part.start // BLOCK_NUMEL : part.stop // BLOCK_NUMEL].copy_(largest.squeeze(1))
        scaled = values.div_(largest) if values.data_ptr() != source[part].data_ptr() else values / largest
        # A block of zeros has become nan, as has one with an inf: its codes are 0.
        codes[part].view(-1, BLOCK_NUMEL).copy_(scaled.mul_(127).round_().nan_to_num_(0.0))


def unpack(packed: Tensor, target: Tensor, form: str, dtype: torch.dtype) -> None:
    """Read what :func:`pack` made of elements of ``dtype`` into ``target``: rounded to ``dtype``, then cast."""
    if form == "bf16":
        target.copy_(packed.view(torch.bfloat16)[: target.numel()])
        return
    if not target.numel():
        return
    codes, scales = _split(packed, target.numel(), dtype)
    for part in _parts(target):
        target[part].view(-1, BLOCK_NUMEL).copy_(_read(codes, scales, part).to(dtype))


def _read(codes: Tensor, scales: Tensor, part: slice) -> Tensor:
    """A range of blocks in the dtype that is computed in, one row each."""
    work = torch.float64 if scales.dtype is torch.float64 else torch.float32
    largest = scales[part.start // BLOCK_NUMEL : part.stop // BLOCK_NUMEL].to(work)
    return codes[part].view(-1, BLOCK_NUMEL).to(work).mul_(1 / 127).mul_(largest.unsqueeze(1))


def sum_packed(terms: Sequence[Tensor], out: Tensor, dtype: torch.dtype, divisor: float) -> None:
    """Add up int8 blocks of ``dtype`` in order, in fp32 (fp64 for fp64), divide, and round into ``out``."""
    if not out.numel():
        return  # terms of no bytes: they may begin anywhere, also where no scale could
    split = [_split(term, out.numel(), dtype) for term in terms]
    for part in _parts(out):
        total = _read(*split[0], part)
        for codes, scales in split[1:]:
            total += _read(codes, scales, part)
        if divisor != 1:
            total /= divisor
        out[part].view(-1, BLOCK_NUMEL).copy_(total)


def codes_of(packed: Tensor, numel: int, form: str) -> Tensor:
    """One element of ``packed`` for each of the ``numel`` that it stands for: the codes, or the cast values."""
    return packed.view(torch.bfloat16)[:numel] if form == "bf16" else packed[:numel].view(torch.int8)


def _split(packed: Tensor, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The codes, and the largest absolute value of every block."""
    num_bytes = numel // BLOCK_NUMEL * dtype.itemsize
    return packed[:numel].view(torch.int8), packed[numel : numel + num_bytes].view(dtype)


def _parts(flat: Tensor) -> Iterator[slice]:
    """Ranges to work on one after the other; none where there are no values."""
    if flat.is_meta:
        return
    step = _CHUNK_NUMEL.get(flat.device.type, 1 << 22)
    for start in range(0, flat.numel(), step):
        yield slice(start, min(start + step, flat.numel()))
