"""Thousands of ranks: what a rank receives, and the manifest, hardly grow with their number."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from shardwise.checkpoint import open_checkpoint, write
from shardwise.checkpoint.manifest import MANIFEST_NAME, TensorEntry, combine
from shardwise.spec.extent import Extent
from shardwise.spec.layout import GroupLayout, ParamSpec
from shardwise.spec.slice import Cut
from tests.checkpoint.test_damage import manifest_error, rewrite, set_in
from tests.checkpoint.threads import alone, cut, even, run_in_threads

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
    held = extents(world)
    received = [0] * world

    def body(comm):
        pieces = [(extent, torch.full((extent.numel,), float(comm.rank))) for extent in held[comm.rank]]
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
    assert many[0] > 1_000_000
    size = (tmp_path / "many" / MANIFEST_NAME).stat().st_size
    num_pieces = sum(len(held) for held in extents(1024).values())
    assert num_pieces > 9_000
    per_file = size / 1024
    assert per_file < 300  # name, size and hash of each file, and 60 tensors in all
    found = open_checkpoint(tmp_path / "many")
    found.check_files()
    targets = [(extent, torch.zeros(extent.numel)) for extent in extents(3)[1]]
    found.read_into(targets, ignored=found.tensors)
    by_rank = extents(1024)
    for extent, target in targets[:15]:
        for rank, held in by_rank.items():
            for theirs in held:
                if theirs.name == extent.name:
                    start, stop = theirs.overlap(extent)
                    assert bool((target[start - extent.start : stop - extent.start] == rank).all())


def pieces_of(held: dict[int, list[Extent]]) -> list[list[int]]:
    entries, problems = combine(held)
    assert problems == []
    return entries["w"].pieces


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
    assert pieces_of(sliced) == [[0, 0, 4, 0, 4, 2], [1, 0, 4, 1, 4, 2]]


def test_a_run_is_the_pieces_that_it_stands_for():
    entry = TensorEntry(shape=[64], dtype="fp32", pieces=[[1, 0, 12], [3, 12, 25, 4, 2]])
    found = [(rank, extent.start, extent.stop) for rank, _, extent in entry.extents("w")]
    assert found == [(1, 0, 12), (3, 12, 25), (5, 25, 38), (7, 38, 51), (9, 51, 64)]
    assert [entry.runs[1].of_rank(rank) for rank in (1, 3, 4, 9, 11)] == [None, 0, None, 3, None]


def test_what_earlier_versions_wrote_is_read_and_may_not_hold_runs(tmp_path):
    tensor = torch.arange(60.0)
    tensors = {"w": tensor}
    path = tmp_path / "step-00000020"
    run_in_threads(
        lambda comm: write(path, comm, cut(tensors, even(tensors, 6), comm.rank), {}, step=20, run_id="r"), 6
    )
    rewrite(path, set_in("format_version", value=2))
    assert "w: it has runs, which format version 2 has not" in manifest_error(path)
    singles = [[rank, 10 * rank, 10 * rank + 10] for rank in range(6)]
    rewrite(path, set_in("tensors", "w", "pieces", value=singles))
    target = torch.zeros(60)
    open_checkpoint(path, comm=alone()).read_into([(Extent("w", (60,), "fp32", 0, 60), target)])
    assert torch.equal(target, tensor)
