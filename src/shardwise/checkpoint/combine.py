"""Combines the reports of all ranks on rank 0 into the table of a checkpoint.

Each rank describes its ranges in two short texts: the tensors and slices, and start and stop of each range. Most ranks
own parts of the same tensors, so most of the first texts are equal, and each distinct one is parsed only once. The
numbers of all ranks become columns, which are sorted and compared as a whole.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from shardwise.checkpoint.partition import Column, Cuts, Partitions, column, join_runs
from shardwise.checkpoint.table import MOST_PROBLEMS, Table, describe
from shardwise.spec.extent import Extent, decode_cuts
from shardwise.weights.state.extents import coverage_problems

#: Compression level. Fast rather than small, because texts of many ranks arrive at once and most are equal.
_LEVEL = 1


def encode_ranges(extents: Sequence[Extent], frozen: Collection[str] = ()) -> list[str]:
    """Describe a rank's ranges in two short texts."""
    tensors = [
        [
            each.name in frozen,
            each.name,
            each.shape,
            each.dtype,
            each.stride,
            [(cut.dim, cut.ranges) for cut in each.cuts],
        ]
        for each in extents
    ]
    ranges = np.array([[extent.start, extent.stop] for extent in extents], dtype="<i8").reshape(-1, 2)
    return [_compress(json.dumps(tensors).encode()), _compress(ranges.T.tobytes())]


def _compress(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw, _LEVEL)).decode()


def _decompress(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


class Combined:
    """The combined ranges of all ranks."""

    def __init__(self, reports: Iterable[tuple[int, Sequence[str]]]) -> None:
        #: Tensors that ranks describe differently, and elements that no rank owns or several ranks own.
        self.problems: list[str] = []
        self._tensors: dict[str, int] = {}
        self._first: list[tuple[int, Extent]] = []  # by tensor: the first rank that reported it, and its extent
        self._slices: list[tuple[int, Cuts]] = []  # tensor and slice, in the order in which they were reported
        self._number_of: dict[tuple[int, Cuts], int] = {}
        self._frozen: frozenset[int] = frozenset()
        self._by_text: list[tuple[Column, Any]] = []  # by text: the tensor of each range, and whether it is frozen
        self._text_numbers: dict[str, int] = {}  # number of each text
        self._slices_by_text: list[Column] = []  # by text: the slice of each range; -1 if the range does not fit
        self._text_of_rank: list[int] = []  # by rank: the number of its text
        columns: list[Column] = []
        for rank, (text, ranges) in reports:
            if text not in self._text_numbers:
                self._text_numbers[text] = len(self._text_numbers)
                self._slices_by_text.append(self._read_text(rank, json.loads(_decompress(text))))
            kind = self._text_numbers[text]
            self._text_of_rank.append(kind)
            starts, stops = np.frombuffer(_decompress(ranges), dtype="<i8").reshape(2, -1)
            positions = self._slices_by_text[kind]
            is_piece = (stops > starts) & (positions >= 0)
            slices = positions[is_piece]
            columns.append(np.stack([slices, starts[is_piece], stops[is_piece], np.full(len(slices), rank)]))
        pieces = np.concatenate(columns, axis=1) if columns else np.zeros((4, 0), np.int64)
        self._refuse_half_frozen(pieces)
        self.table = self._make_table(pieces)  # only valid without problems

    def slice_numbers(self) -> Iterable[list[int]]:
        """Return by rank the slice number in the table of each of its ranges; -1 for uncut tensors and empty slices."""
        by_kind = [self._numbers[positions].tolist() for positions in self._slices_by_text]
        return (by_kind[kind] for kind in self._text_of_rank)

    def _read_text(self, rank: int, description: list[list[Any]]) -> Column:
        """Return the slice of each range that a text describes."""
        positions = []
        tensors, flags = [], []
        for is_frozen, name, shape, dtype, stride, cuts in description:
            steps = None if stride is None else tuple(stride)
            extent = Extent(name, tuple(shape), dtype, 0, 0, steps, decode_cuts(cuts))
            tensor = self._tensors.setdefault(name, len(self._tensors))
            tensors.append(tensor)
            flags.append(is_frozen)
            if tensor == len(self._first):
                self._first.append((rank, extent))
            owner, known = self._first[tensor]
            if (extent.shape, extent.dtype, extent.stride) != (known.shape, known.dtype, known.stride):
                ours, theirs = describe(extent), describe(known)
                self.problems.append(f"{extent.name}: rank {rank} has {ours}, rank {owner} has {theirs}")
                positions.append(-1)
                continue
            key = (tensor, extent.cuts)
            if key not in self._number_of:
                self._number_of[key] = len(self._slices)
                self._slices.append(key)
            positions.append(self._number_of[key])
        self._by_text.append((column(tensors), np.array(flags, dtype=bool)))
        return column(positions)

    def _refuse_half_frozen(self, pieces: Column) -> None:
        """Record as problems the frozen tensors that are not frozen on some rank with a piece of them."""
        is_frozen = np.zeros(len(self._first), dtype=bool)
        for tensors, flags in self._by_text:
            is_frozen[tensors[flags]] = True
        self._frozen = frozenset(np.flatnonzero(is_frozen).tolist())
        tensor_of = column([tensor for tensor, _ in self._slices])
        for kind, (tensors, flags) in enumerate(self._by_text):
            odd = tensors[~flags & is_frozen[tensors]]
            if not len(odd):
                continue
            unfrozen = pieces[:, np.isin(tensor_of[pieces[0]], odd) & (column(self._text_of_rank)[pieces[3]] == kind)]
            pairs = sorted(set(zip(tensor_of[unfrozen[0]].tolist(), unfrozen[3].tolist(), strict=True)))
            self.problems += [f"{self._first[tensor][1].name}: not frozen on rank {rank}" for tensor, rank in pairs]

    def _make_table(self, pieces: Column) -> Table:
        """Sort the pieces by tensor, slice and element, check coverage, and find tensors that are divided alike."""
        present = np.zeros(len(self._slices), dtype=bool)
        present[pieces[0]] = True
        order = sorted(
            np.flatnonzero(present).tolist(),
            key=lambda index: (self._slices[index][0], [(cut.dim, cut.ranges) for cut in self._slices[index][1]]),
        )
        rows_of: list[list[int]] = [[] for _ in self._first]  # by tensor: its slices in order
        for position, index in enumerate(order):
            rows_of[self._slices[index][0]].append(position)
        slices = [self._slices[index][1] for index in order]
        place_of = np.full(len(self._slices), -1, np.int64)
        place_of[order] = np.arange(len(order))
        pieces[0] = place_of[pieces[0]]
        pieces = pieces[:, np.lexsort((pieces[2], pieces[1], pieces[0]))]
        bounds = np.searchsorted(pieces[0], np.arange(len(order) + 1))
        self._numbers = np.full(len(self._slices) + 1, -1, np.int64)  # the last one is for ranges that do not fit
        for positions in rows_of:
            for number, position in enumerate(positions):
                self._numbers[order[position]] = number if slices[position] else -1
        self._refuse_uncovered(pieces, bounds, rows_of, slices)
        return self._table(pieces, rows_of, slices)

    def _refuse_uncovered(self, pieces: Column, bounds: Column, rows_of: list[list[int]], slices: list[Cuts]) -> None:
        """Record as problems the tensors that the pieces do not cover exactly."""
        position, start, stop, _ = pieces
        begins = np.concatenate([[0], stop[:-1]])
        begins[bounds[:-1]] = 0
        is_odd = np.zeros(len(slices), dtype=bool)
        is_odd[position[start != begins]] = True
        ends, odd = stop[bounds[1:] - 1].tolist(), is_odd.tolist()
        checked = set()
        for (_, first), positions in zip(self._first, rows_of, strict=True):
            key = (first.shape, tuple(slices[each] for each in positions), tuple(ends[each] for each in positions))
            if not any(odd[each] for each in positions) and key in checked:
                continue
            ranges = {
                slices[each]: _ranges(pieces[1:, bounds[each] : bounds[each + 1]])
                if odd[each]
                else [(0, ends[each], 0)]
                for each in positions
            }
            found = coverage_problems(first.name, first.shape, ranges)
            self.problems += found
            if not found:
                checked.add(key)
            if len(self.problems) > 10 * MOST_PROBLEMS:
                return

    def _table(self, pieces: Column, rows_of: list[list[int]], slices: list[Cuts]) -> Table:
        position, start, stop, rank = pieces
        first, count, step = join_runs(position, rank, stop - start)
        rows = np.stack([rank[first], (stop - start)[first], count, step], axis=1)
        row_bounds = np.searchsorted(position[first], np.arange(len(slices) + 1))
        known: dict[tuple[Any, ...], int] = {}
        partition, kept = [], []
        for positions in rows_of:
            begin, end = (row_bounds[positions[0]], row_bounds[positions[-1] + 1]) if positions else (0, 0)
            cuts = tuple(slices[each] for each in positions)
            counts = tuple(int(row_bounds[each + 1] - row_bounds[each]) for each in positions) or (0,)
            key = (cuts, counts, rows[begin:end].tobytes())
            number = known.setdefault(key, len(known))
            if number == len(kept):
                kept.append((() if cuts == ((),) else cuts, counts, rows[begin:end]))
            partition.append(number)
        whole = np.concatenate([part for *_, part in kept]) if kept else np.zeros((0, 4), np.int64)
        extents = [extent for _, extent in self._first]
        return Table(
            names=[extent.name for extent in extents],
            dtypes=[extent.dtype for extent in extents],
            shapes=[extent.shape for extent in extents],
            strides={number: each.stride for number, each in enumerate(extents) if each.stride is not None},
            partition=column(partition),
            frozen=frozenset(self._frozen),
            partitions=Partitions(
                slices=[cuts for cuts, _, _ in kept],
                num_rows=column([number for _, counts, _ in kept for number in counts]),
                rank=whole[:, 0],
                length=whole[:, 1],
                count=whole[:, 2],
                rank_step=whole[:, 3],
            ),
        )


def _ranges(pieces: Column) -> list[tuple[int, int, int]]:
    """Return columns of pieces as tuples (start, stop, rank)."""
    return list(zip(*pieces.tolist(), strict=True))
