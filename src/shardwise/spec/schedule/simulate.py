"""Discrete-event simulation of schedules, and the check that a schedule trains a model without deadlock."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from types import MappingProxyType
from typing import NamedTuple

from shardwise.spec.errors import PlanError
from shardwise.spec.schedule.actions import Action, Kind, Schedule, check_done

#: A computation: its kind, stage and microbatch.
Key = tuple[Kind, int, int]
_SENT_BY = {Kind.RECEIVE_ACTIVATION: Kind.SEND_ACTIVATION, Kind.RECEIVE_GRADIENT: Kind.SEND_GRADIENT}


@dataclass(frozen=True)
class Durations:
    """The time of one (virtual) stage for one microbatch, in any unit of time.

    Attributes:
        forward: A forward.
        backward_input: The gradient of the stage's input.
        backward_weight: The gradients of the stage's weights. A full backward takes this plus ``backward_input``.
        communication: From the end of a computation until its result arrives at the next stage's rank. Messages are
            sent while ranks compute.

    Raises:
        PlanError: A computation's time is not positive, or communication's is negative.
    """

    forward: Fraction | float = 1
    backward_input: Fraction | float = 1
    backward_weight: Fraction | float = 1
    communication: Fraction | float = 0

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            duration = getattr(self, name)
            try:
                value = Fraction(duration)
            except (TypeError, ValueError, OverflowError):
                value = Fraction(-1)
            if value < 0 or (value == 0 and name != "communication"):
                least = "at least 0" if name == "communication" else "above 0"
                raise PlanError(f"duration {name}={duration}: expected a number {least}.\n  Set {name}=1.")
            object.__setattr__(self, name, value)

    @property
    def all(self) -> tuple[Fraction, ...]:
        """Every duration."""
        return tuple(Fraction(getattr(self, each.name)) for each in fields(self))

    @property
    def unit(self) -> Fraction:
        """The greatest common divisor of all durations."""
        return _unit(self.all)

    def ticks(self, kind: Kind, unit: Fraction | None = None) -> int:
        """The duration of a computation or a message in units; ``unit`` divides all durations."""
        forward, backward_input, backward_weight, communication = self.all
        lasts = {
            Kind.FORWARD: forward,
            Kind.BACKWARD: backward_input + backward_weight,
            Kind.BACKWARD_INPUT: backward_input,
            Kind.BACKWARD_WEIGHT: backward_weight,
        }
        return int(lasts.get(kind, communication) / (unit or self.unit))


def _unit(durations: Iterable[Fraction]) -> Fraction:
    values = tuple(durations)
    denominator = math.lcm(*(value.denominator for value in values))
    return Fraction(math.gcd(*(int(value * denominator) for value in values)), denominator)


class Span(NamedTuple):
    """A computation with its start and end, in units of :attr:`Timing.unit`."""

    start: int
    end: int
    action: Action


@dataclass(frozen=True)
class Timing:
    """Start and end of the computations of each rank.

    Attributes:
        spans: The computations of each rank, in order.
        unit: The unit of their times.
        held_up: For computations that were delayed by ``earliest`` of :func:`simulate`, the delay in units.
    """

    spans: tuple[tuple[Span, ...], ...]
    unit: Fraction
    held_up: Mapping[Key, int] = field(default_factory=dict)

    @property
    def makespan(self) -> Fraction:
        """The end of the last computation; the first begins at 0."""
        return max(spans[-1].end for spans in self.spans) * self.unit

    @property
    def ideal(self) -> Fraction:
        """The longest compute time of a rank: the length of the step if no rank waited."""
        return max(_busy(spans) for spans in self.spans) * self.unit

    @property
    def bubble(self) -> Fraction:
        """Idle time over ideal time, from the first computation of any rank to the last one."""
        return (self.makespan - self.ideal) / self.ideal

    @property
    def bubble_share(self) -> Fraction:
        """Idle time over the time of the step: the fraction that would be saved if no rank waited."""
        return (self.makespan - self.ideal) / self.makespan

    @property
    def inner_bubble(self) -> Fraction:
        """Idle time between a rank's first and last computation, of the rank that waits longest, over ideal time.

        The time before and after can overlap with neighbouring steps, unless an operation between two steps (such as a
        norm of all gradients) synchronizes the ranks. The papers on zero-bubble schedules report this bubble.
        """
        idle = max(spans[-1].end - spans[0].start - _busy(spans) for spans in self.spans)
        return idle * self.unit / self.ideal


def _busy(spans: Sequence[Span]) -> int:
    return sum(span.end - span.start for span in spans)


def simulate(
    schedule: Schedule,
    durations: Durations | Sequence[Durations],
    *,
    exceptions: Mapping[Key, Fraction | float] = MappingProxyType({}),
    earliest: Mapping[Key, Fraction | float] = MappingProxyType({}),
) -> Timing:
    """Simulate a schedule. Sends and receives do not block; a computation waits until its inputs have arrived.

    Args:
        schedule: A schedule with or without messages.
        durations: Durations of computations and messages; one for all stages, or one for each. The sending stage
            determines the time of a message.
        exceptions: Durations of computations that differ from others of their stage, by kind, stage and microbatch.
        earliest: Earliest start times of computations that also wait for other events.

    Raises:
        PlanError: The ranks wait for each other in a circle, or for something that no rank computes.
    """
    stages = [durations] * schedule.num_stages if isinstance(durations, Durations) else durations
    others = {key: Fraction(seconds) for key, seconds in exceptions.items()}
    begins = {key: Fraction(seconds) for key, seconds in earliest.items()}
    unit = _unit(itertools.chain(others.values(), begins.values(), *(stage.all for stage in set(stages))))
    ticks = {stage: {kind: stage.ticks(kind, unit) for kind in Kind} for stage in set(stages)}
    took = {key: int(seconds / unit) for key, seconds in others.items()}
    starts = {key: int(seconds / unit) for key, seconds in begins.items()}
    return _in_order(schedule, [ticks[stage] for stage in stages], unit, took, starts)


def _in_order(
    schedule: Schedule,
    ticks: Sequence[Mapping[Kind, int]],
    unit: Fraction,
    took: Mapping[Key, int],
    begins: Mapping[Key, int],
) -> Timing:
    unusual = {microbatch for _, _, microbatch in (*took, *begins)}
    held_up: dict[Key, int] = {}
    lasts = [[each[kind] for kind in Kind] for each in ticks]
    travel = [*(each[Kind.SEND_ACTIVATION] for each in ticks), 0]  # the last is for sender -1: no message
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    clock, ends = [0] * schedule.num_ranks, []
    for rank, action, kind, source, sender in schedule.order:
        start = clock[rank]
        if source >= 0 and (arrives := ends[source] + travel[sender]) > start:
            start = arrives
        lasting = lasts[action.stage][kind]
        if action.microbatch in unusual:
            key = action.kind, action.stage, action.microbatch
            lasting = took.get(key, lasting)
            if (wait := begins.get(key, 0) - start) > 0:
                held_up[key] = wait
                start += wait
        end = start + lasting
        spans[rank].append(Span(start, end, action))
        ends.append(end)
        clock[rank] = end
    return Timing(tuple(map(tuple, spans)), unit, held_up)


def without_delays(schedule: Schedule, timing: Timing) -> Timing:
    """Simulate the schedule with the durations in ``timing``, if messages and gaps took no time."""
    computations = itertools.chain.from_iterable(timing.spans)
    took = {(action.kind, action.stage, action.microbatch): end - start for start, end, action in computations}
    return _in_order(schedule, [dict.fromkeys(Kind, 0)] * schedule.num_stages, timing.unit, took, {})


def _check_ends(schedule: Schedule) -> None:
    """Check that all ranks reach their end if sends and receives wait for each other (rendezvous)."""
    cursors, has_moved = [0] * schedule.num_ranks, True
    while has_moved:
        has_moved = False
        for rank, actions in enumerate(schedule.actions):
            while cursors[rank] < len(actions):
                action = actions[cursors[rank]]
                if action.peer is not None:
                    theirs, cursor = schedule.actions[action.peer], cursors[action.peer]
                    if cursor == len(theirs) or theirs[cursor] != _other_end(action, rank):
                        break
                    cursors[action.peer] += 1
                cursors[rank] += 1
                has_moved = True
    left = [actions[cursor:] for actions, cursor in zip(schedule.actions, cursors, strict=True)]
    check_done(schedule.name, "blocking", left)


def _other_end(action: Action, rank: int) -> Action:
    """The matching send or receive in the peer's list."""
    both: Mapping[Kind, Kind] = _SENT_BY | {send: receive for receive, send in _SENT_BY.items()}
    forward = action.kind in {Kind.SEND_ACTIVATION, Kind.RECEIVE_GRADIENT}
    return Action(both[action.kind], action.stage + (1 if forward else -1), action.microbatch, rank)


def check(schedule: Schedule) -> None:
    """Refuse a schedule that does not train a model, or that could deadlock.

    These rules hold for every rank's list:

    - Each stage runs the forward and the backward (or its two parts) of each microbatch exactly once.
    - Forwards, (input) gradients and weights' gradients of a stage process the microbatches in order, so that sums of
      gradients equal those of one process that accumulates.
    - A computation follows the computation or receive of its inputs, and a send follows the computation of its content.
      Results are sent and received once if the next stage is on another rank, and not at all otherwise.
    - All ranks reach their end if each send waits for its receive (rendezvous). This depends only on the lists, not on
      durations, and implies that ranks also reach their end with buffered sends.

    Raises:
        PlanError: The schedule breaks a rule; the message says where.
    """
    if set(schedule.ranks) != set(range(schedule.num_ranks)):
        raise PlanError(
            f"schedule {schedule.name!r}: its stages are on ranks {sorted(set(schedule.ranks))}, but it has lists for"
            f" {schedule.num_ranks} ranks."
        )
    for rank, actions in enumerate(schedule.actions):
        expected, found = Counter(_expected(schedule, rank)), Counter(actions)
        for action in [*(expected - found), *(found - expected)]:  # a missing action is the more useful message
            raise PlanError(
                f"schedule {schedule.name!r}: {action} is on rank {rank} {found[action]} times, expected"
                f" {expected[action]}."
            )
        _check_order(schedule, rank)
    _check_ends(schedule)


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
    """Check that a rank's list has microbatches in order, and no action before the actions that it needs."""
    behind: set[Key] = set()
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


def _needs(schedule: Schedule, action: Action) -> Iterator[Key]:
    """Yield the actions that must precede an action in its rank's list."""
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
