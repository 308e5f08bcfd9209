"""Stages as the planner divides them are those that pipelines divide."""

from __future__ import annotations

import itertools

import pytest

from shardwise.planner.stage import Chain, stage_blocks, stages
from shardwise.spec.chain import balance
from shardwise.spec.schedule import PipelinePolicy


@pytest.mark.parametrize("head_cost", [0, 1, 5, 10, 13, 30, 70])
@pytest.mark.parametrize("num_stages", range(2, 9))
def test_equal_blocks_are_divided_in_closed_form_as_the_balance_divides_them(num_stages, head_cost):
    for count in range(num_stages - bool(head_cost), 20):
        costs = [0, 0, *[10] * count, 0, *([head_cost] if head_cost else [])]
        starts = balance(costs, num_stages)
        loads = [sum(costs[start:stop]) for start, stop in itertools.pairwise([*starts, len(costs)])]
        found = [10 * blocks for (blocks,) in stage_blocks(Chain((count,), (10,), head_cost), num_stages)]
        found[-1] += head_cost
        assert found == loads, (count, starts)


def test_runs_of_different_blocks_are_divided_by_the_balance_itself():
    found = stage_blocks(Chain((4, 4), (10, 30), 20), 4)
    assert [sum(run) for run in zip(*found, strict=True)] == [4, 4]
    loads = [10 * small + 30 * large for small, large in found]
    assert max([*loads[:-1], loads[-1] + 20]) == 60


def test_ranks_hold_embedding_head_and_microbatches_as_the_schedules_say():
    first, last = stages(Chain((8,), (10,), 5), 2, PipelinePolicy(), 8)
    assert (first.has_embedding, first.has_head, first.held) == (True, False, 2)
    assert (last.has_embedding, last.has_head, last.held) == (False, True, 1)
    first, last = stages(Chain((8,), (10,), 5), 2, PipelinePolicy("zb-v"), 8)
    assert first.has_embedding
    assert first.has_head
    assert not last.has_embedding
    assert not last.has_head
    (alone,) = stages(Chain((8,), (10,), 5), 1, None, 8)
    assert (alone.blocks, alone.held) == ((8,), 1)
