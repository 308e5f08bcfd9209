"""Schedules against their closed forms."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.train.config.sections import ScheduleSection


def section(name: Any, **fields: Any) -> ScheduleSection:
    return ScheduleSection(name=name, **fields)


def test_warm_up_rises_linearly_and_never_trains_at_zero() -> None:
    for name in ("constant", "linear", "cosine", "warmup-stable-decay"):
        schedule = section(name, warmup_steps=4, min_lr_ratio=0.1, decay_steps=5)
        assert [schedule.ratio(step, 20) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_constant_stays() -> None:
    assert {section("constant", min_lr_ratio=0.1).ratio(step, 10) for step in range(10)} == {1.0}


def test_linear_goes_from_peak_to_minimum() -> None:
    schedule = section("linear", min_lr_ratio=0.2)
    assert [schedule.ratio(step, 11) for step in range(11)] == pytest.approx([1 - 0.08 * step for step in range(11)])


def test_cosine_is_half_way_in_the_middle() -> None:
    schedule = section("cosine", min_lr_ratio=0.1)
    assert schedule.ratio(0, 101) == 1.0
    assert schedule.ratio(50, 101) == pytest.approx(0.55)
    assert schedule.ratio(25, 101) == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)
    assert schedule.ratio(100, 101) == pytest.approx(0.1)


def test_stable_then_decay() -> None:
    schedule = section("warmup-stable-decay", warmup_steps=2, min_lr_ratio=0.0, decay_steps=4)
    assert [schedule.ratio(step, 20) for step in range(2, 16)] == [1.0] * 14
    assert [schedule.ratio(step, 20) for step in range(16, 20)] == pytest.approx([0.75, 0.5, 0.25, 0.0])


@given(
    st.sampled_from(["constant", "linear", "cosine", "warmup-stable-decay"]),
    st.integers(1, 200),
    st.integers(0, 200),
    st.floats(0, 1),
)
def test_rates_stay_between_minimum_and_peak_and_never_rise_after_warm_up(
    name: str, steps: int, warmup: int, least: float
) -> None:
    warmup = min(warmup, steps)
    decay = max(1, (steps - warmup) // 2)
    schedule = section(name, warmup_steps=warmup, min_lr_ratio=least, decay_steps=decay)
    rates = [schedule.ratio(step, steps) for step in range(steps + 5)]
    after = rates[warmup:]
    assert all(left >= right - 1e-12 for left, right in pairwise(after))
    assert all(least - 1e-12 <= rate <= 1.0 for rate in after)
    assert all(0 < rate <= 1.0 for rate in rates[:warmup])
