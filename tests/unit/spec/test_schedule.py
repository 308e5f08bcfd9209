"""Pipeline schedules: what is computed and sent where, whether it ends, how long it takes, and what a plan may ask."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec import plan as plan_module
from shardwise.spec.errors import PlanError
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.schedule import PipelinePolicy, build
from shardwise.spec.schedule.simulate import Durations, simulate

times = st.fractions(min_value=Fraction(1, 4), max_value=4, max_denominator=4)
durations = st.builds(Durations, times, times, times)


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 9), durations)
def test_the_bubble_of_gpipe_and_1f1b_is_p_minus_1_over_m_whatever_the_durations(name, pp, m, durations):
    assert simulate(build(name, pp, m), durations).bubble == Fraction(pp - 1, m)


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 9))
def test_every_schedule_ends_with_blocking_sends(name, pp, m):
    simulate(build(name, pp, m), Durations(), is_blocking=True)


def test_policies_come_from_words_and_mappings():
    assert PipelinePolicy().build(3) == build("1f1b", 3, 3)
    assert PipelinePolicy("gpipe", 5).build(2) == build("gpipe", 2, 5)
    with pytest.raises(PlanError, match=r"schedule='2f2b': there is no such pipeline schedule"):
        PipelinePolicy("2f2b")
    with pytest.raises(PlanError, match=r"num_microbatches=0: expected a whole number of at least 1"):
        PipelinePolicy(num_microbatches=0)
    with pytest.raises(PlanError, match=r"has one stage per rank, but num_virtual_stages=2"):
        PipelinePolicy("1f1b", num_virtual_stages=2)


def test_a_plan_takes_a_pipeline_with_pp_only(monkeypatch):
    with pytest.raises(PlanError, match=r"pipeline='gpipe' with pp=1: one rank has no pipeline"):
        ParallelPlan(pipeline="gpipe")
    assert ParallelPlan().pipeline_policy is None
    monkeypatch.delitem(plan_module._LATER_AXES, "pp", raising=False)
    assert ParallelPlan(pp=2).pipeline_policy == PipelinePolicy()
    assert ParallelPlan(pp=2, pipeline="gpipe").pipeline_policy == PipelinePolicy("gpipe")
    assert ParallelPlan(pp=2, pipeline={"num_microbatches": 8}).pipeline_policy == PipelinePolicy(num_microbatches=8)
    with pytest.raises(PlanError, match=r"pipeline has no field steps"):
        ParallelPlan(pp=2, pipeline={"steps": 8})
    with pytest.raises(PlanError, match=r"pipeline=3: expected the name of a schedule"):
        ParallelPlan(pp=2, pipeline=3)
