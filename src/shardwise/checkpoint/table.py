"""The tensors of a checkpoint as columns: their names, shapes and dtypes, and how they are divided over ranks.

Every check processes full columns, so that each of 100,000 tensors or pieces takes only a few microseconds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from shardwise.checkpoint.partition import (
    MAX_NUMEL,
    Column,
    Cuts,
    OwnedPiece,
    Partitions,
    column,
    divided_dim,
    slices_from_lists,
    slices_to_lists,
)
from shardwise.checkpoint.shard import Piece
from shardwise.spec.extent import MAX_CELLS, Extent, describe_cuts
from shardwise.spec.precision import ITEM_BYTES
from shardwise.spec.slice import simplest
from shardwise.weights.state.extents import coverage_problems

#: Maximum number of distinct slices that are compared one by one. Slices that divide one dimension into ranges do not
#: count.
MAX_ODD_SLICES = 2**15
#: Maximum number of problems that are listed.
MOST_PROBLEMS = 20

Natural = Annotated[int, Field(ge=0, lt=MAX_NUMEL)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Dims = Annotated[list[Natural], Field(max_length=64)]


class Strict(BaseModel):
    """A part of the manifest."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TensorColumns(Strict):
    """The logical tensors, with one value each in every column."""

    name: list[Name]
    dtype: list[Annotated[str, Field(max_length=32)]]  # short names of dtypes
    shape: list[Dims]
    #: Strides of tensors that are dense but not contiguous in the usual order, else ``None``; the column is left out if
    #: there are no such tensors.
    stride: list[Dims | None] | None = None
    partition: list[Natural]  # number of the tensor's partition
    frozen: list[Natural]  # numbers of the tensors in files of frozen parameters, ascending


class PartitionColumns(Strict):
    """Partitions, as in ``checkpoint.partition``."""

    #: For each partition its slices: for each slice its cuts, by ascending dimension: ``[dim, start, stop, start, stop,
    #: ...]``; empty if tensors are not cut.
    slices: list[list[list[Annotated[list[Natural], Field(min_length=1)]]]]
    num_rows: list[Natural]  # rows of each slice, over all partitions; a partition without slices counts as one slice
    rank: list[Natural]  # rank of each row's first piece
    length: list[Natural]  # elements of each piece of a row
    #: ``[row, count, rank_step]`` of each row with more than one piece, ascending.
    runs: list[Annotated[list[Natural], Field(min_length=3, max_length=3)]]


@dataclass(frozen=True)
class Table:
    """The logical tensors of a checkpoint."""

    names: list[str]
    dtypes: list[str]  # short names of dtypes
    shapes: list[tuple[int, ...]]
    #: Strides by number of the tensor, if it is dense but not contiguous in the usual order.
    strides: dict[int, tuple[int, ...]]
    partition: Column  # number of each tensor's partition
    frozen: frozenset[int]  # numbers of the tensors in files of frozen parameters
    partitions: Partitions  # the divisions over ranks

    @functools.cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each tensor by name."""
        return dict(zip(self.names, range(len(self.names)), strict=True))

    @functools.cached_property
    def tensors(self) -> dict[str, Extent]:
        """The logical tensors by name, each as the extent of all its elements."""
        return {name: self.whole(number) for number, name in enumerate(self.names)}

    def whole(self, number: int) -> Extent:
        """Return the extent of all elements of a tensor."""
        shape = self.shapes[number]
        return Extent(self.names[number], shape, self.dtypes[number], 0, math.prod(shape), self.strides.get(number))

    def slices(self, name: str) -> tuple[Cuts, ...]:
        """Return the slices of a tensor; empty if it is not cut."""
        return self.partitions.slices[self.partition[self.numbers[name]]]

    def pieces(self, name: str) -> Iterator[OwnedPiece]:
        """Yield every piece of a tensor."""
        return self.partitions.pieces(int(self.partition[self.numbers[name]]))

    def overlapping(self, extent: Extent) -> Iterator[tuple[int, Piece, Extent]]:
        """Yield every piece that may share elements with a range of a tensor.

        Yields:
            The rank that wrote it, its entry in that rank's file, and its range of the logical tensor.
        """
        number = self.numbers[extent.name]
        partition = int(self.partition[number])
        for rank, part, start, stop in self.partitions.overlapping(partition, extent):
            cuts = self.partitions.slices[partition][part] if part >= 0 else ()
            yield (
                rank,
                Piece(extent.name, extent.dtype, start, stop, part),
                Extent(extent.name, extent.shape, extent.dtype, start, stop, extent.stride, cuts),
            )

    def of_rank(self, rank: int, *, is_frozen: bool) -> list[Piece]:
        """Return the pieces in a rank's file."""
        return [
            Piece(self.names[number], self.dtypes[number], piece.start, piece.stop, piece.slice)
            for partition, piece in self.partitions.of_rank(rank)
            for number in self._by_partition[partition]
            if (number in self.frozen) == is_frozen
        ]

    @functools.cached_property
    def _by_partition(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.partitions.slices]
        for number, partition in enumerate(self.partition.tolist()):
            found[partition].append(number)
        return found

    def problems(self, world_size: int) -> list[str]:
        """Return the faults of the table: names, shapes, ranks, and elements that no rank or several ranks own."""
        found = self._tensor_problem()
        if found is not None:
            return [found]
        row = self.partitions.row_problem(world_size)
        if row is not None:
            users = self._by_partition[row[0]]
            return [f"{self.names[users[0]] if users else f'partition {row[0]}'}: {row[1]}"]
        return self._coverage_problems()

    def _tensor_problem(self) -> str | None:
        if not all(self.names) or not "".join(self.names).isprintable() or max(map(len, self.names), default=0) > 1024:
            odd = next(name for name in self.names if not name or not name.isprintable() or len(name) > 1024)
            return f"{odd[:80]!r} is not a name for a tensor"
        if len(self.numbers) < len(self.names):
            twice = next(name for number, name in enumerate(self.names) if self.numbers[name] != number)
            return f"{twice}: it is listed twice"
        if not set(self.dtypes) <= ITEM_BYTES.keys():
            number = next(number for number, dtype in enumerate(self.dtypes) if dtype not in ITEM_BYTES)
            return f"{self.names[number]}: dtype {self.dtypes[number]!r} is unknown"
        if max(self._numels, default=0) >= MAX_NUMEL:
            number = next(number for number, numel in enumerate(self._numels) if numel >= MAX_NUMEL)
            return f"{self.names[number]}: shape {self.shapes[number]} is too large"
        for number, stride in self.strides.items():
            if len(stride) != len(self.shapes[number]):
                return f"{self.names[number]}: stride {stride} does not belong to shape {self.shapes[number]}"
        return None

    @functools.cached_property
    def _numels(self) -> list[int]:
        return list(map(math.prod, self.shapes))

    def _coverage_problems(self) -> list[str]:
        """Return problems about elements that no rank or several ranks own."""
        partitions = self.partitions
        is_cut = np.array([bool(slices) for slices in partitions.slices], dtype=bool)[self.partition]
        numel = partitions.numel[partitions.first_slice[self.partition]]
        wrong = np.flatnonzero(~is_cut & (numel != column(self._numels)))
        found = [
            problem
            for number in wrong[:MOST_PROBLEMS].tolist()
            for problem in _length_problems(self.names[number], self._numels[number], int(numel[number]))
        ]
        known: set[tuple[int, tuple[int, ...]]] = set()
        divisions: dict[int, tuple[int, int, int] | None] = {}
        num_odd = 0
        for number in np.flatnonzero(is_cut).tolist():
            partition, shape = int(self.partition[number]), self.shapes[number]
            slices = partitions.slices[partition]
            first = int(partitions.first_slice[partition])
            if partition not in divisions:
                divisions[partition] = divided_dim(slices, partitions.numel[first : first + len(slices)])
            division = divisions[partition]
            if division is not None and division[0] < len(shape):
                dim, size, rest = division
                if shape[dim] == size and self._numels[number] == size * rest:
                    continue
            if (partition, shape) in known:
                continue
            known.add((partition, shape))
            num_odd += len(slices)
            if num_odd > MAX_ODD_SLICES:
                return [*found, f"its tensors are cut in more than {MAX_ODD_SLICES} slices of several ranges"]
            lengths = partitions.numel[first : first + len(slices)].tolist()
            found += slice_problems(self.whole(number), slices, lengths)
            if len(found) > MOST_PROBLEMS:
                break
        return found

    # -- in the manifest

    def columns(self) -> dict[str, Any]:
        """Return the manifest's columns: ``tensors`` and ``partitions``."""
        partitions = self.partitions
        tensors: dict[str, Any] = {
            "name": self.names,
            "dtype": self.dtypes,
            "shape": self.shapes,
            "partition": self.partition.tolist(),
            "frozen": sorted(self.frozen),
        }
        if self.strides:
            tensors["stride"] = [self.strides.get(number) for number in range(len(self.names))]
        rows = partitions.runs
        return {
            "tensors": tensors,
            "partitions": {
                "slices": [slices_to_lists(slices) for slices in partitions.slices],
                "num_rows": partitions.num_rows.tolist(),
                "rank": partitions.rank.tolist(),
                "length": partitions.length.tolist(),
                "runs": np.stack([rows, partitions.count[rows], partitions.rank_step[rows]], axis=1).tolist(),
            },
        }

    @classmethod
    def read(cls, tensors: TensorColumns, partitions: PartitionColumns) -> Table:
        """Build the table from the manifest's columns."""
        total, rows = len(tensors.name), len(partitions.rank)
        stride = tensors.stride or []
        lengths = {len(tensors.dtype), len(tensors.shape), len(tensors.partition), len(stride) or total}
        if lengths - {total}:
            raise ValueError(f"its columns of tensors have other lengths than the {total} names")
        if len(partitions.length) != rows or sum(partitions.num_rows) != rows:
            raise ValueError(f"its columns of partitions have other lengths than the {rows} ranks")
        if sum(max(1, len(slices)) for slices in partitions.slices) != len(partitions.num_rows):
            raise ValueError(f"its partitions have another number of slices than {len(partitions.num_rows)}")
        if any(len(cut) % 2 == 0 for slices in partitions.slices for cuts in slices for cut in cuts):
            raise ValueError("a cut is not a dimension with ranges")
        if max(tensors.partition, default=-1) >= len(partitions.slices):
            raise ValueError(f"a tensor has a partition beyond {len(partitions.slices) - 1}")
        runs = np.array(partitions.runs, dtype=np.int64).reshape(-1, 3)
        for what, numbers, most in (("frozen tensors", column(tensors.frozen), total), ("runs", runs[:, 0], rows)):
            if (np.diff(numbers) <= 0).any() or (numbers >= most).any():
                raise ValueError(f"the numbers of its {what} are not ascending, or beyond {most - 1}")
        if (runs[:, 1] < 2).any():
            raise ValueError("a run has fewer than two pieces")
        count, rank_step = np.ones(rows, np.int64), np.ones(rows, np.int64)
        count[runs[:, 0]], rank_step[runs[:, 0]] = runs[:, 1], runs[:, 2]
        return cls(
            names=tensors.name,
            dtypes=tensors.dtype,
            shapes=list(map(tuple, tensors.shape)),
            strides={number: tuple(each) for number, each in enumerate(stride) if each is not None},
            partition=column(tensors.partition),
            frozen=frozenset(tensors.frozen),
            partitions=Partitions(
                slices=[slices_from_lists(slices) for slices in partitions.slices],
                num_rows=column(partitions.num_rows),
                rank=column(partitions.rank),
                length=column(partitions.length),
                count=count,
                rank_step=rank_step,
            ),
        )


def _length_problems(name: str, numel: int, num_owned: int) -> list[str]:
    return coverage_problems(name, (numel,), {(): [(0, num_owned, 0)] if num_owned else []})


def slice_problems(whole: Extent, slices: Sequence[Cuts], lengths: Sequence[int]) -> list[str]:
    """Return why slices, of which ranks own so many elements each, do not make up a tensor."""
    if len(set(slices)) < len(slices) or () in slices:
        return [f"{whole.name}: a slice is listed twice, or is none"]
    for cuts in slices:
        problem = cuts_problem(dataclasses.replace(whole, cuts=cuts))
        if problem is not None:
            return [f"{whole.name}: {problem}"]
    ranges: Mapping[Cuts, list[tuple[int, int, int]]] = {
        cuts: [(0, length, 0)] if length else [] for cuts, length in zip(slices, lengths, strict=True)
    }
    return coverage_problems(whole.name, whole.shape, ranges)


def extent_problem(extent: Extent) -> str | None:
    """Return why an extent is invalid, or ``None``."""
    if not extent.name or len(extent.name) > 1024 or not extent.name.isprintable():
        return f"{extent.name[:80]!r} is not a name for a tensor"
    if extent.dtype not in ITEM_BYTES:
        return f"{extent.name}: dtype {extent.dtype!r} is unknown"
    problem = cuts_problem(extent)
    if problem is not None:
        return f"{extent.name}: {problem}"
    if not 0 <= extent.start <= extent.stop <= extent.slice_numel:
        part = f"slice {describe_cuts(extent.shape, extent.cuts)} of " if extent.cuts else ""
        return (
            f"{extent.name}: elements {extent.start} to {extent.stop} are not a range of {part}a tensor of shape"
            f" {extent.shape}"
        )
    if extent.stride is not None and len(extent.stride) != len(extent.shape):
        return f"{extent.name}: stride {extent.stride} does not belong to shape {extent.shape}"
    return None


def cuts_problem(extent: Extent) -> str | None:
    """Return why the cuts of an extent are invalid, or ``None``."""
    for cut in extent.cuts:
        if not 0 <= cut.dim < len(extent.shape):
            return f"a cut of dimension {cut.dim} does not belong to shape {extent.shape}"
        end = 0
        for start, stop in sorted(cut.ranges):
            if not end <= start <= stop <= extent.shape[cut.dim]:
                return f"the range {start} to {stop} of dimension {cut.dim} overlaps another, or is none of it"
            end = stop
    if math.prod(len(cut.ranges) or 1 for cut in extent.cuts) > MAX_CELLS:
        return f"its slice is more than {MAX_CELLS} boxes"
    if simplest(extent.shape, extent.cuts) != extent.cuts:
        return "its slice is not given in the simplest form"
    return None


def describe(extent: Extent) -> str:
    """Describe a tensor's shape, dtype and, if it is unusual, stride."""
    return f"{tuple(extent.shape)} {extent.dtype}" + ("" if extent.stride is None else f" stride {extent.stride}")
