"""Thinned curves look the same; numbers are short, and an axis has the unit of its values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.planner.explain import gib
from shardwise.report.numbers import finite, seconds, thin, unit_of
from shardwise.spec.text import size


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=400), st.integers(1, 40))
def test_thinned_curves_keep_every_extreme_and_both_ends(ys: list[float | None], columns: int) -> None:
    xs = list(range(len(ys)))
    points = thin(xs, ys, columns=columns)
    kept = [point for point in points if point is not None]
    given_points = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
    assert set(kept) <= set(given_points)
    assert len(kept) <= max(4 * (columns + 2 + ys.count(None)), 4)
    if given_points:
        assert kept[0] == given_points[0]
        assert kept[-1] == given_points[-1]
        assert min(y for _, y in kept) == min(y for _, y in given_points)
        assert max(y for _, y in kept) == max(y for _, y in given_points)


def test_a_hundred_thousand_points_become_few_and_gaps_stay() -> None:
    ys: list[float | None] = [math.sin(x / 500) for x in range(100_000)]
    ys[50_000:50_010] = [None] * 10
    points = thin(range(100_000), ys, columns=500)
    assert len(points) <= 2100
    assert points.count(None) == 1
    assert thin([1, 2, 3], [math.nan, math.inf, None], columns=10) == []
    assert thin([], [], columns=10) == []


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0 s"),
        (3e-5, "30 µs"),
        (0.2513, "251 ms"),
        (1.234, "1.23 s"),
        (119, "119 s"),
        (600, "10 min"),
        (9e3, "2.5 h"),
    ],
)
def test_times_have_the_unit_that_suits_them(value: float, shown: str) -> None:
    assert seconds(value) == shown


@pytest.mark.parametrize(
    ("greatest", "shown", "unit"),
    [
        (0.3, seconds, (1e-3, "ms")),
        (400.0, seconds, (60.0, "min")),
        (1.9e9, size, (1e6, "MB")),
        (80 * 2.0**30, gib, (2.0**30, "GiB")),
        (5000.0, "{:,.6g}".format, (1.0, "")),
    ],
)
def test_an_axis_has_the_unit_of_half_its_greatest_value(
    greatest: float, shown: Callable[[float], str], unit: tuple[float, str]
) -> None:
    assert unit_of(greatest, shown) == unit


def test_what_is_no_number_is_none() -> None:
    assert [finite(each) for each in (1, 2.5, True, None, "3", math.nan, math.inf)] == [1, 2.5, *[None] * 5]
