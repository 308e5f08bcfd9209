"""Schedules with one stage per rank and a whole backward: GPipe and 1F1B."""

from __future__ import annotations

from shardwise.spec.schedule.action import Action, Kind


def gpipe(pp: int, num_microbatches: int) -> list[list[Action]]:
    """All forwards, then all backwards (Huang et al. 2018, arXiv 1811.06965).

    Backwards go through the microbatches in the order of forward, so that gradients are added up as one process that
    accumulates adds them.
    """
    return [
        [Action(kind, rank, j) for kind in (Kind.FORWARD, Kind.BACKWARD) for j in range(num_microbatches)]
        for rank in range(pp)
    ]


def one_forward_one_backward(pp: int, num_microbatches: int) -> list[list[Action]]:
    """As many forwards as there are stages after this one, then a forward and a backward in turn, then the backwards.

    Narayanan et al. 2021, arXiv 2104.04473 ("PipeDream-Flush"). A rank holds the activations of at most ``pp - rank``
    microbatches, where GPipe holds all.
    """
    orders = []
    for rank in range(pp):
        ahead = min(pp - rank - 1, num_microbatches)
        order = [Action(Kind.FORWARD, rank, j) for j in range(ahead)]
        for j in range(num_microbatches - ahead):
            order += [Action(Kind.FORWARD, rank, j + ahead), Action(Kind.BACKWARD, rank, j)]
        order += [Action(Kind.BACKWARD, rank, j) for j in range(num_microbatches - ahead, num_microbatches)]
        orders.append(order)
    return orders
