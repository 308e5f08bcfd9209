"""The messages of a pipeline's step."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.spec.schedule import SCHEDULES, build
from tests.parallel.pipeline.messages import CrossingBytes, messages


@st.composite
def cases(draw):
    name, pp = draw(st.sampled_from(SCHEDULES)), draw(st.integers(1, 5))
    is_interleaved = name == "interleaved-1f1b"
    m = pp * draw(st.integers(1, 2)) if is_interleaved else draw(st.integers(1, 7))
    return build(name, pp, m, draw(st.integers(2, 3)) if is_interleaved else None)


@settings(deadline=None)
@given(cases())
def test_messages_between_two_ranks_are_received_in_the_order_in_which_they_are_sent(schedule):
    sent, received = [], []
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind.is_send:
                way = 1 if action.kind == "send_activation" else -1
                sent.append((rank, action.peer, action.stage, action.microbatch, way))
            elif action.kind.is_receive:
                way = 1 if action.kind == "receive_activation" else -1
                received.append((action.peer, rank, action.stage - way, action.microbatch, way))
    for pair in {message[:2] for message in sent + received}:
        assert [m for m in sent if m[:2] == pair] == [m for m in received if m[:2] == pair]


@settings(deadline=None)
@given(cases())
def test_receives_are_posted_one_computation_early(schedule):
    for rank, actions in enumerate(schedule.actions):
        issued = schedule.issued(rank)
        assert schedule.issued(rank, is_early=False) == actions
        assert [a for a in issued if not a.kind.is_receive] == [a for a in actions if not a.kind.is_receive]
        assert [a for a in issued if a.kind.is_receive] == [a for a in actions if a.kind.is_receive]
        for receive in (action for action in actions if action.kind.is_receive):
            in_place, early = (
                sum(not before.kind.is_message for before in order[: order.index(receive)])
                for order in (actions, issued)
            )
            assert early == max(in_place - 1, 0)


def test_the_messages_of_a_step_in_order():
    crossings = [[CrossingBytes(10), CrossingBytes(3, has_gradient=False)], [CrossingBytes(20)]]
    trace = messages(build("1f1b", 3, 2), 1, crossings)
    assert [(m.kind, m.unit, m.sent_bytes, m.axis) for m in trace[:4]] == [
        ("receive", "activation of stage 0", 0, "pp"),
        ("receive", "activation of stage 0", 0, "pp"),
        ("receive", "activation of stage 0", 0, "pp"),
        ("receive", "activation of stage 0", 0, "pp"),
    ]
    assert Counter(trace) == {
        ("receive", "activation of stage 0", 0, "pp"): 4,
        ("send", "activation of stage 1", 20, "pp"): 2,
        ("receive", "gradient of stage 1", 0, "pp"): 2,
        ("send", "gradient of stage 0", 10, "pp"): 2,
    }


def test_the_table_of_messages():
    def sent(name, pp, m, v=None):
        schedule = build(name, pp, m, v)
        crossings = [[CrossingBytes(1)]] * (schedule.num_stages - 1)
        return [sum(each.sent_bytes for each in messages(schedule, rank, crossings)) for rank in range(pp)]

    p, m, v = 4, 8, 3
    for name in ("gpipe", "1f1b", "zb-h1"):
        assert sent(name, p, m) == [m, 2 * m, 2 * m, m]
    assert sent("interleaved-1f1b", p, m, v) == [m * (2 * v - 1), 2 * m * v, 2 * m * v, m * (2 * v - 1)]
    assert sent("zb-v", p, m) == [2 * m, 4 * m, 4 * m, 2 * m]
    assert sent("zb-v", 1, m) == [0]
