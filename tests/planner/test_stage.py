"""Stages as the planner divides them are those that pipelines divide."""

from __future__ import annotations

import itertools

import pytest

from shardwise.planner.stage import Chain, fullest_passes, stage_blocks, stages
from shardwise.spec.module_chain import balance
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
    assert (first.has_embedding, first.has_head) == (True, False)
    assert (last.has_embedding, last.has_head) == (False, True)
    first, last = stages(Chain((8,), (10,), 5), 2, PipelinePolicy("zb-v"), 8)
    assert first.has_embedding
    assert first.has_head
    assert not last.has_embedding
    assert not last.has_head
    (alone,) = stages(Chain((8,), (10,), 5), 1, None, 8)
    assert (alone.blocks, [at.num_stored for at in alone.passes]) == ((8,), [(1,)])


def held_at(schedule, rank, num_microbatches=8, pp=4):
    return [
        (at.kind, at.stage, at.num_stored, at.waiting, at.has_sums)
        for at in fullest_passes(schedule, pp, num_microbatches, PipelinePolicy(schedule).virtual_stages, rank)
    ]


def test_ranks_hold_most_microbatches_at_the_passes_that_the_schedules_say():
    assert held_at("1f1b", 1) == [("backward", 0, (3,), (0,), True)]
    # All forwards come first: with most activations there are no sums yet.
    many = 100
    assert held_at("gpipe", 3, many) == [
        ("backward", 0, (many,), (0,), False),
        ("backward", 0, (many - 1,), (0,), True),
    ]
    assert held_at("zb-h1", 2) == [
        ("backward_input", 0, (2,), (2,), True),
        ("backward_weight", 0, (1,), (3,), True),
    ]
    # The last stage computes the gradients of each loss at once; the first holds a group and one more.
    assert held_at("interleaved-1f1b", 3) == [
        ("backward", 1, (4, 1), (0, 0), True),
        ("backward", 0, (5, 0), (0, 0), True),
    ]
