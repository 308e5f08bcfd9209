"""Whether a schedule can run: every action once, in order, after what it needs, and without a deadlock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from shardwise.spec.errors import PlanError
from shardwise.spec.schedule.actions import Action, Kind, Schedule
from shardwise.spec.schedule.simulate import Durations, simulate


def check(schedule: Schedule) -> None:
    """Refuse a schedule that does not train a model, or that could deadlock.

    On every rank, in the order of its list:

    - each of its stages runs each microbatch's forward, and its backward, or its two parts, once, and nothing else;
    - forwards, (input) gradients and weights' gradients of a stage go through the microbatches in order, so that sums
      of gradients are those of one process that accumulates;
    - a computation comes after what it takes was made or received here, and a message is sent after it was made; what
      goes to a stage of another rank is sent and received once, what stays is not;
    - with sends that wait for their receive (rendezvous) all ranks reach their end. That depends on the lists alone,
      not on durations; and ranks that reach their end so also do where sends are buffered.

    Raises:
        PlanError: It is broken; the message says where.
    """
    if set(schedule.ranks) != set(range(schedule.num_ranks)):
        raise PlanError(
            f"schedule {schedule.name!r}: its stages are on ranks {sorted(set(schedule.ranks))}, but it has lists for"
            f" {schedule.num_ranks} ranks."
        )
    for rank, actions in enumerate(schedule.actions):
        expected, found = Counter(_expected(schedule, rank)), Counter(actions)
        for action in [*(expected - found), *(found - expected)]:  # a missing action tells more than a superfluous one
            raise PlanError(
                f"schedule {schedule.name!r}: {action} is on rank {rank} {found[action]} times, expected"
                f" {expected[action]}."
            )
        _check_order(schedule, rank)
    simulate(schedule, Durations(), is_blocking=True)


def _expected(schedule: Schedule, rank: int) -> Iterator[Action]:
    """All actions that a rank must have, in any order."""
    for stage in schedule.stages(rank):
        for j in range(schedule.num_microbatches):
            yield Action(Kind.FORWARD, stage, j)
            if schedule.is_split:
                yield Action(Kind.BACKWARD_INPUT, stage, j)
                yield Action(Kind.BACKWARD_WEIGHT, stage, j)
            else:
                yield Action(Kind.BACKWARD, stage, j)
            for other, to_it, from_it in (
                (stage + 1, Kind.SEND_ACTIVATION, Kind.RECEIVE_GRADIENT),
                (stage - 1, Kind.SEND_GRADIENT, Kind.RECEIVE_ACTIVATION),
            ):
                if 0 <= other < schedule.num_stages and schedule.ranks[other] != rank:
                    yield Action(to_it, stage, j, schedule.ranks[other])
                    yield Action(from_it, stage, j, schedule.ranks[other])


def _check_order(schedule: Schedule, rank: int) -> None:
    """Check a rank's own list: microbatches in order, and no action before what it needs."""
    behind: set[tuple[Kind, int, int]] = set()
    next_microbatch: Counter[tuple[Kind, int]] = Counter()
    for action in schedule.actions[rank]:
        stage, j = action.stage, action.microbatch
        if j != next_microbatch[action.kind, stage]:
            raise PlanError(
                f"schedule {schedule.name!r}, rank {rank}: {action} is out of turn, microbatch"
                f" {next_microbatch[action.kind, stage]} is next."
            )
        next_microbatch[action.kind, stage] += 1
        for need in _needs(schedule, action):
            if need not in behind:
                raise PlanError(
                    f"schedule {schedule.name!r}, rank {rank}: {action} comes before the {Action(*need)} that it needs."
                )
        behind.add((action.kind, stage, j))


def _needs(schedule: Schedule, action: Action) -> Iterator[tuple[Kind, int, int]]:
    """What has to come before an action in its own rank's list."""
    stage, j = action.stage, action.microbatch
    whole = Kind.BACKWARD_INPUT if schedule.is_split else Kind.BACKWARD
    if action.kind is Kind.SEND_ACTIVATION:
        yield Kind.FORWARD, stage, j
    elif action.kind is Kind.SEND_GRADIENT:
        yield whole, stage, j
    elif action.kind is Kind.BACKWARD_WEIGHT:
        yield Kind.BACKWARD_INPUT, stage, j
    elif not action.kind.is_message:
        is_forward = action.kind is Kind.FORWARD
        if not is_forward:
            yield Kind.FORWARD, stage, j
        source = stage - 1 if is_forward else stage + 1
        if 0 <= source < schedule.num_stages:
            is_here = schedule.ranks[source] == schedule.ranks[stage]
            if is_here:
                yield Kind.FORWARD if is_forward else whole, source, j
            else:
                yield Kind.RECEIVE_ACTIVATION if is_forward else Kind.RECEIVE_GRADIENT, stage, j
