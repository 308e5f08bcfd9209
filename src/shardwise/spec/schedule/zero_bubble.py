"""Zero-bubble schedules: the gradients of weights, for which no other rank waits, fill what would be idle time.

Qi et al. 2023, arXiv 2401.10241 (ZB-H1), and Qi et al. 2024, arXiv 2405.15362 (the V shape). F is a forward, I the
gradient of a stage's input (the papers' B), W those of its weights.
"""

from __future__ import annotations

from collections import Counter

from shardwise.spec.schedule.action import Action, Kind

F, I, W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741  the field's letters


def zb_h1(pp: int, num_microbatches: int) -> list[list[Action]]:
    """1F1B with the weights' gradients of rank ``r`` ``r`` microbatches late.

    Input gradients reach the rank before W sooner, and what is late fills the time at the end in which 1F1B waits. A
    rank holds no more than 1F1B's first: ``pp - r`` microbatches between F and I, and ``r`` between I and W.
    """
    orders = []
    for rank in range(pp):
        ahead = min(pp - rank - 1, num_microbatches)
        order = [Action(F, rank, j) for j in range(ahead)]
        for j in range(num_microbatches):
            if ahead + j < num_microbatches:
                order.append(Action(F, rank, ahead + j))
            order.append(Action(I, rank, j))
            if j >= rank:
                order.append(Action(W, rank, j - rank))
        order += [Action(W, rank, j) for j in range(max(num_microbatches - rank, 0), num_microbatches)]
        orders.append(order)
    return orders


def zb_v(pp: int, num_microbatches: int) -> list[list[Action]]:
    """Two stages per rank, the model folded into a V: the first and the last stage share rank 0.

    Each row below is one phase of rank ``r``; lower case is its first stage (number ``r``), upper case its second
    (``2 pp - 1 - r``):

    ===================  =================================================================================
    f, 2(p - r) - 1 x    until the first microbatch has come down the V and back
    F f, r x             both ways
    F I W, p - r x       backward has begun at the end, which is on rank 0, but not come back to stage ``r``
    f i w F I W          all six in turn, and so on without f once there is nothing left to begin
    i I, r x             forwards are over: input gradients first, as other ranks wait for them
    i w, p - r x         ... of the first stage alone
    W, w, r x each       what is late
    ===================  =================================================================================

    With fewer than ``2 pp - 1`` microbatches the order is that for so many, with the missing ones left out.
    """
    room = max(num_microbatches, 2 * pp - 1)
    orders = []
    for rank in range(pp):
        first, second = rank, 2 * pp - 1 - rank
        back = [(F, second), (I, second), (W, second)]
        turns = [(F, first)] * (2 * (pp - rank) - 1)
        turns += [(F, second), (F, first)] * rank
        turns += back * (pp - rank)
        turns += [(F, first), (I, first), (W, first), *back] * (room - 2 * pp + 1 + rank)
        turns += [(I, first), (W, first), *back] * (pp - 1 - rank)
        turns += [(I, first), (I, second)] * rank
        turns += [(I, first), (W, first)] * (pp - rank)
        turns += [(W, second)] * rank + [(W, first)] * rank
        done: Counter[tuple[Kind, int]] = Counter()
        order = []
        for kind, stage in turns:
            if done[kind, stage] < num_microbatches:
                order.append(Action(kind, stage, done[kind, stage]))
            done[kind, stage] += 1
        orders.append(order)
    return orders
