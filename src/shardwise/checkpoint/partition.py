"""The division of tensors' elements over ranks, as columns of numbers.

A *partition* is one way to divide a tensor: the slices that tensor or expert parallelism makes (none if the tensor is
not cut), and for each slice the pieces of ranks in order, from its first element to its last. Tensors that are divided
in the same way, such as those of equal layers and their optimizer state, share a partition.

The pieces of all partitions are rows of columns. A row is a piece, or a *run*: ``count`` consecutive pieces of equal
length, on ranks that are ``rank_step`` apart::

    partition   slice            rows: rank, length, count, rank_step
    0           (not cut)              0     10      4      1          elements 0 to 10 on rank 0, ...
    1           [0:8 of 16, :]         0     4       4      2          ranks 0, 2, 4 and 6
                [8:16 of 16, :]        1     4       4      2          ranks 1, 3, 5 and 7

Rows do not contain the start of a piece, which is the end of the piece before it. So the pieces of a slice can neither
overlap nor leave a gap; only the sum of their lengths must be checked.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardwise.spec.extent import Extent, bounding_box, range_in_slice
from shardwise.spec.slice import Cut

#: Upper bound of the number of elements of a tensor, exclusive.
MAX_NUMEL = 2**60
#: Minimum number of pieces of a run.
_SHORTEST_RUN = 4

Cuts = tuple[Cut, ...]
Column = np.ndarray[Any, np.dtype[np.int64]]


class OwnedPiece(NamedTuple):
    """A piece: the rank that owns it, the number of its slice (-1: not cut), and its elements in the slice."""

    rank: int
    slice: int
    start: int
    stop: int


def column(values: Sequence[int]) -> Column:
    """Return numbers as a column."""
    return np.array(values, dtype=np.int64)


def offsets(counts: Column) -> Column:
    """Return the start of each of consecutive groups with so many members, followed by the total."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


@dataclass(frozen=True)
class Partitions:
    """All partitions of a checkpoint."""

    slices: list[tuple[Cuts, ...]]  # slices of each partition; empty for tensors that are not cut
    #: Number of rows of each slice, over all partitions; a partition without slices counts as one slice.
    num_rows: Column
    rank: Column  # rank of the first piece of each row
    length: Column  # elements of each piece of a row
    count: Column  # number of pieces of each row
    rank_step: Column  # difference between the ranks of consecutive pieces of a row

    @functools.cached_property
    def first_slice(self) -> Column:
        """Index of each partition's first slice in ``num_rows``."""
        return offsets(column([max(1, len(slices)) for slices in self.slices]))

    @functools.cached_property
    def first_row(self) -> Column:
        """First row of each slice."""
        return offsets(self.num_rows)

    @functools.cached_property
    def start(self) -> Column:
        """Start of each row, as an element of its slice."""
        ends = offsets(self.length * self.count)
        return ends[:-1] - np.repeat(ends[self.first_row[:-1]], self.num_rows)

    @functools.cached_property
    def numel(self) -> Column:
        """Number of elements of each slice, over all of its rows."""
        ends = offsets(self.length * self.count)
        return ends[self.first_row[1:]] - ends[self.first_row[:-1]]

    def row_problem(self, world_size: int) -> tuple[int, str] | None:
        """Return the first partition with an invalid row, and the reason; ``None`` if all rows are valid."""
        outside = (self.count < 1) | (self.rank_step < 1) | (self.count > world_size) | (self.rank_step > world_size)
        last_rank = self.rank + np.where(outside, 0, (self.count - 1) * self.rank_step)
        for wrong, problem in (
            (outside | (last_rank >= world_size), f"a piece belongs to a rank beyond {world_size - 1}"),
            (self.length < 1, "a piece is empty"),
        ):
            if wrong.any():
                return self.partition_of(int(wrong.argmax())), problem
        with np.errstate(over="ignore"):  # integers below may overflow, these floats do not
            ends = np.cumsum(np.concatenate([[0.0], self.length.astype(np.float64) * self.count]))
        wide = ends[self.first_row[1:]] - ends[self.first_row[:-1]] >= MAX_NUMEL
        if wide.any():
            number = int(np.searchsorted(self.first_slice, wide.argmax(), side="right")) - 1
            return number, "its pieces have too many elements"
        return None

    def partition_of(self, row: int) -> int:
        """Return the partition of a row."""
        number = np.searchsorted(self.first_row, row, side="right") - 1
        return int(np.searchsorted(self.first_slice, number, side="right")) - 1

    def pieces(self, partition: int) -> Iterator[OwnedPiece]:
        """Yield every piece of a partition, by slice and element."""
        for number, index in self._slices_of(partition):
            yield from self._pieces(number, index, 0, int(self.numel[index]))

    def overlapping(self, partition: int, extent: Extent) -> Iterator[OwnedPiece]:
        """Yield the pieces that may share elements with a range of a tensor, without iterating over the others.

        If the extent is cut differently than the pieces, some pieces may not share elements after all.
        """
        box = bounding_box(extent)
        for number, index in self._slices_of(partition, box):
            cuts = self.slices[partition][number] if number >= 0 else ()
            is_alike = cuts == extent.cuts
            start, stop = (extent.start, extent.stop) if is_alike else range_in_slice(extent, cuts, box)
            yield from self._pieces(number, index, start, stop)

    def of_rank(self, rank: int) -> Iterator[tuple[int, OwnedPiece]]:
        """Yield every piece of a rank, with its partition."""
        order, ranks = self._singles
        first, last = np.searchsorted(ranks, (rank, rank + 1))
        hits = [(int(row), 0) for row in order[first:last]]
        rows = self.runs
        if len(rows):
            distance = rank - self.rank[rows]
            index = distance // self.rank_step[rows]
            hit = (distance >= 0) & (distance % self.rank_step[rows] == 0) & (index < self.count[rows])
            hits += zip(rows[hit].tolist(), index[hit].tolist(), strict=True)
        for row, index in hits:
            number = int(np.searchsorted(self.first_row, row, side="right")) - 1
            partition = int(np.searchsorted(self.first_slice, number, side="right")) - 1
            length = int(self.length[row])
            start = int(self.start[row]) + index * length
            slice_index = number - int(self.first_slice[partition]) if self.slices[partition] else -1
            yield partition, OwnedPiece(rank, slice_index, start, start + length)

    @functools.cached_property
    def _singles(self) -> tuple[Column, Column]:
        """Rows with one piece, sorted by rank, and their ranks."""
        rows = np.flatnonzero(self.count == 1)
        order = rows[np.argsort(self.rank[rows], kind="stable")]
        return order, self.rank[order]

    @functools.cached_property
    def runs(self) -> Column:
        """Rows with more than one piece."""
        return np.flatnonzero(self.count > 1)

    def _slices_of(self, partition: int, box: Sequence[tuple[int, int]] | None = None) -> Iterator[tuple[int, int]]:
        """Yield the slices of a partition that overlap a box: their numbers in it (-1: not cut) and in ``num_rows``."""
        first = int(self.first_slice[partition])
        if not self.slices[partition]:
            yield -1, first
            return
        is_near = np.ones(len(self.slices[partition]), dtype=bool)
        if box is not None:
            for dim, (low, high) in self._bounds[partition].items():
                is_near &= (low < box[dim][1]) & (high > box[dim][0])
        for number in np.flatnonzero(is_near).tolist():
            yield number, first + number

    @functools.cached_property
    def _bounds(self) -> _SliceBounds:
        return _SliceBounds(self.slices)

    def _pieces(self, number: int, index: int, start: int, stop: int) -> Iterator[OwnedPiece]:
        """Yield the pieces of a slice that contain any of its elements ``start`` to ``stop``."""
        first, last = int(self.first_row[index]), int(self.first_row[index + 1])
        begins = self.start[first:last]
        low = first + max(0, int(np.searchsorted(begins, start, side="right")) - 1)
        for row in range(low, first + int(np.searchsorted(begins, stop, side="left"))):
            at, length, rank, step = (int(each[row]) for each in (self.start, self.length, self.rank, self.rank_step))
            for repeat in range(max(0, (start - at) // length), min(int(self.count[row]), -(-(stop - at) // length))):
                yield OwnedPiece(rank + repeat * step, number, at + repeat * length, at + (repeat + 1) * length)


class _SliceBounds(dict[int, dict[int, tuple[Column, Column]]]):
    """Bounds of each slice by partition and dimension: start and end (exclusive); computed on access."""

    def __init__(self, slices: list[tuple[Cuts, ...]]) -> None:
        super().__init__()
        self._slices = slices

    def __missing__(self, partition: int) -> dict[int, tuple[Column, Column]]:
        slices = [{cut.dim: cut.ranges for cut in cuts} for cuts in self._slices[partition]]
        found = {}
        for dim in sorted({dim for cuts in slices for dim in cuts}):
            ranges = [cuts.get(dim, ((0, MAX_NUMEL),)) for cuts in slices]
            found[dim] = (
                column([min((start for start, _ in each), default=0) for each in ranges]),
                column([max((stop for _, stop in each), default=0) for each in ranges]),
            )
        self[partition] = found
        return found


def join_runs(slice_of: Column, rank: Column, length: Column) -> tuple[Column, Column, Column]:
    """Combine consecutive pieces of equal length, on ranks at equal distances, to runs.

    Args:
        slice_of: The slice of each piece; pieces are sorted by slice and element.
        rank: The rank of each piece.
        length: The number of elements of each piece.

    Returns:
        The first piece of each row, the number of its pieces, and the difference between their ranks.
    """
    total = len(rank)
    count, step = np.ones(total, np.int64), np.ones(total, np.int64)
    is_first = np.ones(total, dtype=bool)
    if total >= _SHORTEST_RUN:
        alike = (slice_of[1:] == slice_of[:-1]) & (length[1:] == length[:-1])
        steps = np.where(alike, rank[1:] - rank[:-1], 0)
        steps[steps < 0] = 0
        edges = np.flatnonzero(np.diff(steps)) + 1
        begins, ends = np.concatenate([[0], edges]), np.concatenate([edges, [total - 1]])
        is_long = (ends - begins >= _SHORTEST_RUN - 1) & (steps[begins] > 0)
        free = 0  # the first piece that is in no run
        for begin, end in zip(begins[is_long].tolist(), ends[is_long].tolist(), strict=True):
            first = max(begin, free)
            if end + 1 - first >= _SHORTEST_RUN:
                count[first], step[first] = end + 1 - first, steps[begin]
                is_first[first + 1 : end + 1] = False
                free = end + 1
    first = np.flatnonzero(is_first)
    return first, count[first], step[first]


def divided_dim(slices: Sequence[Cuts], lengths: Column) -> tuple[int, int, int] | None:
    """Check whether slices divide one dimension into consecutive ranges, one range per slice.

    Args:
        slices: The slices of a partition.
        lengths: The number of elements that ranks own of each slice.

    Returns:
        The dimension, its size, and the tensor's elements per index of it; ``None`` for other slices.
    """
    end = 0
    dim = slices[0][0].dim if slices[0] else -1
    for cuts in slices:
        if len(cuts) != 1 or cuts[0].dim != dim or len(cuts[0].ranges) != 1:
            return None
        start, stop = cuts[0].ranges[0]
        if start != end or stop <= start:
            return None
        end = stop
    width = column([cuts[0].ranges[0][1] - cuts[0].ranges[0][0] for cuts in slices])
    rest = int(lengths[0]) // int(width[0])
    if len(slices) < 2 or rest * end >= MAX_NUMEL or (lengths != width * rest).any():
        return None
    return dim, end, rest


def slices_to_lists(slices: Sequence[Cuts]) -> list[list[list[int]]]:
    """Return slices as lists: for each slice its cuts, for each cut the dimension and the ranges."""
    return [[[cut.dim, *itertools.chain(*cut.ranges)] for cut in cuts] for cuts in slices]


def slices_from_lists(encoded: Sequence[Sequence[Sequence[int]]]) -> tuple[Cuts, ...]:
    """The inverse of :func:`slices_to_lists`."""
    return tuple(tuple(Cut(dim, tuple(itertools.pairwise(marks))[::2]) for dim, *marks in cuts) for cuts in encoded)
