"""Thousands of ranks: what a rank receives, and the manifest, hardly grow with their number."""

from __future__ import annotations

import itertools
import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.combine import Combined, encode_ranges
from shardwise.checkpoint.manifest import MANIFEST_NAME
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.table import Table
from shardwise.checkpoint.writer import write
from shardwise.spec.extent import Extent, shared
from shardwise.spec.layout import GroupLayout, ParamSpec
from shardwise.spec.slice import Cut
from tests.checkpoint.threads import run_in_threads

#: Of each of the units: names and shapes. With master and two moments of AdamW they make 3 x 4 x 5 tensors.
UNITS, SHAPES = 4, {"qkv": (384, 128), "out": (128, 128), "up": (512, 128), "down": (128, 512), "norm": (128,)}
KINDS = ("", "optimizer/", "second/")


def extents(world: int) -> dict[int, list[Extent]]:
    """What the engine's flat layout gives each rank of every unit and both of its moments."""
    found: dict[int, list[Extent]] = {rank: [] for rank in range(world)}
    for unit in range(UNITS):
        specs = [ParamSpec(f"blocks.{unit}.{name}.weight", shape, "fp32") for name, shape in SHAPES.items()]
        layout = GroupLayout.build(specs, world, dtypes=("fp32",))
        for rank in range(world):
            for piece in layout.owned(rank):
                spec = specs[piece.index]
                for kind in KINDS:
                    extent = spec.extent(piece.start, piece.stop, name=kind + spec.name)
                    found[rank].append(extent)
    return found


def save(path, world: int):
    """Save on ``world`` ranks; returns the bytes that each received, and the most that a rank had to say."""
    owned = extents(world)
    received = [0] * world

    def body(comm):
        pieces = [(extent, torch.full((extent.numel,), float(comm.rank))) for extent in owned[comm.rank]]
        write(path, comm, pieces, {"state": {"step": 1}}, step=1, run_id="r")
        received[comm.rank] = comm.received_bytes

    before = threading.stack_size(2**19)
    try:
        outcome = run_in_threads(body, world)
    finally:
        threading.stack_size(before)
    assert outcome == [None] * world
    return received


@pytest.mark.slow
def test_at_1024_ranks_only_rank_0_receives_and_the_manifest_stays_small(tmp_path):
    few, many = save(tmp_path / "few", 32), save(tmp_path / "many", 1024)
    assert max(many[1:]) < 500
    assert max(many[1:]) <= max(few[1:]) + 100
    assert 100_000 < many[0] < 1_000_000
    size = (tmp_path / "many" / MANIFEST_NAME).stat().st_size
    num_pieces = sum(len(owned) for owned in extents(1024).values())
    assert num_pieces > 9_000
    per_file = size / 1024
    assert per_file < 100  # size and hash of each file, and 60 tensors in all
    found = open_checkpoint(tmp_path / "many")
    found.check_files()
    targets = [(extent, torch.zeros(extent.numel)) for extent in extents(3)[1]]
    found.read_into(targets, ignored=found.tensors)
    by_rank = extents(1024)
    for extent, target in targets[:15]:
        for rank, owned in by_rank.items():
            for theirs in owned:
                if theirs.name == extent.name:
                    start, stop = theirs.overlap(extent)
                    assert bool((target[start - extent.start : stop - extent.start] == rank).all())


def combined(owned: dict[int, list[Extent]]) -> Table:
    found = Combined((rank, encode_ranges(extents)) for rank, extents in owned.items())
    assert found.problems == []
    return found.table


def pieces_of(owned: dict[int, list[Extent]]) -> list[list[int]]:
    """The rows of one tensor: rank, start and stop; of a run also its count and the difference of ranks."""
    rows = combined(owned).partitions
    return [
        [rank, start, start + length, *([count, step] if count > 1 else [])]
        for rank, start, length, count, step in np.stack(
            [rows.rank, rows.start, rows.length, rows.count, rows.rank_step], axis=1
        ).tolist()
    ]


def test_equal_pieces_of_ranks_at_equal_distances_are_one_run():
    def whole(ranks, marks):
        pairs = itertools.pairwise(marks)
        return {rank: [Extent("w", (marks[-1],), "fp32", *pair)] for rank, pair in zip(ranks, pairs, strict=True)}

    assert pieces_of(whole(range(5), [0, 10, 20, 30, 40, 50])) == [[0, 0, 10, 5, 1]]
    assert pieces_of(whole(range(1, 12, 2), [0, 5, 15, 25, 35, 45, 46])) == [[1, 0, 5], [3, 5, 15, 4, 2], [11, 45, 46]]
    assert pieces_of(whole(range(3), [0, 10, 20, 30])) == [[0, 0, 10], [1, 10, 20], [2, 20, 30]]
    assert pieces_of(whole([4, 3, 2, 1, 0], [0, 10, 20, 30, 40, 50])) == [
        [4 - i, 10 * i, 10 * i + 10] for i in range(5)
    ]
    cuts = [(Cut(0, ((0, 8),)),), (Cut(0, ((8, 16),)),)]
    sliced = {
        2 * part + side: [Extent("w", (16, 2), "fp32", 4 * part, 4 * part + 4, cuts=cuts[side])]
        for part in range(4)
        for side in range(2)
    }
    assert pieces_of(sliced) == [[0, 0, 4, 4, 2], [1, 0, 4, 4, 2]]


def test_a_run_is_the_pieces_that_it_stands_for():
    marks = [0, 12, 25, 38, 51, 64]
    ranks = [1, 3, 5, 7, 9]
    owned = {
        rank: [Extent("w", (64,), "fp32", *pair)] for rank, pair in zip(ranks, itertools.pairwise(marks), strict=True)
    }
    owned = {rank: owned.get(rank, []) for rank in range(10)}
    table = combined(owned)
    assert len(table.partitions.rank) == 2
    pieces = list(zip(ranks, itertools.repeat(-1), marks, marks[1:], strict=False))
    assert list(table.pieces("w")) == pieces
    for rank in range(10):
        assert [(piece.start, piece.stop) for piece in table.of_rank(rank, is_frozen=False)] == [
            (start, stop) for owner, _, start, stop in pieces if owner == rank
        ]
    for start, stop in itertools.combinations(range(0, 65, 3), 2):
        found = [rank for rank, _, _ in table.overlapping(Extent("w", (64,), "fp32", start, stop))]
        assert found == [rank for rank, _, first, last in pieces if first < stop and last > start]


@st.composite
def divided(draw):
    """A shape, and a way to divide it: slices of one or two dimensions, and of each some pieces."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    sides = [sorted(draw(st.sets(st.integers(0, size), max_size=3)) | {0, size}) for size in shape]
    numbers, owned = itertools.count(), {}
    for ranges in itertools.product(*(itertools.pairwise(marks) for marks in sides)):
        cuts = tuple(
            Cut(dim, (taken,))
            for dim, (taken, size) in enumerate(zip(ranges, shape, strict=True))
            if taken != (0, size)
        )
        numel = math.prod(stop - start for start, stop in ranges)
        marks = sorted(draw(st.sets(st.integers(0, numel), max_size=4)) | {0, numel})
        for pair in itertools.pairwise(marks):
            owned[next(numbers)] = [Extent("w", shape, "fp32", *pair, cuts=cuts)]
    return owned


@given(divided(), divided())
def test_every_piece_that_shares_elements_is_found(saved, wanted):
    shape = saved[0][0].shape
    table = combined(saved)
    for (extent,) in wanted.values():
        if extent.shape != shape:
            continue
        expected = {rank for rank, (owned,) in saved.items() if shared(owned, extent)}
        found = {rank: owned for rank, _, owned in table.overlapping(extent)}
        assert expected <= found.keys()
        assert all(saved[rank] == [owned] for rank, owned in found.items())
