"""Where messages go in the lists of computations."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.spec.schedule.action import Action, Kind, Orders, Schedule
from shardwise.spec.schedule.simulate import Durations, simulate


def with_messages(name: str, orders: Orders, num_microbatches: int, ranks: Sequence[int]) -> Schedule:
    """The schedule that computes in these orders, with a message wherever the next stage is on another rank.

    All computations and messages are put into one order over all ranks: by the time at which a computation starts, and
    a message at the time at which what it carries is made, when every part of a computation takes one unit of time and
    a message none. Both ends of a message have its place in that one order. A rank that follows its part of it, and
    waits at every message for the other end, therefore never waits in a circle: of all that is still to be done, the
    first in the order has both its ranks free.
    """
    plain = Schedule(name, tuple(tuple(order) for order in orders), num_microbatches, tuple(ranks))
    timing = simulate(plain, Durations())
    placed: list[tuple[int, int, int, int, int, Action]] = []
    for rank, order in enumerate(timing.spans):
        for span in order:
            action = span.action
            placed.append((span.start, 1, 0, action.stage, rank, action))
            for owner, end in _message(action, plain):
                kind_first = 0 if action.kind is Kind.FORWARD else 1
                placed.append((span.end, 0, kind_first, action.stage, owner, end))
    actions: list[list[Action]] = [[] for _ in orders]
    for *_, owner, action in sorted(placed, key=lambda item: item[:4]):
        actions[owner].append(action)
    return Schedule(name, tuple(tuple(order) for order in actions), num_microbatches, tuple(ranks))


def _message(made_by: Action, schedule: Schedule) -> list[tuple[int, Action]]:
    """Both ends of the message that follows a computation, each with its rank; none where nothing is sent."""
    stage, j = made_by.stage, made_by.microbatch
    if made_by.kind is Kind.FORWARD:
        send, receive, other = Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION, stage + 1
    elif made_by.kind.gives_input_gradient:
        send, receive, other = Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT, stage - 1
    else:
        return []
    if not 0 <= other < schedule.num_stages or schedule.ranks[other] == schedule.ranks[stage]:
        return []
    source, target = schedule.ranks[stage], schedule.ranks[other]
    return [(source, Action(send, stage, j, target)), (target, Action(receive, other, j, source))]
