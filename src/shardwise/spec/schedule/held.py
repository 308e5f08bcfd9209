"""How many microbatches a rank holds at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardwise.spec.schedule.action import Action, Kind, Schedule
from shardwise.spec.schedule.interleaved import forwards_ahead


class Held(NamedTuple):
    """Most (microbatch, stage) pairs at once.

    Attributes:
        activations: From the forward until the input's gradient is there: all that autograd saved.
        in_flight: From the forward until the weights' gradients are there. Between the two gradients what remains is
            what the weights' gradients take: the inputs of the layers and the gradients of their outputs.
    """

    activations: int
    in_flight: int


def held(actions: Sequence[Action], stage: int | None = None) -> Held:
    """What a rank with these actions holds, of all its stages or of one: counted, for any schedule."""
    activations = in_flight = 0
    most = Held(0, 0)
    is_split = any(action.kind is Kind.BACKWARD_WEIGHT for action in actions)
    for action in actions:
        if stage is not None and action.stage != stage:
            continue
        is_forward = action.kind is Kind.FORWARD
        activations += is_forward - action.kind.gives_input_gradient
        in_flight += is_forward - (action.kind is (Kind.BACKWARD_WEIGHT if is_split else Kind.BACKWARD))
        most = Held(max(most.activations, activations), max(most.in_flight, in_flight))
    return most


def peak_held(schedule: str, pp: int, num_microbatches: int, num_virtual_stages: int, rank: int) -> Held:
    """What a rank holds of all its stages, in closed form.

    ====================  =================================  ==================
    schedule              activations                        in flight
    ====================  =================================  ==================
    ``gpipe``             m                                  the same
    ``1f1b``              min(p - r, m)                      the same
    ``interleaved-1f1b``  min(2(p-r-1) + (v-1)p + 1, vm)     the same
    ``zb-h1``             min(p - r, m)                      min(p, m)
    ``zb-v``              min(2p, 2m, m + r + 1)             the same
    ====================  =================================  ==================

    A stage of ``interleaved-1f1b`` and ``zb-v`` is a ``v``-th of a rank's layers: in layers, ``zb-v`` holds what 1F1B
    holds on its first rank, on every rank.
    """
    p, m, v = pp, num_microbatches, num_virtual_stages
    if schedule == "gpipe":
        return Held(m, m)
    if schedule == "interleaved-1f1b":
        most = min(forwards_ahead(p, rank, v) + 1, v * m)
        return Held(most, most)
    if schedule == "zb-v":
        most = min(2 * p, 2 * m, m + rank + 1)
        return Held(most, most)
    return Held(min(p - rank, m), min(p, m) if schedule == "zb-h1" else min(p - rank, m))


def peak_bytes(
    schedule: Schedule, rank: int, stage_bytes: Sequence[int], kept_bytes: Sequence[int] | None = None
) -> int:
    """The most bytes of activations that a rank holds between two of its actions.

    Args:
        schedule: Any.
        rank: Which rank.
        stage_bytes: Of each stage (of all ranks), what one microbatch holds from its forward to its (input) gradient.
        kept_bytes: ... and from there until the weights' gradients, where backward is in two parts; by default the
            same.
    """
    kept_bytes = stage_bytes if kept_bytes is None else kept_bytes
    now = most = 0
    for action in schedule.actions[rank]:
        whole, kept = stage_bytes[action.stage], kept_bytes[action.stage]
        change = {
            Kind.FORWARD: whole,
            Kind.BACKWARD: -whole,
            Kind.BACKWARD_INPUT: kept - whole,
            Kind.BACKWARD_WEIGHT: -kept,
        }
        now += change.get(action.kind, 0)
        most = max(most, now)
    return most
