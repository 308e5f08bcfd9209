"""Dtypes by name, policies, and where a sum is divided."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.precision import divisors


@given(st.integers(1, 4096))
def test_a_sum_in_fp16_is_divided_about_evenly_before_and_after(size: int) -> None:
    before, after = divisors(size, "fp16")
    assert before * after == size
    assert math.log2(before).is_integer()
    assert math.sqrt(size) / 2 <= after <= math.sqrt(size) <= before <= 2 * math.sqrt(size)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_other_sums_are_divided_afterwards_alone(dtype: str) -> None:
    assert divisors(6, dtype) == (1, 6)
