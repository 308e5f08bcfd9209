"""A pipeline's schedule as data: one list of actions for each rank."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from shardwise.spec.errors import PlanError


class Kind(StrEnum):
    """The kinds of actions: four computations, and sending or receiving one of two messages."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    SEND_ACTIVATION = "send_activation"
    RECEIVE_ACTIVATION = "receive_activation"
    SEND_GRADIENT = "send_gradient"
    RECEIVE_GRADIENT = "receive_gradient"

    @property
    def is_message(self) -> bool:
        """Whether it is one end of a message."""
        return self in _MESSAGES

    @property
    def is_send(self) -> bool:
        """Whether it is the sender's end of a message."""
        return self in {Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT}

    @property
    def is_receive(self) -> bool:
        """Whether it is the receiver's end of a message."""
        return self in {Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT}

    @property
    def gives_input_gradient(self) -> bool:
        """Whether the action computes the gradient that the previous stage needs to begin its backward."""
        return self in {Kind.BACKWARD, Kind.BACKWARD_INPUT}


_MESSAGES = frozenset(kind for kind in Kind if kind.is_send or kind.is_receive)


@dataclass(frozen=True, slots=True)
class Action:
    """One action of one rank.

    Attributes:
        kind: The kind of action.
        stage: The (virtual) stage of this rank that computes, whose result is sent, or that needs the received message.
        microbatch: The number of the microbatch.
        peer: The rank at the other end of a message; ``None`` for a computation.
    """

    kind: Kind
    stage: int
    microbatch: int
    peer: int | None = None

    def __str__(self) -> str:
        other = {Kind.SEND_ACTIVATION: " to", Kind.SEND_GRADIENT: " to"}.get(self.kind, " from")
        ends = "" if self.peer is None else f"{other} rank {self.peer}"
        return f"{self.kind.replace('_', ' ')} of stage {self.stage}, microbatch {self.microbatch}{ends}"


@dataclass(frozen=True)
class Schedule:
    """The actions of one training step.

    Attributes:
        name: The name of the schedule.
        actions: The actions of each rank, in order.
        num_microbatches: Microbatches of the step.
        ranks: The rank of each stage. Stages are numbered in the order of the model's forward.

    Two stages of one rank exchange no messages.

    The order of messages cannot deadlock even if sends block until they are received. Asynchronous messages are
    faster: a send starts in its place, a receive is posted in its place or earlier (:meth:`early`), and only the
    computation that needs the message waits for it. Messages from one rank to another arrive in the order of sending.
    """

    name: str
    actions: tuple[tuple[Action, ...], ...]
    num_microbatches: int
    ranks: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Stages of all ranks together."""
        return len(self.ranks)

    @property
    def num_virtual_stages(self) -> int:
        """Stages of one rank."""
        return self.num_stages // self.num_ranks

    @functools.cached_property
    def is_split(self) -> bool:
        """Whether backward has two parts: the gradient of a stage's input first, those of its weights later."""
        parts = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        return any(action.kind in parts for actions in self.actions for action in actions)

    @functools.cached_property
    def order(self) -> tuple[Ordered, ...]:
        """The computations of all ranks in an order in which each follows the computations whose results it needs.

        Raises:
            PlanError: The ranks wait for each other in a circle, or for something that no rank computes.
        """
        return _ordered(self)

    def stages(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the order of forward."""
        return tuple(stage for stage, owner in enumerate(self.ranks) if owner == rank)

    def early(self, rank: int) -> dict[int, tuple[Action, ...]]:
        """The receives that can be posted before each computation: those between it and the next computation.

        A message that arrives while the rank computes then causes no idle time. Not for transports that process
        messages strictly in order, because later sends would wait for the receive.

        Returns:
            The receives in order, by the index of the computation among the rank's actions.
        """
        found: dict[int, list[Action]] = {}
        newest = None
        for index, action in enumerate(self.actions[rank]):
            if not action.kind.is_message:
                newest = index
            elif action.kind.is_receive and newest is not None:
                found.setdefault(newest, []).append(action)
        return {index: tuple(receives) for index, receives in found.items()}

    def issued(self, rank: int, *, is_early: bool = True) -> tuple[Action, ...]:
        """The actions of a rank in the order in which it starts them, with or without early receives."""
        early = self.early(rank) if is_early else {}
        early_receives = {receive for receives in early.values() for receive in receives}
        order: list[Action] = []
        for index, action in enumerate(self.actions[rank]):
            order += early.get(index, ())
            order += () if action in early_receives else (action,)
        return tuple(order)

    def computations(self, rank: int) -> tuple[Action, ...]:
        """The actions of a rank without messages, in order."""
        return tuple(action for action in self.actions[rank] if not action.kind.is_message)


class Ordered(NamedTuple):
    """A computation of :attr:`Schedule.order`.

    Attributes:
        rank: The rank that computes.
        action: The computation.
        kind: Index of its kind among all kinds.
        source: Index in the order of the computation of another stage whose result it needs; -1: none.
        sender: The stage of that computation, if it is on another rank; -1: none.
    """

    rank: int
    action: Action
    kind: int
    source: int
    sender: int


def _ordered(schedule: Schedule) -> tuple[Ordered, ...]:
    """Take the ranks in turn, and run each one until it has to wait for another rank."""
    found: list[Ordered] = []
    index_of: dict[tuple[bool, int, int], int] = {}  # index in ``found`` by (is a forward, stage, microbatch)
    next_of = [0] * schedule.num_ranks
    computed = [schedule.computations(rank) for rank in range(schedule.num_ranks)]
    total = sum(map(len, computed))
    ranks, num_stages, kinds = schedule.ranks, schedule.num_stages, list(Kind)
    while len(found) < total:
        before = len(found)
        for rank, actions in enumerate(computed):
            while next_of[rank] < len(actions):
                action = actions[next_of[rank]]
                stage, is_forward = action.stage, action.kind is Kind.FORWARD
                source = -1
                other = stage - 1 if is_forward else stage + 1
                if action.kind is not Kind.BACKWARD_WEIGHT and 0 <= other < num_stages:
                    source = index_of.get((is_forward, other, action.microbatch), -1)
                    if source < 0:
                        break
                if action.kind is not Kind.BACKWARD_WEIGHT:
                    index_of[is_forward, stage, action.microbatch] = len(found)
                sender = other if source >= 0 and ranks[other] != ranks[stage] else -1
                found.append(Ordered(rank, action, kinds.index(action.kind), source, sender))
                next_of[rank] += 1
        if len(found) == before:
            check_done(schedule.name, "buffered", [all_[n:] for all_, n in zip(computed, next_of, strict=True)])
    return tuple(found)


def check_done(name: str, sends: str, left: Sequence[Sequence[Action]]) -> None:
    """Refuse a schedule in which some rank has actions left; ``sends`` is ``"blocking"`` or ``"buffered"``."""
    waiting = [f"rank {rank} at {actions[0]}" for rank, actions in enumerate(left) if actions]
    if waiting:
        raise PlanError(
            f"schedule {name!r} does not end with {sends} sends: ranks wait for each other.\n"
            f"  They wait at: {'; '.join(waiting)}."
        )


def looped_ranks(pp: int, num_virtual_stages: int) -> tuple[int, ...]:
    """The rank of each stage if stages are assigned in loops: 0, 1, ..., p - 1, and again from rank 0."""
    return tuple(range(pp)) * num_virtual_stages


def folded_ranks(pp: int) -> tuple[int, ...]:
    """The rank of each stage in the shape of a V: 0, 1, ..., p - 1, and back to 0."""
    return (*range(pp), *reversed(range(pp)))


Orders = Sequence[Sequence[Action]]
