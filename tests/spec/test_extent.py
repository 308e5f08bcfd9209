"""What ranges of slices of one logical tensor have in common, against brute force."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.spec import extent as extents
from shardwise.spec.extent import Extent, describe_cuts, logical_stride, shared, tiling_problems
from shardwise.spec.slice import Cut, even_ranges, simplest


def indices(extent: Extent) -> np.ndarray:
    """The logical (row-major) indices of the elements that an extent holds, in the order in which it holds them."""
    whole = np.arange(math.prod(extent.shape)).reshape(extent.shape)
    for cut in extent.cuts:
        index = np.concatenate([np.arange(start, stop) for start, stop in cut.ranges] or [np.arange(0)])
        whole = np.take(whole, index, axis=cut.dim)
    if extent.stride is not None:
        whole = whole.transpose(sorted(range(whole.ndim), key=lambda dim: -extent.stride[dim]))
    return whole.reshape(-1)[extent.start : extent.stop]


def strided(flat: np.ndarray, start: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> np.ndarray:
    assert start >= 0
    assert start + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) < flat.size
    steps = tuple(step * flat.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(flat[start:], shape, steps)


@st.composite
def some_extents(draw: st.DrawFn) -> tuple[Extent, Extent]:
    """Two ranges of two slices of one tensor of up to four dimensions, in some order of memory."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    stride = None
    if draw(st.booleans()):
        order = draw(st.permutations(range(len(shape))))
        stride = [0] * len(shape)
        step = 1
        for dim in order:
            stride[dim], step = step, step * shape[dim]
    found = []
    for _ in range(2):
        cuts = []
        for dim, size in enumerate(shape):
            if draw(st.booleans()):
                marks = sorted(draw(st.sets(st.integers(0, size), max_size=4)))
                ranges = list(zip(marks[::2], marks[1::2], strict=False))
                cuts.append(Cut(dim, tuple(draw(st.permutations(ranges)))))
        cuts = simplest(shape, cuts)
        source = Extent("w", shape, "fp32", 0, 0, None if stride is None else tuple(stride), cuts)
        start = draw(st.integers(0, source.slice_numel))
        stop = draw(st.integers(start, source.slice_numel))
        found.append(Extent("w", shape, "fp32", start, stop, source.stride, cuts))
    return found[0], found[1]


@settings(max_examples=400, deadline=None)
@given(pair=some_extents())
def test_blocks_hold_exactly_what_two_extents_share(pair: tuple[Extent, Extent]) -> None:
    source, target = pair
    ours, theirs = indices(source), indices(target)
    copied = np.full(theirs.size, -1)
    for block in shared(source, target):
        here = strided(ours, block.source, block.shape, block.source_stride)
        there = strided(copied, block.target, block.shape, block.target_stride)
        assert (there == -1).all()
        there[...] = here
        assert block.numel == here.size > 0
        assert list(block.source_stride) == sorted(block.source_stride, reverse=True)
    expected = np.where(np.isin(theirs, ours), theirs, -1)
    assert (copied == expected).all()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_slices_that_make_the_whole_are_told_from_those_that_do_not(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    by_dim = []
    for size in shape:
        marks = [0, *sorted(data.draw(st.sets(st.integers(1, size - 1) if size > 1 else st.nothing()))), size]
        owners = data.draw(st.lists(st.integers(0, 1), min_size=len(marks) - 1, max_size=len(marks) - 1))
        parts = [
            [pair for pair, mine in zip(itertools.pairwise(marks), owners, strict=True) if mine == o] for o in (0, 1)
        ]
        by_dim.append([part for part in parts if part])
    slices = [
        simplest(shape, [Cut(dim, tuple(ranges)) for dim, ranges in enumerate(sides)])
        for sides in itertools.product(*by_dim)
    ]
    assert tiling_problems("w", shape, slices) == []
    if len(slices) > 1:
        assert "w: no slice holds [" in tiling_problems("w", shape, slices[1:])[0]
    assert "w: two slices hold " in tiling_problems("w", shape, [*slices, slices[0]])[0]


def test_a_tensor_cut_into_too_many_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents, "MAX_CELLS", 3)
    slices = [(Cut(0, ((row, row + 1),)),) for row in range(4)]
    assert "divide it into 4 parts, more than 3" in tiling_problems("w", (4, 2), slices)[0]


def test_the_cost_does_not_grow_with_the_rows() -> None:
    """Columns of half of 50 million rows, wanted by another degree, are three blocks found at once."""
    rows, columns = 50_000_000, 64
    source = Extent("w", (rows, columns), "fp32", 5, rows * 16 - 3, cuts=(Cut(1, ((16, 48),)),))
    wanted = Extent("w", (rows, columns), "fp32", 0, rows * 16, cuts=(Cut(1, even_ranges(columns, 4, 1)),))
    begin = time.perf_counter()
    blocks = shared(source, wanted)
    assert time.perf_counter() - begin < 0.05
    assert sum(block.numel for block in blocks) == (rows // 2 - 1) * 16 + 11
    assert len(blocks) == 3


def test_a_slice_is_shown_as_it_would_be_indexed() -> None:
    assert describe_cuts((96, 32), (Cut(0, ((0, 16), (32, 48))),)) == "[0:16 32:48 of 96, :]"
    assert describe_cuts((4,), (Cut(0, ()),)) == "[nothing of 4]"


def test_equal_slices_have_one_form() -> None:
    cuts = [Cut(1, ((0, 2), (2, 4))), Cut(0, ((0, 3), (3, 3), (3, 4), (6, 8)))]
    assert simplest((8, 4), cuts) == (Cut(0, ((0, 4), (6, 8))),)
    assert simplest((8, 4), [Cut(0, ((4, 8), (0, 4)))]) == (Cut(0, ((4, 8), (0, 4))),)
    assert simplest((8, 4), [Cut(0, ())]) == (Cut(0, ()),)


def test_the_stride_of_the_whole_follows_from_that_of_a_part() -> None:
    assert logical_stride((4, 6), (1, 2)) == (1, 4)
    assert logical_stride((4, 6), None) is None
    assert logical_stride((8, 3, 5, 5), (25 * 3, 1, 15, 3)) == (75, 1, 15, 3)
