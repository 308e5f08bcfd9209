"""Streams by hand: when tasks begin, what computation waits for, and what overlap costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.sim.streams import Slowdown, Task, run


def times(timeline):
    return [(span.begin_s, span.end_s) for span in timeline.spans]


def test_streams_run_side_by_side_and_wait_for_what_a_task_names():
    timeline = run(
        [
            Task("compute", 3.0, label="a"),
            Task("gather", 5.0, category="gather"),
            Task("gather", 1.0, category="gather"),
            Task("compute", 3.0, after=(0, 1)),
            Task("compute", 1.0, after=(2,)),
        ]
    )
    assert times(timeline) == [(0, 3), (0, 5), (5, 6), (5, 8), (8, 9)]
    assert timeline.end_s == 9
    assert timeline.busy == {"compute": 7, "gather": 6}
    assert timeline.exposed == {"gather": 2}


def test_a_wait_is_split_over_the_chain_of_tasks_that_led_to_it():
    """The gather could only begin when the copy was done, and the copy when the first computation was."""
    timeline = run(
        [
            Task("compute", 1.0),
            Task("up", 2.0, after=(0,), category="offload"),
            Task("gather", 3.0, after=(1,), category="gather"),
            Task("compute", 1.0, after=(2,)),
            Task("reduce", 4.0, after=(3,), category="reduce"),
        ]
    )
    assert timeline.exposed == {"offload": 2, "gather": 3, "reduce": 4}
    assert timeline.end_s == 11


def test_both_are_slower_while_they_overlap_and_only_then():
    """Two seconds of communication take three; computation has done 3 / 1.2 of its four by then."""
    timeline = run([Task("compute", 4.0), Task("gather", 2.0), Task("host", 9.0)], Slowdown(1.2, 1.5))
    assert [end for _, end in times(timeline)] == pytest.approx([3 + (4 - 3 / 1.2), 3, 9])


def test_what_shares_one_core_takes_as_long_as_one_after_the_other():
    timeline = run([Task("compute", 4.0), Task("gather", 3.0), Task("reduce", 1.0)], Slowdown(shared=1.0))
    assert [end for _, end in times(timeline)] == pytest.approx([8, 7, 3])


def test_transfers_at_the_same_time_divide_the_link():
    tasks = [Task("gather", 2.0), Task("reduce", 2.0)]
    assert run(tasks).end_s == 2
    assert run(tasks, Slowdown(divides_link=frozenset({"gather", "reduce"}))).end_s == pytest.approx(4)
    assert run(tasks, Slowdown(divides_link=frozenset({"gather"}))).end_s == 2


@st.composite
def programs(draw):
    tasks: list[Task] = []
    for place in range(draw(st.integers(1, 25))):
        after = draw(st.sets(st.integers(0, place - 1), max_size=3)) if place else set()
        stream = draw(st.sampled_from(["compute", "gather", "reduce", "host"]))
        tasks.append(Task(stream, draw(st.integers(0, 5)), tuple(after), category=stream))
    return tasks


@given(programs())
def test_computation_and_what_is_exposed_add_up_to_the_end(tasks):
    for slowdown in (Slowdown(), Slowdown(1.5, 1.25)):
        timeline = run(tasks, slowdown)
        total = timeline.busy.get("compute", 0.0) + sum(timeline.exposed.values())
        assert total == pytest.approx(timeline.end_s)
        for span in timeline.spans:
            assert all(timeline.spans[place].end_s <= span.begin_s + 1e-9 for place in span.task.after)


@given(programs())
def test_without_a_slowdown_both_ways_of_running_agree(tasks):
    """A factor that is all but 1 takes the way event by event."""
    slow = times(run(tasks, Slowdown(1.0 + 1e-12, 1.0)))
    for (begin, end), (begin_2, end_2) in zip(times(run(tasks)), slow, strict=True):
        assert begin == pytest.approx(begin_2, abs=1e-6)
        assert end == pytest.approx(end_2, abs=1e-6)
