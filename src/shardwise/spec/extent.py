"""A range of elements of a named logical tensor, the unit of exchange between the engine and checkpoints.

A rank's piece of a parameter is a contiguous range of the parameter's elements in memory order, and so is a piece in a
checkpoint file. Loading into a different layout intersects ranges.

If tensor or expert parallelism has cut the model, the range refers to the rank's slice, a separate dense tensor. The
intersection of two such ranges is a few boxes (:func:`shared`), whatever the number of rows::

    logical (4, 6)            in a file: columns 0:3,           wanted: rows 1:3, elements 2 to 12
                              elements 4 to 12
    . . . . . .               . . .                             . . . . . .
    . . . . . .               . x x                             . . w w w w      shared: x and w, one box of
    . . . . . .               x x x                             w w w w w w      1 x 1 and one of 1 x 3 elements
    . . . . . .               x x x                             . . . . . .
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.spec.slice import Cut

_Range = tuple[int, int]

#: Most cells into which the cuts of one tensor may divide it. Three fused blocks, each cut over 1024 ranks, make 3072.
MAX_CELLS = 2**20
_MOST_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Extent:
    """Elements ``start`` to ``stop`` of (a slice of) the logical tensor ``name``, counted in memory order.

    Attributes:
        name: Logical, fully qualified name, as in the plain model's ``state_dict``. For optimizer state:
            ``optimizer/<parameter name>/<state key>``. For buffers: ``buffer/<name>``.
        shape: Logical shape of the full tensor.
        dtype: Short name: ``fp32``, ``bf16``, ``fp16``, ``fp64``, ``int64``, ... (``spec.precision``).
        start: First element of the range; with ``cuts``, counted in the slice.
        stop: One past the last element. ``start == stop`` is an empty extent.
        stride: Strides of the logical tensor if it is dense but not contiguous in the usual order, else ``None``. A
            slice has the same order of dimensions in memory.
        cuts: The slice of the logical tensor, in the form of :func:`spec.slice.simplest`; empty: the full tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int
    stride: tuple[int, ...] | None = None
    cuts: tuple[Cut, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements of the range."""
        return self.stop - self.start

    @property
    def logical_numel(self) -> int:
        """Number of elements of the logical tensor."""
        return math.prod(self.shape)

    @property
    def slice_numel(self) -> int:
        """Number of elements of the slice in which ``start`` and ``stop`` count; of the full tensor without cuts."""
        sizes = list(self.shape)
        for cut in self.cuts:
            sizes[cut.dim] = cut.size
        return math.prod(sizes)

    def overlap(self, other: Extent) -> tuple[int, int]:
        """The intersection ``(start, stop)`` of two extents of one slice; ``start == stop`` if it is empty."""
        start = max(self.start, other.start)
        return start, max(start, min(self.stop, other.stop))


@dataclass(frozen=True, slots=True)
class Block:
    """A box of elements that two extents share, as a strided array in the data of each.

    Attributes:
        shape: Shape with the fewest possible dimensions; the outermost dimension of the source's memory comes first.
        source: Index of the first element, counted from the source's ``start``.
        source_stride: Strides in the source, descending; the last is 1 unless the block has only one column.
        target: Index of the first element, counted from the target's ``start``.
        target_stride: Strides in the target.
    """

    shape: tuple[int, ...]
    source: int
    source_stride: tuple[int, ...]
    target: int
    target_stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_run(self) -> bool:
        """Whether the elements are contiguous in both extents."""
        return self.source_stride == self.target_stride == (1,)


def shared(source: Extent, target: Extent) -> list[Block]:
    """The intersection of two extents of one logical tensor, each element in one block.

    The cost depends on the number of dimensions and ranges of cuts, not on the tensor's size.
    """
    if source.cuts == target.cuts:
        start, stop = source.overlap(target)
        if start == stop:
            return []
        return [Block((stop - start,), start - source.start, (1,), start - target.start, (1,))]
    order = _memory_order(source.shape, source.stride)
    ours, theirs = _sides(source.shape, source.cuts, order), _sides(target.shape, target.cuts, order)
    if any(not _common(ours[dim], theirs[dim]) for dim in range(len(order))):
        return []
    steps, other_steps = _steps(ours), _steps(theirs)
    found = []
    wanted = list(_boxes(_sizes(theirs), target.start, target.stop))
    for box in _boxes(_sizes(ours), source.start, source.stop):
        for other in wanted:
            common = [
                _common(_clipped(ours[dim], box[dim]), _clipped(theirs[dim], other[dim])) for dim in range(len(order))
            ]
            for overlaps in itertools.product(*common):
                sizes = [size for size, _, _ in overlaps]
                here = sum(at * step for (_, at, _), step in zip(overlaps, steps, strict=True)) - source.start
                there = sum(at * step for (_, _, at), step in zip(overlaps, other_steps, strict=True)) - target.start
                found.append(_block(sizes, here, steps, there, other_steps))
    return found


def bounding_box(extent: Extent) -> tuple[_Range, ...]:
    """For each dimension of the logical tensor, the smallest range of indices that contains the extent."""
    order = _memory_order(extent.shape, extent.stride)
    sides = _sides(extent.shape, extent.cuts, order)
    found = [(0, 0)] * len(order)
    boxes = list(_boxes(_sizes(sides), extent.start, extent.stop))
    for position, dim in enumerate(order):
        parts = [part for box in boxes for part in _clipped(sides[position], box[position])]
        if parts:
            found[dim] = min(start for start, _, _ in parts), max(stop for _, stop, _ in parts)
    return tuple(found)


def range_in_slice(extent: Extent, cuts: tuple[Cut, ...], box: Sequence[_Range]) -> _Range:
    """The smallest range of elements of slice ``cuts`` that contains all its elements inside ``box``.

    ``box`` has a range of indices for each dimension of the logical tensor, whose shape and strides ``extent`` has.
    """
    order = _memory_order(extent.shape, extent.stride)
    sides = _sides(extent.shape, cuts, order)
    first = last = 0
    for side, dim, step in zip(sides, order, _steps(sides), strict=True):
        common = _common(side, ((*box[dim], 0),))
        if not common:
            return 0, 0
        first += min(at for _, at, _ in common) * step
        last += max(at + size - 1 for size, at, _ in common) * step
    return first, last + 1


def tiling_problems(name: str, shape: tuple[int, ...], slices: Sequence[tuple[Cut, ...]]) -> list[str]:
    """Describe an overlap or gap of slices of a tensor; empty if every element is in exactly one slice.

    The cost is linear in the number of cells into which all cuts divide the tensor, at most ``MAX_CELLS``.
    """
    dims = sorted({cut.dim for cuts in slices for cut in cuts})
    if not dims or not math.prod(shape):
        return [] if len(slices) == 1 or not math.prod(shape) else [f"{name}: two slices hold all of it"]
    by_dim = [{cut.dim: cut.ranges for cut in cuts} for cuts in slices]
    edges = []
    for dim in dims:
        found = {0, shape[dim]}
        for ranges in by_dim:
            found.update(itertools.chain.from_iterable(ranges.get(dim, ())))
        edges.append(sorted(found))
    sizes = [len(marks) - 1 for marks in edges]
    if math.prod(sizes) > MAX_CELLS:
        return [f"{name}: its slices divide it into {math.prod(sizes)} parts, more than {MAX_CELLS}"]
    cells = bytearray(math.prod(sizes))
    for ranges in by_dim:
        spans = [
            [
                (bisect.bisect_left(marks, a), bisect.bisect_left(marks, b))
                for a, b in ranges.get(dim, ((0, shape[dim]),))
            ]
            for dim, marks in zip(dims, edges, strict=True)
        ]
        for first, last in _rows_of(sizes, spans):
            used = cells.find(1, first, last)
            if used >= 0:
                return [f"{name}: two slices hold {_cell(shape, dims, edges, used)}"]
            cells[first:last] = b"\1" * (last - first)
    free = cells.find(0)
    return [] if free < 0 else [f"{name}: no slice holds {_cell(shape, dims, edges, free)}"]


def describe_cuts(shape: Sequence[int], cuts: Iterable[Cut]) -> str:
    """A slice in the form of an index: ``[0:64 128:192 of 256, :]`` is the first and third quarter of the rows."""
    by_dim: Mapping[int, Cut] = {cut.dim: cut for cut in cuts}
    return f"[{', '.join(_side(by_dim[dim], size) if dim in by_dim else ':' for dim, size in enumerate(shape))}]"


def _side(cut: Cut, size: int) -> str:
    shown = [f"{start}:{stop}" for start, stop in cut.ranges[:_MOST_SHOWN]] or ["nothing"]
    return " ".join(shown) + (" ..." if len(cut.ranges) > _MOST_SHOWN else "") + f" of {size}"


def list_alike(shown: Mapping[str, str]) -> list[str]:
    """Lines of names and texts; names with equal texts that differ only in indices share one: ``b.*.up (4): ...``."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, text in shown.items():
        alike.setdefault((re.sub(r"(?<![^./])\d+(?![^./])", "*", name), text), []).append(name)
    return [
        f"{pattern} ({len(names)}): {text}" if len(names) > 1 else f"{names[0]}: {text}"
        for (pattern, text), names in alike.items()
    ]


def logical_stride(shape: Sequence[int], part_stride: Sequence[int] | None) -> tuple[int, ...] | None:
    """Strides of a dense logical tensor, with the order of dimensions that its part with ``part_stride`` has."""
    if part_stride is None:
        return None
    found, step = [0] * len(shape), 1
    for dim in reversed(_memory_order(tuple(shape), tuple(part_stride))):
        found[dim] = step
        step *= max(shape[dim], 1)
    return tuple(found)


def encode_extent(extent: Extent) -> list[Any]:
    """An extent in its JSON form."""
    named = [extent.name, extent.shape, extent.dtype, extent.start, extent.stop]
    is_usual = extent.stride is None and not extent.cuts
    return named if is_usual else [*named, extent.stride, [(cut.dim, cut.ranges) for cut in extent.cuts]]


def decode_extent(encoded: Sequence[Any]) -> Extent:
    """The inverse of :func:`encode_extent`."""
    name, shape, dtype, start, stop, *unusual = encoded
    stride, cuts = unusual or (None, ())
    return Extent(name, tuple(shape), dtype, start, stop, None if stride is None else tuple(stride), decode_cuts(cuts))


def decode_cuts(encoded: Sequence[Any]) -> tuple[Cut, ...]:
    """Cuts from ``[[dim, [[start, stop], ...]], ...]``."""
    return tuple(Cut(dim, tuple((first, last) for first, last in ranges)) for dim, ranges in encoded)


# -- sides: a slice's part of one dimension, as ranges (logical start, logical stop, local start)

_Side = tuple[tuple[int, int, int], ...]


def _memory_order(shape: tuple[int, ...], stride: tuple[int, ...] | None) -> tuple[int, ...]:
    """The dimensions, sorted from the outermost in memory."""
    dims = range(len(shape))
    return tuple(dims) if stride is None else tuple(sorted(dims, key=lambda dim: -stride[dim]))


@functools.lru_cache(maxsize=4096)
def _sides(shape: tuple[int, ...], cuts: tuple[Cut, ...], order: tuple[int, ...]) -> tuple[_Side, ...]:
    """The side of every dimension of a slice, with ranges sorted by logical start."""
    by_dim = {cut.dim: cut.ranges for cut in cuts}
    found = []
    for dim in order:
        ranges = by_dim.get(dim, ((0, shape[dim]),))
        starts = itertools.accumulate((stop - start for start, stop in ranges), initial=0)
        found.append(tuple(sorted((start, stop, at) for (start, stop), at in zip(ranges, starts, strict=False))))
    return tuple(found)


def _sizes(sides: Sequence[_Side]) -> list[int]:
    return [sum(stop - start for start, stop, _ in side) for side in sides]


def _steps(sides: Sequence[_Side]) -> list[int]:
    """Strides of the slice's memory."""
    sizes = _sizes(sides)
    return [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]


def _boxes(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[_Range, ...]]:
    """Elements ``start`` to ``stop`` of a contiguous tensor as boxes: at most two for each dimension, less one."""
    if start >= stop:
        return
    if not sizes:
        yield ()
        return
    inner = math.prod(sizes[1:])
    first, skipped = divmod(start, inner)
    last, rest = divmod(stop, inner)
    if first == last:
        for box in _boxes(sizes[1:], skipped, rest):
            yield ((first, first + 1), *box)
        return
    if skipped:
        for box in _boxes(sizes[1:], skipped, inner):
            yield ((first, first + 1), *box)
        first += 1
    if first < last:
        yield ((first, last), *((0, size) for size in sizes[1:]))
    if rest:
        for box in _boxes(sizes[1:], 0, rest):
            yield ((last, last + 1), *box)


def _clipped(side: _Side, bounds: _Range) -> _Side:
    """The part of a side inside ``bounds``, a range of local indices."""
    low, high = bounds
    found = []
    for start, stop, at in side:
        first, last = max(at, low), min(at + stop - start, high)
        if first < last:
            found.append((start + first - at, start + last - at, first))
    return tuple(found)


def _common(ours: _Side, theirs: _Side) -> list[tuple[int, int, int]]:
    """The intersection of two sides of a dimension, as (size, local start in ours, local start in theirs)."""
    found = []
    mine, other = 0, 0
    while mine < len(ours) and other < len(theirs):
        (start, stop, at), (begin, end, position) = ours[mine], theirs[other]
        first, last = max(start, begin), min(stop, end)
        if first < last:
            found.append((last - first, at + first - start, position + first - begin))
        if stop <= end:
            mine += 1
        else:
            other += 1
    return found


def _block(sizes: list[int], here: int, steps: list[int], there: int, other_steps: list[int]) -> Block:
    """Make a block, and join neighbouring dimensions that are contiguous in both extents."""
    dims: list[tuple[int, int, int]] = []
    for size, step, other in zip(sizes, steps, other_steps, strict=True):
        if size == 1:
            continue
        if dims and (dims[-1][1], dims[-1][2]) == (size * step, size * other):
            dims[-1] = (dims[-1][0] * size, step, other)
        else:
            dims.append((size, step, other))
    shape, mine, others = zip(*(dims or [(1, 1, 1)]), strict=True)
    return Block(shape, here, mine, there, others)


# -- cells: the parts into which the cuts of all slices divide a tensor


def _rows_of(sizes: Sequence[int], spans: Sequence[Sequence[_Range]]) -> Iterator[_Range]:
    """Yield the cells of a product of spans, as ranges of the flattened grid."""
    *outer, inner = spans
    steps = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    indices = [[index for first, last in side for index in range(first, last)] for side in outer]
    for position in itertools.product(*indices):
        base = sum(index * step for index, step in zip(position, steps, strict=False))
        for first, last in inner:
            yield base + first, base + last


def _cell(shape: Sequence[int], dims: Sequence[int], edges: Sequence[Sequence[int]], index: int) -> str:
    cuts = []
    for dim, marks in zip(reversed(dims), reversed(edges), strict=True):
        index, position = divmod(index, len(marks) - 1)
        cuts.append(Cut(dim, ((marks[position], marks[position + 1]),)))
    return describe_cuts(shape, cuts)
