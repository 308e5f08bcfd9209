"""Ticks are round and hold the values; thinned curves look the same; numbers are short."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.report.scale import (
    Scale,
    linear,
    logarithmic,
    num_bytes,
    seconds,
    short,
    thin,
    tick_texts,
    time_unit,
    whole,
)

FINITE = st.floats(-1e12, 1e12, allow_nan=False)


@given(FINITE, FINITE)
def test_a_linear_axis_holds_its_values_between_few_even_ticks(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    scale = linear(low, high)
    slack = 1e-6 * max(abs(low), abs(high), 1e-300)
    assert scale.low <= low + slack
    assert scale.high >= high - slack
    assert 1 <= len(scale.ticks) <= 9
    steps = [second - first for first, second in zip(scale.ticks, scale.ticks[1:], strict=False)]
    digits = 4 * math.ulp(max(abs(low), abs(high)))  # numbers of this size have no finer steps
    assert all(math.isclose(step, steps[0], rel_tol=1e-6, abs_tol=max(1e-9, digits)) for step in steps)


@given(st.floats(1e-12, 1e12), st.floats(1e-12, 1e12))
def test_a_logarithmic_axis_has_powers_of_ten(a: float, b: float) -> None:
    scale = logarithmic(min(a, b), max(a, b))
    assert scale.low <= min(a, b) * (1 + 1e-6)
    assert scale.high >= max(a, b) * (1 - 1e-6)
    assert all(math.isclose(math.log10(tick), round(math.log10(tick)), abs_tol=1e-9) for tick in scale.ticks)
    assert scale.share(scale.low) == 0
    assert scale.share(scale.high) == 1


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_an_axis_of_steps_is_labelled_at_both_ends(a: int, b: int) -> None:
    scale = whole(min(a, b), max(a, b))
    assert scale.ticks[0] == min(a, b)
    assert scale.ticks[-1] == max(a, b)
    assert len(scale.ticks) <= 8
    assert list(scale.ticks) == sorted(scale.ticks)


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


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (1500, "1.5k"), (2e7, "20M"), (0.25, "0.25"), (1e-5, "1e-05"), (999.9999999, "1k"), (-2e9, "-2G")],
)
def test_numbers_of_an_axis_are_short(value: float, shown: str) -> None:
    assert short(value) == shown


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


@given(st.floats(1e-6, 1e6))
def test_an_axis_of_times_has_one_unit_and_round_ticks(most: float) -> None:
    unit_s, name = time_unit(most)
    scaled = linear(0.0, most / unit_s, num_ticks=6)
    scale = Scale(0.0, scaled.high * unit_s, tuple(tick * unit_s for tick in scaled.ticks))
    zero, *texts = tick_texts(scale, seconds)
    assert zero == "0"
    assert len({text.split()[1] for text in texts}) == 1
    assert all(len(text.split()[0]) <= 5 for text in texts), (name, texts)


def test_ticks_of_bytes_share_a_unit() -> None:
    assert tick_texts(linear(0.0, 1.9e9), num_bytes) == ["0", "0.5 GB", "1 GB", "1.5 GB", "2 GB"]
    assert tick_texts(linear(0.0, 4.1e9), num_bytes) == ["0", "2 GB", "4 GB", "6 GB"]
    assert tick_texts(linear(0.0, 3000.0), short) == ["0", "1k", "2k", "3k"]
