"""Stages are cut where the most expensive one is as cheap as it can be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.spec.errors import PlanError
from shardwise.spec.module_chain import balance


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_no_division_has_a_cheaper_most_expensive_stage(costs, num_stages):
    def largest(starts):
        bounds = itertools.pairwise([*starts, len(costs)])
        return [sum(costs[start:stop]) for start, stop in bounds]

    if sum(cost > 0 for cost in costs) < num_stages:
        with pytest.raises(PlanError, match="cannot be divided"):
            balance(costs, num_stages)
        return
    found = largest(balance(costs, num_stages))
    assert len(found) == num_stages
    assert min(found) > 0
    every = [largest((0, *inner)) for inner in itertools.combinations(range(1, len(costs)), num_stages - 1)]
    assert max(found) == min(max(division) for division in every if min(division) > 0)


def test_equal_blocks_are_spread_evenly():
    assert balance([0, 0, 4, 4, 4, 4, 0, 1], 2) == [0, 4]
