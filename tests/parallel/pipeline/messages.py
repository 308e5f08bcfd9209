"""The messages of one step of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.spec.schedule.actions import Action, Kind, Schedule
from shardwise.spec.traffic.data import Collective


@dataclass(frozen=True)
class CrossingBytes:
    """A tensor of one microbatch that is sent from a stage to the next.

    Attributes:
        num_bytes: Size of the tensor.
        has_gradient: Whether its gradient, of the same size, is sent back.
    """

    num_bytes: int
    has_gradient: bool = True


@dataclass(frozen=True)
class Copies:
    """A parameter that several stages hold.

    Attributes:
        name: Name of the parameter.
        ranks: Pipeline ranks that hold it.
        num_bytes: Bytes of its full gradient, in the dtype in which gradients are added up.
    """

    name: str
    ranks: Sequence[int]
    num_bytes: int


def messages(
    schedule: Schedule,
    rank: int,
    crossing: Sequence[Sequence[CrossingBytes]],
    copies: Sequence[Copies] = (),
    *,
    is_early: bool = True,
) -> list[Collective]:
    """The messages that ``rank`` sends and receives in one step.

    In a chain of blocks one tensor of ``batch * sequence * hidden`` elements crosses every boundary: a rank with one
    stage between two others then issues four messages for each microbatch, two of them sent. The headers that announce
    shapes before the first step with a new kind of batch are not included. With ``p`` ranks of ``v`` stages each and
    ``m`` microbatches, activations and gradients together:

    ====================================  ====================  =======================================
    schedule                              messages of a step    sent by a rank
    ====================================  ====================  =======================================
    ``gpipe``, ``1f1b``, ``zb-h1``        2m (p - 1)            m at either end, 2m between
    ``interleaved-1f1b``                  2m (vp - 1)           m (2v - 1) at either end, 2mv between
    ``zb-v``                              4m (p - 1)            2m at either end, 4m between
    ====================================  ====================  =======================================

    Args:
        schedule: The step's schedule.
        rank: Coordinate on ``pp``.
        crossing: For each stage but the last, the tensors that it sends to the next.
        copies: Parameters that several stages hold: once a step each rank sends its gradient of them, and a flag, to
            the others.
        is_early: Whether receives are posted one computation early, as over Gloo.
    """
    found = [
        message
        for action in schedule.issued(rank, is_early=is_early)
        if action.kind.is_message
        for message in action_messages(action, crossing)
    ]
    return found + copy_messages(copies, rank)


def action_messages(action: Action, crossing: Sequence[Sequence[CrossingBytes]]) -> list[Collective]:
    """One end of the messages of an action: one for each tensor that crosses the boundary; arguments as above."""
    is_gradient = action.kind in {Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT}
    # A boundary has the number of the stage before it: of the sender's for activations, of the receiver's for
    # gradients.
    boundary = action.stage - (action.kind in {Kind.RECEIVE_ACTIVATION, Kind.SEND_GRADIENT})
    unit = f"{'gradient' if is_gradient else 'activation'} of stage {boundary}"
    kind = "send" if action.kind.is_send else "receive"
    return [
        Collective(kind, unit, tensor.num_bytes if action.kind.is_send else 0, "pp")
        for tensor in crossing[boundary]
        if tensor.has_gradient or not is_gradient
    ]


def copy_messages(copies: Sequence[Copies], rank: int) -> list[Collective]:
    """The messages of ``rank`` for the gradients of parameters that several stages hold."""
    found = []
    for shared in copies:
        others = [peer for peer in shared.ranks if peer != rank]
        if rank in shared.ranks:
            unit = f"copies of {shared.name}"
            found += [Collective("send", unit, num_bytes, "pp") for _ in others for num_bytes in (shared.num_bytes, 4)]
            found += [Collective("receive", unit, 0, "pp") for _ in others for _ in range(2)]
    return found
