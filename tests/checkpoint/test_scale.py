"""Work grows with what there is: reading a manifest with its entries, a load plan with what is loaded."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from shardwise.checkpoint.combine import Combined, encode_ranges
from shardwise.checkpoint.manifest import Manifest, decode, encode
from shardwise.spec.extent import Extent
from shardwise.spec.slice import Cut

Owned = list[list[Extent]]


def operations(body: Callable[[], Any]) -> int:
    """Operations of the interpreter in ``body``, those of loops included."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        body()
    finally:
        sys.settrace(before)
    return count


def encoded(owned: Owned) -> bytes:
    combined = Combined((rank, encode_ranges(extents)) for rank, extents in enumerate(owned))
    assert combined.problems == []
    files = {"bytes": [1] * len(owned), "hash": [f"{rank:032x}" for rank in range(len(owned))]}
    head = {"save_id": "0" * 16, "run_id": "r", "step": 1, "world_size": len(owned), "data": {}, "frozen": None}
    return encode({**head, **combined.table.columns(), "files": files})


def tensors(count: int) -> Owned:
    return [[Extent(f"w{i}", (i + 2, 3), "fp32", 0, 3 * (i + 2)) for i in range(count)]]


def uneven(count: int) -> Owned:
    """Ten tensors in pieces that all differ, each tensor in another way."""
    ranks, numbers = count // 10, random.Random(0)
    marks = [[0, *(3 * rank + numbers.randint(0, 2) for rank in range(1, ranks)), 3 * ranks] for _ in range(10)]
    return [
        [Extent(f"w{i}", (3 * ranks,), "fp32", *edges[r : r + 2]) for i, edges in enumerate(marks)]
        for r in range(ranks)
    ]


def even(count: int) -> Owned:
    ranks = count // 10
    return [[Extent(f"w{i}", (2 * ranks,), "fp32", 2 * r, 2 * r + 2) for i in range(10)] for r in range(ranks)]


def sliced(count: int) -> Owned:
    ranks = count // 10
    return [
        [Extent(f"w{i}", (3, 2 * ranks), "fp32", 0, 6, cuts=(Cut(1, ((2 * r, 2 * r + 2),)),)) for i in range(10)]
        for r in range(ranks)
    ]


def odd_slices(count: int) -> Owned:
    """Slices of two ranges each."""
    return [
        [Extent("w", (2 * count,), "fp32", 0, 2, cuts=(Cut(0, ((r, r + 1), (count + r, count + r + 1))),))]
        for r in range(count)
    ]


@pytest.mark.parametrize("make", [tensors, uneven, even, sliced, odd_slices])
def test_reading_a_manifest_takes_time_in_proportion_to_its_entries(make):
    few, many = (encoded(make(count)) for count in (200, 800))
    decode(few)  # what is done once only
    assert operations(lambda: decode(many)) < 5 * operations(lambda: decode(few))


@pytest.mark.parametrize("make", [tensors, uneven, even, sliced])
def test_rank_0_combines_in_time_in_proportion_to_the_entries(make):
    def combine(reports: list[list[str]]) -> None:
        assert Combined(enumerate(reports)).problems == []

    few, many = ([encode_ranges(extents) for extents in make(count)] for count in (200, 800))
    combine(few)
    assert operations(lambda: combine(many)) < 5 * operations(lambda: combine(few))


@pytest.mark.parametrize("make", [uneven, even, sliced])
def test_the_part_of_one_rank_does_not_grow_with_the_number_of_ranks(make):
    """Its file's layout, and the plan of what it loads: eight times as many ranks have the same ten pieces each."""

    def work(found: Manifest, extents: list[Extent]) -> int:
        for extent in extents:
            assert list(found.table.overlapping(extent))
        assert len(found.layout_of(len(found.files) // 2).offsets) == 10
        return sum(len(list(found.table.overlapping(extent))) for extent in extents)

    counts, sizes = [], []
    for count in (200, 1600):
        owned = make(count)
        found = decode(encoded(owned))
        wanted = owned[len(owned) // 2]
        work(found, owned[0])  # indices that are made once
        counts.append(operations(lambda found=found, wanted=wanted: sizes.append(work(found, wanted))))
    assert sizes == [10, 10]
    assert counts[1] < 1.2 * counts[0]


@pytest.mark.parametrize("make", [tensors, uneven, even, sliced])
def test_what_is_read_is_what_was_combined(make):
    owned = make(40)
    table = decode(encoded(owned)).table
    for rank, extents in enumerate(owned):
        found = {(piece.name, piece.start, piece.stop) for piece in table.of_rank(rank, is_frozen=False)}
        assert found == {(each.name, each.start, each.stop) for each in extents}


def test_equal_tensors_share_a_partition():
    ranks = 64
    owned = [
        [Extent(f"b{i}.w", (ranks, 4), "fp32", 4 * rank, 4 * rank + 4) for i in range(50)]
        + [Extent(f"b{i}.n", (ranks, 2), "fp32", 2 * rank, 2 * rank + 2) for i in range(50)]
        for rank in range(ranks)
    ]
    raw = encoded(owned)
    found = decode(raw).table
    assert len(found.partitions.slices) == 2
    assert len(found.partitions.rank) == 2
    assert len(raw) < 100 * 40 + ranks * 45 + 500


def test_chains_of_slices_are_sums_that_add_up():
    owned = sliced(40)
    for wrong in (
        [*owned[:-1]],
        [*owned, owned[0]],
        [[Extent(each.name, each.shape, each.dtype, 0, 5, cuts=each.cuts) for each in owned[0]], *owned[1:]],
    ):
        combined = Combined((rank, encode_ranges(extents)) for rank, extents in enumerate(wrong))
        assert len(combined.problems) == 10


def test_what_one_rank_calls_frozen_all_ranks_with_pieces_of_it_must():
    owned = even(40)
    frozen: list[set[str]] = [{"w1", "w2"}, {"w1", "w2"}, {"w2"}, {"w1", "w2"}]
    owned[1][2] = Extent("w2", (8,), "fp32", 2, 2)  # none of it: what it is called does not matter
    owned[0][2] = Extent("w2", (8,), "fp32", 0, 4)
    combined = Combined((rank, encode_ranges(extents, frozen[rank])) for rank, extents in enumerate(owned))
    assert combined.problems == ["w1: not frozen on rank 2"]
    assert combined.table.frozen == {1, 2}
