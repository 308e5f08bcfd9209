"""Bubbles, and microbatches held at once, in closed form or counted."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from shardwise.spec.schedule.actions import Action, Kind, Schedule
from shardwise.spec.schedule.builders import forwards_ahead
from shardwise.spec.schedule.simulate import Durations


def bubble(schedule: str, pp: int, num_microbatches: int, num_virtual_stages: int, times: Durations) -> Fraction | None:
    """Idle time over ideal time of a step (``Timing.bubble``); ``None`` where there is no closed form.

    With ``p`` ranks, ``m`` microbatches, ``v`` stages per rank, and a forward, an input gradient and the weights'
    gradients of one stage that take F, I and W:

    ====================  =====================================================  ================================
    schedule              bubble                                                 holds for
    ====================  =====================================================  ================================
    ``gpipe``             (p-1) (F+I+W + 2c) / (m (F+I+W))                       c: time of communication
    ``1f1b``              (p-1) / m                                              c = 0, as all that follow
    ``interleaved-1f1b``  (p-1) / (v m)
    ``zb-h1``             ((p-1)(F+I) - (min(m,p)-1) min(F,I,W)) / (m (F+I+W))   in the paper m >= p, W <= F, I:
                                                                                 (p-1) (F+I-W) / (m (F+I+W))
    ``zb-v``              max(p-1, 2 (2p-1-m)) / (6m)                            F = I = W
    ====================  =====================================================  ================================

    GPipe, 1F1B: the last microbatch that rank 0 sends on before it waits goes through the p-1 stages after it, and its
    gradient comes back: a forward and a backward for each of them. Interleaved, these stages are shorter by v.

    ZB-H1: the gradient comes back without the weights' gradients on its way, (p-1)(F+I). At the end rank 0 has nothing
    to put off, and receives the last gradients one by one: the min(m,p)-1 before the last of them each let it do one
    part of its work while it waits, by the shortest of F, I and W. (Found by simulation; the tests compare it.)

    ZB-V: rank p-1 begins p-1 units late and none is idle afterwards (:func:`inner_bubble`); no schedule in which
    the ranks start together can do better.
    """
    p, m = pp, num_microbatches
    forward, backward_input, weight = (
        Fraction(t) for t in (times.forward, times.backward_input, times.backward_weight)
    )
    whole = forward + backward_input + weight
    if schedule == "gpipe":
        return Fraction(p - 1, m) * (1 + 2 * Fraction(times.communication) / whole)
    if times.communication:
        return None
    if schedule == "zb-v":
        is_even = forward == backward_input == weight
        return Fraction(max(p - 1, 2 * (2 * p - 1 - m)), 6 * m) if is_even else None
    if schedule == "zb-h1":
        caught_up = (min(m, p) - 1) * min(forward, backward_input, weight)
        return ((p - 1) * (forward + backward_input) - caught_up) / (m * whole)
    return Fraction(p - 1, num_virtual_stages * m)


def inner_bubble(
    schedule: str, pp: int, num_microbatches: int, num_virtual_stages: int, times: Durations
) -> Fraction | None:
    """Idle time between a rank's first and last computation (``Timing.inner_bubble``), over ideal time.

    ZB-V: max(0, 2p-1-m) / (3m) for F = I = W. From 2p-1 microbatches on, which fill the way down the V and back, no
    unit of time is idle; each that is missing leaves a gap of one unit on the way down and one on the way back. The
    others: as :func:`bubble`, since rank 0 is the first to begin and the last to end; ZB-H1 where W <= F, I.
    """
    if schedule == "zb-v":
        is_even = not times.communication and times.backward_weight == times.forward == times.backward_input
        return Fraction(max(0, 2 * pp - 1 - num_microbatches), 3 * num_microbatches) if is_even else None
    if schedule == "zb-h1" and times.backward_weight > min(times.forward, times.backward_input):
        return None
    return bubble(schedule, pp, num_microbatches, num_virtual_stages, times)


class Held(NamedTuple):
    """The most (microbatch, stage) pairs at a time.

    Attributes:
        activations: From the forward to the input's gradient: all that autograd saved.
        in_flight: From the forward to the weights' gradients. Between the two gradients the inputs of the layers and
            the gradients of their outputs remain.
    """

    activations: int
    in_flight: int


def held(actions: Sequence[Action], stage: int | None = None) -> Held:
    """What a rank with these actions holds of all its stages, or of one, counted for any schedule."""
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
        schedule: Any schedule.
        rank: The rank.
        stage_bytes: For each stage (of all ranks), what a microbatch holds from its forward to its (input) gradient.
        kept_bytes: What a microbatch holds from there to the weights' gradients, where backward has two parts; by
            default as much.
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
