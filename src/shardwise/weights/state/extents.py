"""Gathers logical tensors on rank 0, and scatters them from there, as ranges of elements (``spec.extent``).

There is one gather and one scatter. A rank describes what it stores as a list of :class:`StoredRanges`. Rank 0 receives
the ranges of all ranks as JSON (:func:`gather_metadata`), so that both sides know each message before it is sent::

    gather     every rank  -- each range that it owns -->  rank 0, which copies it into the full tensor
    scatter    rank 0      -- each stored range    -->  the first rank that has it  -- broadcast -->  its copies

Slices of tensor and expert parallelism, stages of a pipeline, shards, replicas, buffers and ignored parameters differ
only in their extents and in the ranks that have copies.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.base import Comm
from shardwise.comm.control import broadcast_json, gather_json
from shardwise.comm.dtype import copy_shared, memory_order, torch_dtype
from shardwise.spec.errors import StateError
from shardwise.spec.extent import Extent, decode_extent, describe_cuts, encode_extent, shared, tiling_problems
from shardwise.spec.layout import contiguous_stride
from shardwise.spec.slice import Cut

#: Ranges of logical tensors, each with a one-dimensional tensor of its elements.
Pairs = list[tuple[Extent, Tensor]]
_Make = Callable[[Extent], Tensor]  # returns the memory of a full tensor


@dataclass(frozen=True)
class StoredRanges:
    """Ranges that one rank stores in one piece of memory: those of a unit's group, a buffer, a slice of a parameter."""

    unit: str  # name of the messages in recorded collectives
    extents: tuple[Extent, ...]
    fetch: Callable[[], tuple[Tensor, list[Tensor]]]  # returns the memory, flat, and a view of it for each range
    store: Callable[[Tensor], object]  # called with the memory from ``fetch`` after it has been written
    #: Comm over the ranks with the same ranges; ``None``: no other rank has them. In a scatter, the first of these
    #: ranks receives, and broadcasts to the others.
    copies: Comm | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of those with the same ranges."""
        return self.copies is None or self.copies.rank == 0


class Targets:
    """The memory of stored ranges, to be filled from any source."""

    def __init__(self, stored: Sequence[StoredRanges]) -> None:
        self.extents: Pairs = []  # every range with its part of the memory
        self._fetched: list[tuple[StoredRanges, Tensor]] = []
        for ranges in stored:
            flat, views = ranges.fetch()
            self._fetched.append((ranges, flat))
            self.extents += zip(ranges.extents, views, strict=True)

    @torch.no_grad()
    def install(self) -> None:
        """Store the memory, which has been filled, as the values of the ranges."""
        for ranges, flat in self._fetched:
            ranges.store(flat)


# -- the ranges of all ranks, on rank 0


@dataclass(frozen=True)
class RankMetadata:
    """The ranges that one rank stores, as rank 0 receives them."""

    #: By piece of memory, its unit and its ranges; no ranges if the rank is not the first of those with copies.
    stored: list[tuple[str, list[Extent]]]
    extra: Any  # the caller's addition, a JSON value

    @property
    def extents(self) -> Iterator[Extent]:
        """All ranges."""
        for _, extents in self.stored:
            yield from extents


def gather_metadata(
    comm: Comm, stored: Sequence[StoredRanges], check: Callable[[list[RankMetadata]], Any], extra: Any = None
) -> tuple[list[RankMetadata], Any]:
    """Gather the metadata of all ranks on rank 0, and broadcast the result of ``check`` there.

    A ``StateError`` of ``check`` is raised on all ranks. ``extra``, a JSON value, is sent along.

    Returns:
        The metadata by rank (on rank 0, else ``[]``), and the result of ``check``.

    Collective:
        A gather of JSON to rank 0, about 100 bytes for each range, and a broadcast of the result. All ranks must call.
    """
    own = [[each.unit, [encode_extent(extent) for extent in each.extents] if each.is_first else []] for each in stored]
    metadata = [
        RankMetadata([(unit, [decode_extent(extent) for extent in extents]) for unit, extents in found], extra)
        for found, extra in gather_json(comm, [own, extra])
    ]
    verdict: list[Any] = []
    if comm.rank == 0:
        try:
            verdict = ["", check(metadata)]
        except StateError as error:
            verdict = [str(error), None]
    problem, answer = broadcast_json(comm, verdict)
    if problem:
        raise StateError(problem)
    return metadata, answer


def refuse_gaps(metadata: Sequence[RankMetadata]) -> None:
    """Check that the ranges of all ranks cover every element of every tensor exactly once."""
    first: dict[str, Extent] = {}
    by_tensor: dict[str, dict[tuple[Cut, ...], list[tuple[int, int, int]]]] = {}
    problems = []
    for rank, rank_metadata in enumerate(metadata):
        for extent in rank_metadata.extents:
            shape, other = extent.shape, first.setdefault(extent.name, extent).shape
            if shape != other:
                problems.append(f"{extent.name}: of shape {list(shape)} on one rank, {list(other)} on another")
            elif extent.numel:
                ranges = by_tensor.setdefault(extent.name, {}).setdefault(extent.cuts, [])
                ranges.append((extent.start, extent.stop, rank))
    for name, extent in first.items():
        ranges = {cuts: sorted(found) for cuts, found in by_tensor.get(name, {}).items()}
        problems += coverage_problems(name, extent.shape, ranges)
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:12])
        raise StateError(f"the parts on the ranks do not make up the whole model:\n{shown}")


def coverage_problems(
    name: str, shape: tuple[int, ...], by_slice: Mapping[tuple[Cut, ...], list[tuple[int, int, int]]]
) -> list[str]:
    """Describe why sorted ranges ``(start, stop, rank)`` of each slice do not cover the full tensor exactly once."""
    problems = []
    for cuts, ranges in by_slice.items():
        numel = Extent(name, shape, "", 0, 0, cuts=cuts).slice_numel
        problems += _gaps(f"{name}{describe_cuts(shape, cuts)}" if cuts else name, numel, ranges)
    full = Extent(name, shape, "", 0, 0).slice_numel
    return problems or (tiling_problems(name, shape, list(by_slice)) if by_slice else _gaps(name, full, []))


def _gaps(name: str, numel: int, ranges: list[tuple[int, int, int]]) -> list[str]:
    """Describe gaps and overlaps of sorted ``(start, stop, rank)`` in ``numel`` elements."""
    problems = []
    end, last = 0, -1
    for start, stop, rank in ranges:
        if start > end:
            problems.append(f"{name}: no rank holds elements {end} to {start}")
        elif start < end:
            problems.append(f"{name}: elements {start} to {min(end, stop)} are held by rank {last} and by rank {rank}")
        if start >= stop:
            problems.append(f"{name}: the range {start} to {stop} is empty")
        end, last = max(end, stop), rank
    if end < numel:
        problems.append(f"{name}: no rank holds elements {end} to {numel}")
    elif end > numel:
        problems.append(f"{name}: element {end - 1} is outside of its {numel}")
    return problems


# -- the gather and the scatter


@torch.no_grad()
def gather_ranges(
    comm: Comm, stored: Sequence[StoredRanges], metadata: Sequence[RankMetadata], make: _Make | None = None
) -> dict[str, Tensor]:
    """Gather the ranges of all ranks into full tensors on rank 0.

    Args:
        comm: The Comm that was given to :func:`gather_metadata`.
        stored: The ranges that were given to :func:`gather_metadata`; copies are not sent.
        metadata: The metadata that :func:`gather_metadata` returned.
        make: Returns the memory of a full tensor; by default new memory on the CPU.

    Returns:
        The full tensors by name on rank 0, ``{}`` on other ranks.

    Collective:
        A message to rank 0 for each range of another rank. In addition to the result, rank 0 stores at most one range
        at a time, and none if ranges are contiguous in the full tensors' memory. All ranks must call.
    """
    own = [each for each in stored if each.extents and each.is_first]
    if comm.rank > 0:
        for ranges in own:
            for part in ranges.fetch()[1]:
                _send(comm, part, 0, ranges.unit)
        return {}
    tensors: dict[str, Tensor] = {}
    place = functools.partial(_place, tensors, make or empty)
    for ranges in own:
        for extent, part in zip(ranges.extents, ranges.fetch()[1], strict=True):
            copy_shared(extent, part, *place(extent))
    for source, rank_metadata in enumerate(metadata):
        for unit, extents in rank_metadata.stored if source != comm.rank else ():
            for extent in extents:
                _receive_into(comm, extent, *place(extent), source=source, unit=unit)
    return tensors


def _place(tensors: dict[str, Tensor], make: _Make, extent: Extent) -> tuple[Extent, Tensor]:
    """Return the full tensor of a range: its extent, and a flat view of its memory."""
    full = whole_extent(extent)
    if extent.name not in tensors:
        tensors[extent.name] = make(full)
    return full, memory_order(tensors[extent.name])


def _receive_into(comm: Comm, extent: Extent, full: Extent, into: Tensor, *, source: int, unit: str) -> None:
    """Receive a range of another rank into the full tensor, without a copy if it is contiguous there."""
    blocks = shared(extent, full)
    is_alike = into.device == comm.device and into.dtype is torch_dtype(extent.dtype)
    if is_alike and len(blocks) == 1 and blocks[0].is_run:
        _receive(comm, into[blocks[0].target : blocks[0].target + extent.numel], source, unit)
        return
    part = torch.empty(extent.numel, dtype=torch_dtype(extent.dtype), device=comm.device)
    _receive(comm, part, source, unit)
    copy_shared(extent, part, full, into)


@torch.no_grad()
def scatter_ranges(
    comm: Comm,
    stored: Sequence[StoredRanges],
    metadata: Sequence[RankMetadata],
    values: Mapping[str, Tensor],
    names: Collection[str],
) -> None:
    """Fill the stored ranges of every rank from full tensors on rank 0.

    Args:
        comm: The Comm that was given to :func:`gather_metadata`.
        stored: The ranges that were given to :func:`gather_metadata`. Ranks with copies must have them at the
            same index.
        metadata: The metadata that :func:`gather_metadata` returned.
        values: On rank 0 the full tensors by name, which are cast if they have another dtype.
        names: The names of ``values``, on every rank. Ranges of other tensors are unchanged.

    Collective:
        A message from rank 0 for each range to the first rank that has it, and a broadcast of its
        memory to the copies. The memory of all ranks at one index is filled before that at the next. In addition to
        ``values``, rank 0 stores one piece of memory and one range. All ranks must call.
    """
    present = set(names)
    for place in range(max([len(stored), *(len(rank_metadata.stored) for rank_metadata in metadata)])):
        if place < len(stored):
            _fill_stored(comm, stored[place], values, present)
        for target, rank_metadata in enumerate(metadata):
            unit, extents = rank_metadata.stored[place] if place < len(rank_metadata.stored) else ("", [])
            for extent in extents if target != comm.rank else ():
                if extent.name in present:
                    part = torch.empty(extent.numel, dtype=torch_dtype(extent.dtype))
                    _fill(extent, part, values)
                    _send(comm, part, target, unit)


def _fill_stored(comm: Comm, ranges: StoredRanges, values: Mapping[str, Tensor], present: Collection[str]) -> None:
    """Fill one piece of this rank's memory, and broadcast it to the ranks with copies."""
    if not any(extent.name in present for extent in ranges.extents):
        return
    flat, views = ranges.fetch()
    for extent, view in zip(ranges.extents, views, strict=True):
        if not ranges.is_first or extent.name not in present:
            continue
        if comm.rank == 0:
            _fill(extent, view, values)
        else:
            received = view if view.device == comm.device else torch.empty_like(view, device=comm.device)
            _receive(comm, received, 0, ranges.unit)
            view.copy_(received)
    if ranges.copies is not None:
        on_device = flat.to(comm.device)
        ranges.copies.broadcast(as_bytes(on_device), root=0, unit=ranges.unit).wait()
        flat.copy_(on_device)
    ranges.store(flat)


def _send(comm: Comm, part: Tensor, target: int, unit: str) -> None:
    if part.numel():
        comm.send(as_bytes(part.to(comm.device)), to=target, unit=unit).wait()


def _receive(comm: Comm, part: Tensor, source: int, unit: str) -> None:
    if part.numel():
        comm.receive(as_bytes(part), source=source, unit=unit).wait()


def _fill(extent: Extent, part: Tensor, values: Mapping[str, Tensor]) -> None:
    full, value = whole_extent(extent), values[extent.name].detach()
    stride = extent.stride or contiguous_stride(extent.shape)
    if any(size > 1 and a != b for size, a, b in zip(value.shape, value.stride(), stride, strict=True)):
        laid_out = torch.empty_strided(extent.shape, stride, dtype=value.dtype, device=value.device)
        value = laid_out.copy_(value)
    copy_shared(full, value.as_strided((full.numel,), (1,)), extent, part)


def whole_extent(extent: Extent) -> Extent:
    """Return the extent of the full logical tensor."""
    return dataclasses.replace(extent, start=0, stop=extent.logical_numel, cuts=())


def empty(extent: Extent, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate a full logical tensor with its strides, by default on the CPU and in its dtype."""
    stride = extent.stride or contiguous_stride(extent.shape)
    return torch.empty_strided(extent.shape, stride, dtype=dtype or torch_dtype(extent.dtype), device=device)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a flat view of the bytes of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)
