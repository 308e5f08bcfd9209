"""The tensors of manifests of format versions 1 to 4, which had an object for each tensor instead of columns.

``{"shape": [4, 6], "dtype": "fp32", "pieces": [[0, 0, 12], [1, 12, 24]]}``: each piece has rank, start and stop; from
version 2 on also the number of its slice (``"slices"``), and from version 3 on the two numbers of a run (how many
pieces of this length follow each other, and how far apart their ranks are).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, NotRequired

import numpy as np
from pydantic import ConfigDict, Field
from typing_extensions import TypedDict  # pydantic takes the standard library's from Python 3.12 on

from shardwise.checkpoint.partition import Column, Cuts, Partitions, column, offsets, read_slices
from shardwise.checkpoint.table import MOST_PROBLEMS, Dims, Natural, Table
from shardwise.state.extents import coverage_problems


class EarlierTensor(TypedDict):
    """One logical tensor, as these versions wrote it."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    shape: Dims
    dtype: Annotated[str, Field(max_length=32)]
    stride: NotRequired[Dims | None]
    pieces: list[Annotated[list[Natural], Field(min_length=3, max_length=6)]]
    slices: NotRequired[list[list[Annotated[list[Natural], Field(min_length=1)]]] | None]
    is_frozen: NotRequired[bool]


def read_table(tensors: Mapping[str, EarlierTensor], version: int) -> Table:
    """The table of an earlier manifest.

    Raises:
        ValueError: The problems of its pieces, which a table cannot express: pieces that overlap or leave a gap, and
            what the version does not have.
    """
    names, held = list(tensors), list(tensors.values())
    slices = [_slices(name, entry, version) for name, entry in tensors.items()]
    num_pieces = column([len(entry["pieces"]) for entry in held])
    pieces = _columns([piece for entry in held for piece in entry["pieces"]])
    rank, start, stop, number, count, rank_step = pieces
    tensor = np.repeat(np.arange(len(held)), num_pieces)
    longest = column([len(cuts) for cuts in slices])
    _refuse_features(names, pieces, tensor, longest, version)
    first_slice = offsets(np.maximum(longest, 1))
    place = first_slice[tensor] + np.maximum(number, 0)
    order = np.argsort(place, kind="stable")
    num_rows = np.bincount(place, minlength=int(first_slice[-1])).astype(np.int64)
    table = Table(
        names=names,
        dtypes=[entry["dtype"] for entry in held],
        shapes=[tuple(entry["shape"]) for entry in held],
        strides={
            index: tuple(stride) for index, entry in enumerate(held) if (stride := entry.get("stride")) is not None
        },
        partition=np.arange(len(held)),
        frozen=frozenset(index for index, entry in enumerate(held) if entry.get("is_frozen")),
        partitions=Partitions(
            slices=slices,
            num_rows=num_rows,
            rank=rank[order],
            length=(stop - start)[order],
            count=count[order],
            rank_step=rank_step[order],
        ),
    )
    with np.errstate(over="ignore"):
        is_odd = (table.partitions.start != start[order]) | (stop <= start)[order]
    if ((number < 0) & (longest[tensor] > 0)).any():
        is_odd |= ((number < 0) & (longest[tensor] > 0))[order]
    if is_odd.any():
        odd = np.unique(tensor[order][is_odd])[:MOST_PROBLEMS].tolist()
        raise ValueError("; ".join([problem for index in odd for problem in _problems(table, index, held[index])][:5]))
    return table


def _slices(name: str, entry: EarlierTensor, version: int) -> tuple[Cuts, ...]:
    written = entry.get("slices")
    if written is None:
        return ()
    if version == 1:
        raise ValueError(f"{name}: it has slices, which format version 1 has not")
    if any(len(cut) % 2 == 0 for cuts in written for cut in cuts):
        raise ValueError(f"{name}: a cut is no dimension with ranges")
    return read_slices(written)


def _columns(pieces: Sequence[Sequence[int]]) -> tuple[Column, ...]:
    """Rank, start, stop, slice (-1: none), count and difference of ranks of each piece."""
    sizes = column([len(piece) for piece in pieces])
    flat, first = column(list(itertools.chain.from_iterable(pieces))), offsets(sizes)[:-1]
    found = []
    for place, default in enumerate((0, 0, 0, -1, 1, 1)):
        has_slice = (sizes == 4) | (sizes == 6)
        at = first + place - (place > 3) * ~has_slice
        is_there = (place < 3) | (has_slice if place == 3 else sizes >= 5)
        found.append(np.where(is_there, flat[np.where(is_there, at, 0)] if len(flat) else 0, default))
    return tuple(found)


def _refuse_features(
    names: Sequence[str], pieces: Sequence[Column], tensor: Column, num_slices: Column, version: int
) -> None:
    _, start, stop, number, count, _ = pieces
    for wrong, say in (
        ((number >= 0) & (version == 1), lambda _: "it has slices, which format version 1 has not"),
        ((count != 1) & (version < 3), lambda _: f"it has runs, which format version {version} has not"),
        (
            number >= num_slices[tensor],
            lambda row: f"a piece belongs to a slice beyond {num_slices[tensor[row]] - 1}",
        ),
        ((count > 1) & (start >= stop), lambda row: f"the range {start[row]} to {stop[row]} is empty"),
    ):
        if wrong.any():
            row = int(wrong.argmax())
            raise ValueError(f"{names[tensor[row]]}: {say(row)}")


def _problems(table: Table, index: int, entry: EarlierTensor) -> list[str]:
    """Gaps and overlaps of the pieces of one tensor."""
    cuts = table.partitions.slices[index]
    ranges: dict[Cuts, list[tuple[int, int, int]]] = {each: [] for each in cuts}
    for piece in zip(*(each.tolist() for each in _columns(entry["pieces"])), strict=True):
        rank, start, stop, number, count, _ = piece
        ranges.setdefault(cuts[number] if number >= 0 else (), []).append((start, start + count * (stop - start), rank))
    shape = tuple(entry["shape"])
    return coverage_problems(table.names[index], shape, ranges) or [f"{table.names[index]}: its pieces make no whole"]
