"""Pipeline schedules: what is computed and sent where, whether it ends, how long it takes, and what a plan may ask."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.spec.errors import PlanError
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.schedule import (
    SCHEDULES,
    Action,
    Kind,
    PipelinePolicy,
    Schedule,
    build,
    check,
    closed,
    forward_only,
)
from shardwise.spec.schedule.closed import StoredPairs, stored_pairs
from shardwise.spec.schedule.closed import measured as step_measured
from shardwise.spec.schedule.simulate import Durations, simulate
from tests.common.pipelines import peak_stored_pairs

times = st.fractions(min_value=Fraction(1, 4), max_value=4, max_denominator=4)
durations = st.builds(Durations, times, times, times)


@st.composite
def schedules(draw, names=SCHEDULES):
    name, pp, v = draw(st.sampled_from(names)), draw(st.integers(1, 6)), None
    m = draw(st.integers(1, 13))
    if name == "interleaved-1f1b":
        m, v = pp * draw(st.integers(1, 3)), draw(st.integers(2, 4))
    return build(name, pp, m, v)


def closed_forms(schedule: Schedule, times: Durations) -> tuple[Fraction | None, Fraction | None]:
    numbers = (schedule.name, schedule.num_ranks, schedule.num_microbatches, schedule.num_virtual_stages)
    return closed.bubble(*numbers, times), closed.inner_bubble(*numbers, times)


def measured(schedule: Schedule, times: Durations) -> tuple[Fraction, Fraction]:
    timing = simulate(schedule, times)
    return timing.bubble, timing.inner_bubble


# -- what is done


@settings(deadline=None)
@given(schedules())
def test_every_schedule_is_complete_in_order_and_ends_with_blocking_sends(schedule):
    check(schedule)


@settings(deadline=None)
@given(schedules(), durations, times)
def test_every_schedule_ends_whatever_the_durations(schedule, durations, communication):
    slow = dataclasses.replace(durations, communication=communication)
    assert simulate(schedule, slow).makespan >= simulate(schedule, durations).makespan


def test_the_order_of_1f1b_is_the_one_of_the_paper():
    orders = [" ".join(f"{a.kind[0]}{a.microbatch}" for a in build("1f1b", 3, 4).computations(r)) for r in range(3)]
    assert orders == ["f0 f1 f2 b0 f3 b1 b2 b3", "f0 f1 b0 f2 b1 f3 b2 b3", "f0 b0 f1 b1 f2 b2 f3 b3"]


def test_the_stages_of_a_rank():
    looped, folded = build("interleaved-1f1b", 2, 4, 3), build("zb-v", 3, 4)
    assert [looped.stages(rank) for rank in range(2)] == [(0, 2, 4), (1, 3, 5)]
    assert [folded.stages(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert not any(a.kind is Kind.SEND_ACTIVATION for a in folded.actions[2] if a.stage == 2)  # stage 3 is here too
    assert (looped.num_virtual_stages, folded.num_stages, folded.is_split, looped.is_split) == (3, 6, True, False)


# -- how long it takes


@settings(deadline=None)
@given(schedules(["gpipe", "1f1b", "interleaved-1f1b"]), durations)
def test_the_bubble_is_the_closed_form_whatever_the_durations(schedule, durations):
    assert measured(schedule, durations) == closed_forms(schedule, durations)
    share = schedule.num_microbatches * schedule.num_virtual_stages
    assert simulate(schedule, durations).bubble == Fraction(schedule.num_ranks - 1, share)


@settings(deadline=None)
@given(schedules(["zb-h1"]), durations)
def test_the_bubble_of_zb_h1_is_the_closed_form_whatever_the_durations(schedule, durations):
    timing = simulate(schedule, durations)
    bubble, inner = closed_forms(schedule, durations)
    assert timing.bubble == bubble
    assert inner in {None, timing.inner_bubble}
    forward, backward_input, weight = durations.forward, durations.backward_input, durations.backward_weight
    if weight <= min(forward, backward_input):
        assert inner is not None
        if schedule.num_microbatches >= schedule.num_ranks:
            assert timing.makespan - timing.ideal == (schedule.num_ranks - 1) * (forward + backward_input - weight)


@settings(deadline=None)
@given(schedules(["gpipe"]), durations, times)
def test_the_bubble_of_gpipe_is_known_with_communication_too(schedule, durations, communication):
    slow = dataclasses.replace(durations, communication=communication)
    assert measured(schedule, slow) == closed_forms(schedule, slow)


@settings(deadline=None)
@given(schedules(["zb-v"]), times, times)
def test_zb_v_has_no_bubble_with_equal_times_and_microbatches_enough(schedule, time, other):
    pp, m = schedule.num_ranks, schedule.num_microbatches
    equal = Durations(time, time, time)
    timing = simulate(schedule, equal)
    assert (timing.bubble, timing.inner_bubble) == closed_forms(schedule, equal)
    assert (timing.inner_bubble == 0) == (m >= 2 * pp - 1)
    if m >= 2 * pp - 1:  # the last rank cannot begin sooner
        assert timing.makespan - timing.ideal == (pp - 1) * time
    if time != other:
        assert closed_forms(schedule, Durations(time, other, time)) == (None, None)


def test_bubbles_in_numbers():
    assert {name: measured(build(name, 4, 8), Durations()) for name in SCHEDULES} == {
        "gpipe": (Fraction(3, 8), Fraction(3, 8)),
        "1f1b": (Fraction(3, 8), Fraction(3, 8)),
        "interleaved-1f1b": (Fraction(3, 16), Fraction(3, 16)),
        "zb-h1": (Fraction(3, 24), Fraction(3, 24)),
        "zb-v": (Fraction(3, 48), 0),
    }


@given(schedules(["1f1b"]))
@settings(deadline=None)
def test_a_longer_way_between_ranks_makes_1f1b_slower_and_has_no_closed_form(schedule):
    slow = Durations(communication=1)
    assert closed_forms(schedule, slow) == (None, None)
    is_slower = simulate(schedule, slow).makespan > simulate(schedule, Durations()).makespan
    assert is_slower == (schedule.num_ranks > 1)


def test_durations_are_positive():
    for wrong in (0, -1, "x", float("nan"), float("inf"), None):
        with pytest.raises(PlanError, match=r"duration forward=.*expected a number above 0"):
            Durations(forward=wrong)
    with pytest.raises(PlanError, match="duration communication=-1: expected a number at least 0"):
        Durations(communication=-1)


# -- what is held


@settings(deadline=None)
@given(schedules())
def test_the_microbatches_that_a_rank_holds_are_the_closed_form(schedule):
    for rank, actions in enumerate(schedule.actions):
        pp, m, v = schedule.num_ranks, schedule.num_microbatches, schedule.num_virtual_stages
        assert stored_pairs(actions) == peak_stored_pairs(schedule.name, pp, m, v, rank)
        assert max(stored_pairs(actions, stage).in_flight for stage in schedule.stages(rank)) <= m


def test_a_stage_holds_what_is_between_its_own_forward_and_backward():
    actions = build("zb-v", 3, 6).actions[0]
    assert [stored_pairs(actions, stage) for stage in (0, 5)] == [StoredPairs(6, 6), StoredPairs(1, 1)]
    actions = build("zb-h1", 3, 6).actions[2]
    assert stored_pairs(actions, 2) == stored_pairs(actions) == StoredPairs(activations=1, in_flight=3)


# -- what is broken is found


def changed(schedule: Schedule, rank: int, order: list[Action]) -> Schedule:
    actions = [*schedule.actions]
    actions[rank] = tuple(order)
    return dataclasses.replace(schedule, actions=tuple(actions))


def test_the_smallest_split_schedule_that_lacks_a_half_of_its_backward_is_refused_for_the_half():
    whole = build("zb-h1", 1, 1)
    for place, half in ((1, "input"), (2, "weight")):
        order = [*whole.actions[0]]
        del order[place]
        with pytest.raises(
            PlanError, match=f"backward {half} of stage 0, microbatch 0 is on rank 0 0 times, expected 1"
        ):
            check(changed(whole, 0, order))


@settings(deadline=None)
@given(schedules(), st.data())
def test_a_schedule_that_lacks_or_repeats_an_action_is_refused(schedule, data):
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    order = list(schedule.actions[rank])
    place = data.draw(st.integers(0, len(order) - 1))
    with pytest.raises(PlanError, match=f"is on rank {rank} 0 times, expected 1"):
        check(changed(schedule, rank, order[:place] + order[place + 1 :]))
    with pytest.raises(PlanError, match=f"is on rank {rank} 2 times, expected 1"):
        check(changed(schedule, rank, [*order[: place + 1], order[place], *order[place + 1 :]]))


@settings(deadline=None)
@given(schedules(), st.data())
def test_two_microbatches_of_a_kind_that_change_places_are_refused(schedule, data):
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    order = list(schedule.actions[rank])
    first = data.draw(st.integers(0, len(order) - 1))
    alike = [i for i, a in enumerate(order) if (a.kind, a.stage) == (order[first].kind, order[first].stage)]
    other = data.draw(st.sampled_from(alike))
    order[first], order[other] = order[other], order[first]
    if other == first:
        check(changed(schedule, rank, order))
        return
    with pytest.raises(PlanError, match="is out of turn"):
        check(changed(schedule, rank, order))


@settings(deadline=None)
@given(schedules(), st.data())
def test_what_comes_before_what_it_needs_is_refused(schedule, data):
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    order = list(schedule.actions[rank])
    backward = next(i for i, a in enumerate(order) if a.kind.gives_input_gradient)
    forward = order.index(Action(Kind.FORWARD, order[backward].stage, 0))
    order.insert(forward, order.pop(backward))
    with pytest.raises(PlanError, match=r"comes before the .* that it needs"):
        check(changed(schedule, rank, order))


def test_1f1b_that_sends_at_once_and_receives_at_the_last_moment_is_found_to_deadlock():
    """The order that first comes to mind: two ranks both wait to send, one an activation, the other a gradient."""
    good = build("1f1b", 3, 6)
    actions = []
    for rank in range(3):
        order = []
        for action in good.computations(rank):
            j, is_forward = action.microbatch, action.kind is Kind.FORWARD
            source, target = (rank - 1, rank + 1) if is_forward else (rank + 1, rank - 1)
            if 0 <= source < 3:
                order.append(Action(Kind.RECEIVE_ACTIVATION if is_forward else Kind.RECEIVE_GRADIENT, rank, j, source))
            order.append(action)
            if 0 <= target < 3:
                order.append(Action(Kind.SEND_ACTIVATION if is_forward else Kind.SEND_GRADIENT, rank, j, target))
        actions.append(tuple(order))
    naive = dataclasses.replace(good, actions=tuple(actions))
    assert simulate(naive, Durations()) == simulate(good, Durations())  # buffered, it is the same
    with pytest.raises(PlanError, match=r"does not end with blocking sends.*\n.*rank 0 at send activation of stage 0"):
        check(naive)


def test_stages_without_a_rank_are_refused():
    with pytest.raises(PlanError, match=r"its stages are on ranks \[0, 2\], but it has lists for 2 ranks"):
        check(dataclasses.replace(build("gpipe", 2, 2), ranks=(0, 2)))


# -- what a plan may ask


def test_policies_say_what_a_schedule_needs():
    assert PipelinePolicy().build(3) == build("1f1b", 3, 3)
    assert PipelinePolicy("gpipe", 5).build(2) == build("gpipe", 2, 5)
    assert PipelinePolicy("interleaved-1f1b").build(2) == build("interleaved-1f1b", 2, 2, 2)
    assert PipelinePolicy("zb-v", num_virtual_stages=2).virtual_stages == 2
    with pytest.raises(PlanError, match=r"schedule='2f2b': there is no such pipeline schedule.\n  Use one of gpipe"):
        PipelinePolicy("2f2b")
    for wrong in (0, -1, True, 1.0, "4"):
        with pytest.raises(PlanError, match=r"num_microbatches=.*: expected a whole number of at least 1"):
            PipelinePolicy(num_microbatches=wrong)
    with pytest.raises(PlanError, match=r"pp=0: expected a whole number of at least 1"):
        build("gpipe", 0, 1)
    with pytest.raises(PlanError, match=r"has one stage per rank, but num_virtual_stages=2"):
        PipelinePolicy("1f1b", num_virtual_stages=2)
    with pytest.raises(PlanError, match=r"has two stages per rank, but num_virtual_stages=3"):
        PipelinePolicy("zb-v", num_virtual_stages=3)
    with pytest.raises(PlanError, match=r"interleaves the stages of a rank, but num_virtual_stages=1"):
        PipelinePolicy("interleaved-1f1b", num_virtual_stages=1)
    message = r"num_microbatches=10 = 2 x 4 \+ 2.\n  Set num_microbatches=8 or 12"
    with pytest.raises(PlanError, match=message):
        PipelinePolicy("interleaved-1f1b", 10).check(4)
    with pytest.raises(PlanError, match=r"num_microbatches=3 = 0 x 4 \+ 3.\n  Set num_microbatches=4,"):
        build("interleaved-1f1b", 4, 3)


def test_a_plan_takes_a_pipeline_with_pp_only():
    with pytest.raises(PlanError, match=r"pipeline='gpipe' with pp=1: one rank has no pipeline"):
        ParallelPlan(pipeline="gpipe")
    assert ParallelPlan().pipeline_policy is None
    assert ParallelPlan(pp=2).pipeline_policy == PipelinePolicy()
    assert ParallelPlan(pp=2, pipeline="gpipe").pipeline_policy == PipelinePolicy("gpipe")
    assert ParallelPlan(pp=2, pipeline={"num_microbatches": 8}).pipeline_policy == PipelinePolicy(num_microbatches=8)
    with pytest.raises(PlanError, match=r"pipeline has no field steps"):
        ParallelPlan(pp=2, pipeline={"steps": 8})
    with pytest.raises(PlanError, match=r"pipeline=3: expected the name of a schedule"):
        ParallelPlan(pp=2, pipeline=3)
    with pytest.raises(PlanError, match=r"takes microbatches in groups of pp=2, but num_microbatches=3"):
        ParallelPlan(pp=2, pipeline=PipelinePolicy("interleaved-1f1b", 3))


def test_a_measured_step_tells_its_bubble_beside_the_closed_form_and_draws_itself():
    schedule = build("1f1b", 2, 2)
    # Rank 0: F0 F1 . B0 . B1; rank 1: . F0 B0 F1 B1, a backward as long as two forwards, 10 us each.
    first = [(0, 10), (10, 20), (40, 60), (70, 90)]
    second = [(10, 20), (20, 40), (40, 50), (50, 70)]
    found = step_measured(schedule, [first, second])
    assert found.bubble == pytest.approx((90 - 60) / 60)
    assert found.closed_bubble == found.undelayed_bubble == pytest.approx(1 / 2)
    late = [(start + 5, end + 5) for start, end in second]
    delayed = step_measured(schedule, [[(0, 10), (10, 20), (45, 65), (75, 105)], late])  # and the last one took longer
    assert (delayed.bubble, delayed.undelayed_bubble) == (pytest.approx(35 / 70), pytest.approx(30 / 70))
    assert found.durations == Durations(Fraction(1, 100_000), Fraction(1, 100_000), Fraction(1, 100_000))
    rows = str(found).splitlines()
    assert rows[0].startswith("rank 0 F0-")
    assert rows[1].startswith("rank 1 . ")
    assert rows[2] == (
        "time 0.1 ms, of which a rank computes 0.1 ms at most: bubble 33.3% of the step, 50.0% of ideal time"
        " (closed form 50.0%)"
    )
    assert step_measured(forward_only((0, 1), 1), [[(0, 1)], [(1, 2)]]).closed_bubble is None
    with pytest.raises(ValueError, match="zip"):
        step_measured(schedule, [first, second[:-1]])
