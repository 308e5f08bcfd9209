"""The predicted collectives of a step, against sequences by hand. ``test_*_trace.py`` hold them against the engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.granularity import ELEMENT, TENSOR, block
from shardwise.spec.layout import GroupLayout, ParamSpec
from shardwise.spec.placement import PRESETS
from shardwise.spec.schedule import Kind
from shardwise.spec.schedule import build as build_schedule
from shardwise.spec.traffic.data import gather_bytes, reduction_bytes, step_trace, window_order, window_trace
from shardwise.spec.unit_facts import GroupFacts, UnitFacts

NUMEL = 6 * 64  # even at 1, 2, 3 and 6 ranks


def shape(preset, world, *, unit=0, numel=NUMEL, is_trainable=True, reshards=None, dtype="fp32", granularity=ELEMENT):
    row = PRESETS[preset]
    layout = GroupLayout.build([ParamSpec(f"p{unit}", (numel,), dtype, is_trainable)], world, granularity=granularity)
    reshards = row.shards_parameters and not row.keeps_gathered and unit > 0 if reshards is None else reshards
    return GroupFacts(unit, layout, row, int(unit > 0), reshards, is_trainable)


def trace(preset, *, num_blocks=4, rank=0, world=2, frozen=(), **how):
    """Kinds (g gather, s reduce-scatter, a all-reduce) and units of a step of a root and a chain of blocks."""
    numbers = range(num_blocks + 1)
    units = {
        unit: UnitFacts(
            str(unit),
            frozenset({0, unit} if unit else numbers),
            [shape(preset, world, unit=unit, is_trainable=unit not in frozen)],
        )
        for unit in numbers
    }
    found = step_trace(units, rank=rank, forward_order=list(numbers), backward_order=[0, *reversed(numbers[1:])], **how)
    letters = {"all_gather": "g", "reduce_scatter": "s", "all_reduce": "a"}
    return " ".join(letters[event.kind] + event.unit for event in found)


def test_ddp_reduces_at_the_boundaries():
    assert trace("ddp") == "a4 a3 a2 a1 a0"


@pytest.mark.parametrize("preset", ["zero1", "zero2", "shard_grad_op"])
def test_what_stays_gathered_is_gathered_once(preset):
    assert trace(preset) == "g0 g1 g2 g3 g4 s4 s3 s2 s1 s0"


def test_zero3_gathers_again_one_ahead_of_backward_and_keeps_root_and_last_block():
    assert trace("zero3") == "g0 g1 g2 g3 g4 g3 s4 g2 s3 g1 s2 s1 s0"


def test_frozen_units_are_gathered_and_not_reduced():
    assert trace("zero3", frozen=(1, 2)) == "g0 g1 g2 g3 g4 g3 s4 g2 s3 g1 s0"


def test_without_synchronisation_no_gradient_moves():
    assert trace("ddp", is_synchronising=False) == ""
    assert trace("zero1", is_synchronising=False) == "g0 g1 g2 g3 g4"
    assert trace("zero1", is_synchronising=False, is_first_of_window=False) == ""
    assert trace("zero1", is_first_of_window=False) == "s4 s3 s2 s1 s0"
    assert trace("zero3", is_synchronising=False, is_first_of_window=False) == "g0 g1 g2 g3 g4 g3 g2 g1"


def test_a_unit_that_runs_twice_is_gathered_twice_and_reduced_once():
    families = (frozenset({0, 1, 2}), frozenset({0, 1}), frozenset({0, 2}))
    units = {unit: UnitFacts(str(unit), families[unit], [shape("zero3", 2, unit=unit)]) for unit in range(3)}
    found = step_trace(units, rank=0, forward_order=[0, 1, 2, 1, 2], backward_order=[0, 2, 1, 2, 1])
    letters = " ".join(event.kind[0] + event.unit for event in found)
    assert letters.count("r1") == letters.count("r2") == letters.count("r0") == 1
    assert letters.startswith("a0 a1 a2 a1 a2")
    assert letters.endswith("r0")


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_even_shapes_send_the_share_of_the_peers(world):
    scattered = shape("zero3", world)
    assert gather_bytes(scattered, 0) == (world - 1) * NUMEL // world * 4
    assert reduction_bytes(scattered, 0) == (world - 1) * (NUMEL // world + 64) * 4
    assert reduction_bytes(shape("ddp", world), 0) == 2 * (world - 1) * (NUMEL // world + 64) * 4


@given(
    st.sampled_from(["ddp", "zero1", "zero2", "zero3"]),
    st.integers(1, 64),
    st.integers(0, 5000),
    st.sampled_from(["fp64", "fp32", "bf16"]),
    st.sampled_from([ELEMENT, TENSOR, block(100)]),
)
def test_what_all_ranks_send_is_what_all_ranks_must_receive(preset, world, numel, dtype, granularity):
    group = shape(preset, world, numel=numel, dtype=dtype, granularity=granularity)
    sent = sum(reduction_bytes(group, rank) for rank in range(world))
    times = 1 if group.placements.shards_optimizer else 2
    assert sent == times * (world - 1) * group.reduce_layout.numel * group.item_bytes
    gathered = sum(gather_bytes(group, rank) for rank in range(world))
    assert gathered == (world - 1) * group.layout.numel * group.item_bytes


@given(st.sampled_from(["ddp", "zero1", "zero2", "shard_grad_op", "zero3"]), st.integers(1, 12), st.integers(1, 5))
def test_every_trained_unit_is_reduced_exactly_once_and_the_root_last(preset, num_blocks, world):
    found = trace(preset, num_blocks=num_blocks, world=world).split()
    reductions = [event for event in found if event[0] in "sa"]
    assert sorted(event[1:] for event in reductions) == sorted(str(unit) for unit in range(num_blocks + 1))
    assert reductions[-1].endswith("0")
    assert found[-1] == reductions[-1]


def test_in_a_pipeline_units_of_one_stage_are_reduced_first_those_of_later_stages_before():
    assert window_order(range(5)) == [4, 3, 2, 1, 0]
    assert window_order(range(7), {0: [1, 2], 3: [4, 5]}) == [5, 4, 2, 1, 6, 3, 0]
    units = {unit: UnitFacts(str(unit), frozenset({0, unit}), [shape("ddp", 2, unit=unit)]) for unit in range(4)}
    found = window_trace(units, rank=0, stages={1: [2], 2: [1]})
    assert [event.unit for event in found] == ["1", "2", "3", "0"]
    assert [event.unit for event in window_trace(units, rank=0)] == ["3", "2", "1", "0"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_last_backwards_of_later_stages_come_first(schedule, pp):
    """What ``window_order`` counts on; and each stage's is that of the last microbatch."""
    virtual = 2 if schedule in {"interleaved-1f1b", "zb-v"} else 1
    for count in (pp, 2 * pp, 12):
        built = build_schedule(schedule, pp, count, virtual)
        kind = Kind.BACKWARD_WEIGHT if built.is_split else Kind.BACKWARD
        for actions in built.actions:
            last = {action.stage: place for place, action in enumerate(actions) if action.kind is kind}
            assert all(actions[place].microbatch == count - 1 for place in last.values())
            assert sorted(last, key=last.__getitem__) == sorted(last, reverse=True)
