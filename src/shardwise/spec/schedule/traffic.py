"""The messages of one step of a pipeline: kind, what for, bytes, in the order in which a rank issues them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.spec.schedule.action import Kind, Schedule
from shardwise.spec.trace import Collective


@dataclass(frozen=True)
class CrossingBytes:
    """A tensor of one microbatch that goes from a stage to the next.

    Attributes:
        num_bytes: Of what it holds.
        has_gradient: As many bytes come back.
    """

    num_bytes: int
    has_gradient: bool = True


@dataclass(frozen=True)
class Copies:
    """A parameter that several stages hold.

    Attributes:
        name: Its name.
        ranks: In the pipeline, of those that hold it.
        num_bytes: Of its whole gradient, in the dtype in which gradients are added up.
    """

    name: str
    ranks: Sequence[int]
    num_bytes: int


def messages(
    schedule: Schedule, rank: int, crossing: Sequence[Sequence[CrossingBytes]], copies: Sequence[Copies] = ()
) -> list[Collective]:
    """What ``rank`` sends and receives in one step.

    In a chain of blocks one tensor of ``batch * sequence * hidden`` elements crosses every boundary: a rank with one
    stage between two others then issues four messages for each microbatch, two of them sent.

    Args:
        schedule: Of the step.
        rank: In the pipeline.
        crossing: For each stage but the last what it hands to the next.
        copies: Parameters that several stages hold: once a step the gradient of each copy goes to every other.

    Returns:
        Without the headers that tell shapes before the first step of a kind of batch.
    """
    found = []
    for action in schedule.actions[rank]:
        if not action.kind.is_message:
            continue
        is_gradient = action.kind in {Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT}
        # A boundary has the number of the stage before it: of the sender's for activations, of the receiver's for
        # gradients.
        boundary = action.stage - (action.kind in {Kind.RECEIVE_ACTIVATION, Kind.SEND_GRADIENT})
        unit = f"{'gradient' if is_gradient else 'activation'} of stage {boundary}"
        kind = "send" if action.kind.is_send else "receive"
        found += [
            Collective(kind, unit, tensor.num_bytes if action.kind.is_send else 0, "pp")
            for tensor in crossing[boundary]
            if tensor.has_gradient or not is_gradient
        ]
    for held in copies:
        others = [peer for peer in held.ranks if peer != rank]
        if rank in held.ranks:
            found += [Collective("receive", f"copies of {held.name}", 0, "pp") for _ in others]
            found += [Collective("send", f"copies of {held.name}", held.num_bytes, "pp") for _ in others]
    return found
