"""Which part of a logical tensor a rank holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.errors import PlanError
from shardwise.spec.slice import Cut, Slice, even_ranges


def sliced(whole: np.ndarray, part_slice: Slice) -> np.ndarray:
    for cut in part_slice.cuts:
        index = np.concatenate([np.arange(start, stop) for start, stop in cut.ranges])
        whole = np.take(whole, index, axis=cut.dim)
    return whole


@given(parts=st.integers(1, 4), blocks=st.integers(1, 3), width=st.integers(1, 3), rows=st.integers(1, 5))
def test_the_slices_of_all_ranks_make_the_whole(parts: int, blocks: int, width: int, rows: int) -> None:
    columns = parts * blocks * width
    whole = np.arange(rows * columns).reshape(rows, columns)
    rebuilt = np.full_like(whole, -1)
    for part in range(parts):
        part_slice = Slice(whole.shape, (Cut(1, even_ranges(columns, parts, part, blocks=blocks)),))
        local = sliced(whole, part_slice)
        assert local.shape == part_slice.local_shape
        assert local.size == part_slice.numel
        for logical, here in part_slice.boxes():
            inside = tuple(slice(*side) for side in logical)
            assert (rebuilt[inside] == -1).all()
            rebuilt[inside] = local[tuple(slice(*side) for side in here)]
    assert (rebuilt == whole).all()


def test_two_dimensions_cut() -> None:
    whole = np.arange(4 * 3 * 8).reshape(4, 3, 8)
    part_slice = Slice(whole.shape, (Cut(0, ((2, 4),)), Cut(2, ((0, 2), (4, 6)))))
    assert part_slice.local_shape == (2, 3, 4)
    assert len(list(part_slice.boxes())) == 2
    rebuilt = np.zeros(part_slice.local_shape, whole.dtype)
    for logical, here in part_slice.boxes():
        rebuilt[tuple(slice(*side) for side in here)] = whole[tuple(slice(*side) for side in logical)]
    assert (rebuilt == sliced(whole, part_slice)).all()


def test_of_copies_the_first_counts() -> None:
    assert [Slice((4,), copy=index, copies=2).is_counted for index in range(2)] == [True, False]


@pytest.mark.parametrize(("dim", "ranges"), [(2, ((0, 1),)), (0, ((0, 5),)), (0, ((3, 2),)), (-1, ((0, 1),))])
def test_cuts_outside_the_shape_are_refused(dim: int, ranges: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(PlanError, match="does not cut a tensor"):
        Slice((4, 4), (Cut(dim, ranges),))


def test_what_does_not_come_out_even_is_refused() -> None:
    with pytest.raises(PlanError, match="3 x 10 cannot be divided evenly over 4 ranks"):
        even_ranges(30, 4, 0, blocks=3)
