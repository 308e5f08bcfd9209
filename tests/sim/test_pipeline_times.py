"""A pipeline's step in seconds, beside the closed forms of bubbles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.sim.pipeline import StageSeconds, simulate_pipeline, stage_seconds
from shardwise.sim.step import StepUnit, Transfer
from shardwise.spec.placement import PRESETS
from shardwise.spec.schedule.closed import bubble
from shardwise.spec.schedule.simulate import Durations

EVEN = StageSeconds(0.010, 0.010, 0.010)


@pytest.mark.parametrize(
    ("schedule", "pp", "m", "v"),
    [("gpipe", 4, 8, 1), ("1f1b", 4, 8, 1), ("interleaved-1f1b", 4, 8, 2), ("zb-h1", 4, 8, 1), ("zb-v", 4, 8, 2)],
)
def test_equal_stages_have_the_bubble_of_the_closed_form(schedule, pp, m, v):
    step = replace(simulate_pipeline(schedule, pp, m, [EVEN] * pp * v, num_virtual_stages=v), optimizer_s=0.5)
    ideal = m * v * 0.030
    expected = bubble(schedule, pp, m, v, Durations())
    assert step.seconds == pytest.approx(ideal * (1 + float(expected)) + 0.5)
    assert step.by_category == pytest.approx({"compute": ideal, "pp bubble": step.bubble_s, "optimizer": 0.5})


def test_a_slower_stage_sets_the_pace():
    """It waits 10 ms for the first forward, 10 ms for the first gradient, and rank 0 takes 20 ms after it."""
    slow = StageSeconds(0.020, 0.020, 0.020)
    step = simulate_pipeline("1f1b", 3, 12, [EVEN, slow, EVEN])
    assert step.fullest_rank == 1
    assert step.seconds == pytest.approx(0.010 + 0.010 + 12 * 0.060 + 0.020)
    assert step.by_category["compute"] == pytest.approx(12 * 0.060)


def test_messages_take_time_that_grows_the_bubble():
    late = StageSeconds(0.010, 0.010, 0.010, message_s=0.005)
    step = simulate_pipeline("gpipe", 4, 8, [late] * 4)
    expected = bubble("gpipe", 4, 8, 1, Durations(0.010, 0.010, 0.010, 0.005))
    assert step.seconds == pytest.approx(8 * 0.030 * (1 + float(expected)))


def test_a_stage_is_gathered_from_the_beginning_on_and_reduced_in_its_last_backward():
    block = StepUnit(
        "block", 4, 8, gather=(Transfer(6),), reduce=(Transfer(3),), forward_exchanges=(Transfer(1, stream="tp"),)
    )
    stage = replace(stage_seconds([block, block], PRESETS["zero3"]), message_s=0.5)
    assert (stage.forward_s, stage.backward_input_s, stage.backward_weight_s) == (10, 8, 8)
    # The first gather, and what the second lasts longer than a block's forward.
    assert (stage.gather_s, stage.first_wait_s) == (12, 6 + 1)
    assert (stage.last_backward_s, stage.tail_s) == (0, 3)
    assert stage.exposed == {"tp": 2}
    assert stage.exposed_once == {"reduce": 3}
    step = simulate_pipeline("1f1b", 2, 4, [stage] * 2)
    plain = simulate_pipeline("1f1b", 2, 4, [StageSeconds(10, 8, 8, 0.5)] * 2)
    assert step.seconds == plain.seconds + 7 + 3  # the second stage's are there before its first activation is
    assert sum(step.by_category.values()) == pytest.approx(step.seconds)
    assert step.by_category["tp"] == 2 * 4
    assert step.by_category["gather"] == 7


def test_a_rank_gathers_one_stage_after_another_and_only_what_is_late_is_waited_for():
    """Stages 0 and 2 are rank 0's. At 6 + 3 stage 0 begins, at 9 + 10 + 10 stage 2 could; its gathers end at 60."""
    stages = [StageSeconds(10, 10, 10, gather_s=each, first_wait_s=each and 9) for each in (51, 0, 40, 0)]
    step = simulate_pipeline("interleaved-1f1b", 2, 2, stages, num_virtual_stages=2)
    plain = simulate_pipeline("interleaved-1f1b", 2, 2, [StageSeconds(10, 10, 10)] * 4, num_virtual_stages=2)
    of_stage = {span.action.stage: span.start for span in reversed(step.timing.spans[0])}
    assert {stage: start * step.timing.unit for stage, start in of_stage.items()} == {0: 9, 2: 51 + 9}
    assert step.fullest_rank == 0
    assert step.by_category["gather"] == pytest.approx(9 + (60 - 29))
    assert step.seconds == pytest.approx(plain.seconds + 60 - 20)


def test_what_zero2_has_gathered_is_not_gathered_under_ddp():
    block = StepUnit("block", 4, 8, gather=(Transfer(6),), reduce=(Transfer(3),))
    assert stage_seconds([block], PRESETS["zero2"]).first_wait_s == 6
    assert stage_seconds([block], PRESETS["ddp"]).first_wait_s == 0
