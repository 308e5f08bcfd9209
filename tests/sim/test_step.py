"""A data-parallel step by hand, and that its collectives are those of ``step_trace`` whatever the durations are."""

from __future__ import annotations

import cProfile
import pstats
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.sim.step import StepUnit, Transfer, UnitSeconds, simulate_facts, simulate_step
from shardwise.sim.streams import Slowdown
from shardwise.spec.layout import GroupLayout, ParamSpec
from shardwise.spec.memory.footprint import Replicas
from shardwise.spec.placement import PRESETS
from shardwise.spec.traffic.data import step_trace
from shardwise.spec.unit_facts import GroupFacts, UnitFacts

ROOT = StepUnit("root", 1, 3, 2, 1, gather=(Transfer(1),), reduce=(Transfer(1),))


def block(gather, reduce, **more):
    return StepUnit("block", 4, 8, gather=(Transfer(gather),), reduce=(Transfer(reduce),), **more)


def intervals(timeline, stream):
    return [(span.begin_s, span.end_s, span.task.label) for span in timeline.streams.get(stream, [])]


def test_zero3_gathers_one_unit_ahead_and_keeps_the_root_and_the_last_block():
    (timeline, _), *_ = simulate_step([ROOT, block(3, 5), block(3, 5)], PRESETS["zero3"]).microbatches
    assert intervals(timeline, "gather") == [
        (0, 1, "root"),
        (1, 4, "block"),  # the prefetch, issued before the root's is waited for
        (4, 7, "block"),
        (17, 20, "block"),  # backward has entered the last block, which is still there
    ]
    assert intervals(timeline, "compute")[:4] == [(1, 2, "root"), (4, 8, "block"), (8, 12, "block"), (12, 14, "root")]
    # Backward: the root 14 to 17, the blocks 17 to 25 and 25 to 33, the root's embedding until 34.
    assert intervals(timeline, "reduce") == [(25, 30, "block"), (34, 39, "block"), (39, 40, "root")]
    assert timeline.end_s == 40
    assert timeline.exposed == {"gather": 1 + 2, "reduce": 6}


def test_ddp_gathers_nothing_and_hides_all_but_the_last_reductions():
    step = simulate_step([ROOT, block(3, 5), block(3, 5)], PRESETS["ddp"], optimizer_s=2)
    assert step.by_category == {"compute": 31, "reduce": 6, "optimizer": 2}
    assert step.seconds == 39


@pytest.mark.parametrize(
    ("preset", "accumulation", "gathers", "reductions"),
    [
        ("zero3", "sharded", 4 * 4, 4 * 3),
        ("zero3", "unsharded", 4 * 4, 3),
        ("zero2", "sharded", 3, 4 * 3),
        ("zero2", "unsharded", 3, 3),
        ("ddp", "sharded", 0, 4 * 3),
    ],
)
def test_microbatches_gather_and_reduce_as_they_are_accumulated(preset, accumulation, gathers, reductions):
    row = PRESETS[preset]
    step = simulate_step([ROOT, block(3, 5), block(3, 5)], row, num_microbatches=4, accumulation=accumulation)
    count = {"gather": 0, "reduce": 0}
    for timeline, times in step.microbatches:
        for stream in count:
            count[stream] += times * len(timeline.streams.get(stream, []))
    assert count == {"gather": gathers if row.shards_optimizer else 0, "reduce": reductions}
    assert sum(step.by_category.values()) == pytest.approx(step.seconds)


def test_sums_over_replicas_follow_when_the_next_unit_is_reduced_and_can_wait_for_the_last_microbatch():
    units = [ROOT, *[block(1, 2, replicate=(Transfer(3),))] * 3]
    every = simulate_step(units, PRESETS["hsdp"], num_microbatches=3)
    last = simulate_step(units, PRESETS["hsdp"], num_microbatches=3, accumulation="defer_replicate")
    for step, expected in ((every, 9), (last, 3)):
        found = sum(len(timeline.streams.get("replicate", [])) * count for timeline, count in step.microbatches)
        assert found == expected
    assert last.seconds < every.seconds


def test_exchanges_on_the_path_add_up_and_those_beside_computation_hide():
    tp, ring = Transfer(2, stream="tp"), Transfer(5, stream="cp", is_beside=True)
    plain = [ROOT, *[StepUnit("block", 4, 8)] * 3]
    step = simulate_step([ROOT, *[StepUnit("block", 4, 8, forward_exchanges=(tp, ring))] * 3], PRESETS["ddp"])
    assert step.by_category["tp"] == 3 * 2
    assert "cp" not in step.by_category  # beside 4 + 2
    assert step.seconds == simulate_step(plain, PRESETS["ddp"]).seconds + 6


def test_copies_from_and_to_the_host_are_before_gathers_and_after_reductions():
    step = simulate_step([ROOT, block(3, 5, up_s=2, down_s=4)], PRESETS["zero3"])
    (timeline, _), *_ = step.microbatches
    assert intervals(timeline, "up") == [(0, 2, "block")]
    assert intervals(timeline, "gather") == [(0, 1, "root"), (2, 5, "block")]
    (reduced, *_), *_ = [span for span in intervals(timeline, "reduce") if span[2] == "block"]
    assert intervals(timeline, "down") == [(reduced + 5, reduced + 9, "block")]


def test_a_host_that_launches_too_slowly_bounds_the_step():
    fast = [StepUnit("root", 0, 0), *[StepUnit("block", 1, 2, host_forward_s=0.5, host_backward_s=1)] * 4]
    slow = [StepUnit("root", 0, 0), *[StepUnit("block", 1, 2, host_forward_s=3, host_backward_s=3)] * 4]
    assert simulate_step(fast, PRESETS["ddp"]).seconds == 12
    step = simulate_step(slow, PRESETS["ddp"])
    assert step.seconds == 24
    assert step.by_category["host"] == 12


def test_updates_inside_backward_run_when_the_gradients_are_there():
    plain = simulate_step([ROOT, block(1, 1), block(1, 1)], PRESETS["zero3"])
    inside = simulate_step([ROOT, block(1, 1, update_s=3), block(1, 1, update_s=3)], PRESETS["zero3"])
    assert inside.by_category["compute"] == plain.by_category["compute"] + 6


def test_overlap_costs_what_the_slowdown_says():
    units = [ROOT, *[block(3, 3)] * 4]
    free = simulate_step(units, PRESETS["zero3"])
    shared = simulate_step(units, PRESETS["zero3"], slowdown=Slowdown(shared=1.0))
    sent = sum(timeline.busy["gather"] + timeline.busy["reduce"] for timeline, _ in free.microbatches)
    assert shared.seconds == pytest.approx(free.by_category["compute"] + sent)  # as if one after the other


# -- the contract: the same collectives, in the same order


def facts(preset, world, num_blocks, frozen, replicated):
    row = PRESETS[preset]
    numbers = range(num_blocks + 1)
    units = {}
    for unit in numbers:
        layout = GroupLayout.build([ParamSpec(f"p{unit}", (100 + unit,), "fp32", unit not in frozen)], world)
        reshards = row.shards_parameters and not row.keeps_gathered and unit > 0
        group = GroupFacts(unit, layout, row, int(unit > 0), reshards, unit not in frozen)
        units[unit] = UnitFacts(str(unit), frozenset({0, unit} if unit else numbers), [group])
    return units, Replicas(2, 0, is_deferred=replicated == "deferred") if replicated else None


@given(
    st.sampled_from(["ddp", "zero1", "zero2", "zero3", "shard_grad_op"]),
    st.integers(1, 6),
    st.sets(st.integers(0, 3)),
    st.sampled_from([("", True), ("yes", True), ("deferred", True), ("", False), ("deferred", False)]),
    st.booleans(),
)
def test_whatever_the_durations_are_the_collectives_are_those_of_the_trace(preset, num_blocks, frozen, sums, is_first):
    """By stream and unit: streams overlap, so what begins first of two streams depends on the durations."""
    random = Random(num_blocks)
    replicated, syncs = sums
    units, replicas = facts(preset, 2, num_blocks, frozen, replicated)
    how = {
        "rank": 1,
        "forward_order": list(units),
        "backward_order": [0, *range(num_blocks, 0, -1)],
        "is_synchronising": syncs,
        "is_first_of_window": is_first,
        "replicas": replicas,
    }
    timeline = simulate_facts(
        units,
        seconds=lambda _: random.random(),
        computation=lambda _: UnitSeconds(random.random(), random.random()),
        **how,
    )
    issued = [span.task.collective for span in timeline.spans if span.task.collective is not None]
    predicted = step_trace(units, **how)
    assert issued == predicted
    for stream, kinds in (("gather", {"all_gather"}), ("reduce", {"reduce_scatter"})):
        begun = [c for span, c in timeline.collectives if span.task.stream == stream]
        if preset != "ddp":
            assert begun == [c for c in predicted if c.kind in kinds]


def test_twice_the_units_take_twice_the_calls():
    first, second = _num_calls(100), _num_calls(200)
    assert second < 2.05 * first
    assert first < 150 * 100


def _num_calls(count):
    units = [ROOT, *[block(3, 5)] * count]
    profile = cProfile.Profile()
    assert profile.runcall(simulate_step, units, PRESETS["zero3"]).by_category
    return pstats.Stats(profile).total_calls


@pytest.mark.parametrize(("copy_s", "seconds"), [(0.0, 15.0), (1.0, 15.0), (2.0, 18.0)])
def test_activations_are_copied_beside_the_computation_or_hold_it_up(copy_s: float, seconds: float) -> None:
    """Five units of 1 s forward and 2 s backward, alone on a rank.

    Copies of 1 s are hidden. Those of 2 s end at 2, 4, 6, 8 and 10 s; the fourth unit waits for the second copy and the
    fifth for the third, so that forward ends at 7 s. The last unit's backward ends at 9 s, and the next one's begins at
    10 s, when what it needs is back: that copy could begin at 8 s. From then on each copy takes as long as a backward.
    """
    units = [StepUnit("root", 0.0, 0.0), *[StepUnit("block", 1.0, 2.0, away_s=copy_s)] * 5]
    assert simulate_step(units, PRESETS["ddp"]).seconds == seconds
