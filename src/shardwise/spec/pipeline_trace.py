"""The messages of a pipeline's step, predicted from its schedule and the shapes of what goes from stage to stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardwise.spec.schedule import Kind, Schedule
from shardwise.spec.trace import Collective


class CrossingShape(NamedTuple):
    """One tensor that a stage passes on for each microbatch.

    Attributes:
        nbytes: Its bytes.
        has_gradient: A gradient of as many bytes comes back for it.
    """

    nbytes: int
    has_gradient: bool = True


#: What goes from each stage to the next: one entry for every stage but the last.
Crossings = Sequence[Sequence[CrossingShape]]


class Traffic(NamedTuple):
    """Messages of one rank in one step, and their bytes."""

    sent: int
    sent_bytes: int
    received: int
    received_bytes: int


def message_trace(schedule: Schedule, rank: int, crossings: Crossings) -> list[Collective]:
    """What a rank sends and receives in one step, in order, once shapes are known to all.

    One message for each tensor, named by what it carries: the activation that a stage gives, or the gradient of it. As
    everywhere, bytes are counted where they are sent.
    """
    trace = []
    for action in schedule.actions[rank]:
        if not action.kind.is_message:
            continue
        is_gradient = action.kind in {Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT}
        given_by = action.stage - (action.kind in {Kind.RECEIVE_ACTIVATION, Kind.SEND_GRADIENT})
        unit = f"{'gradient' if is_gradient else 'activation'} of stage {given_by}"
        for crossing in crossings[given_by]:
            if crossing.has_gradient or not is_gradient:
                is_send = action.kind.is_send
                kind = "send" if is_send else "receive"
                trace.append(Collective(kind, unit, crossing.nbytes if is_send else 0, "pp"))
    return trace


def step_traffic(ranks: Sequence[int], num_microbatches: int, rank: int, crossings: Crossings) -> Traffic:
    """The same, counted, in closed form: it depends on where stages are, and not on the schedule.

    For every microbatch and every stage whose next stage is on another rank, its rank sends what crosses and receives
    the gradients; the next stage's rank does the opposite. With one tensor of ``b`` bytes from stage to stage, ``p``
    ranks and ``m`` microbatches, both directions together:

    ====================================  ====================  =======================================
    schedule                              messages of a step    sent by a rank
    ====================================  ====================  =======================================
    ``gpipe``, ``1f1b``, ``zb-h1``        2m (p - 1)            m at either end, 2m between
    ``interleaved-1f1b``                  2m (vp - 1)           m (2v - 1) at either end, 2mv between
    ``zb-v``                              4m (p - 1)            2m at either end, 4m between
    ====================================  ====================  =======================================

    of ``b`` bytes each. With one rank there are none.

    Args:
        ranks: Of each stage (``Schedule.ranks``).
        num_microbatches: Of the step.
        rank: Which rank.
        crossings: What goes from stage to stage.
    """
    sent = sent_bytes = received = received_bytes = 0
    for stage, passed in enumerate(crossings):
        source, target = ranks[stage], ranks[stage + 1]
        if source == target or rank not in {source, target}:
            continue
        there = [crossing.nbytes for crossing in passed]
        back = [crossing.nbytes for crossing in passed if crossing.has_gradient]
        out, into = (there, back) if rank == source else (back, there)
        sent, sent_bytes = sent + len(out), sent_bytes + sum(out)
        received, received_bytes = received + len(into), received_bytes + sum(into)
    m = num_microbatches
    return Traffic(m * sent, m * sent_bytes, m * received, m * received_bytes)
