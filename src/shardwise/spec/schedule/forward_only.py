"""Evaluation: forwards without backwards."""

from __future__ import annotations

import functools

from shardwise.spec.schedule.action import Action, Kind, Schedule
from shardwise.spec.schedule.message import with_messages


@functools.lru_cache(maxsize=32)
def forward_only(ranks: tuple[int, ...], num_microbatches: int) -> Schedule:
    """Every rank computes what can be there first: microbatch ``j`` reaches stage ``s`` at time ``j + s``.

    Args:
        ranks: Of each stage.
        num_microbatches: Any number.
    """
    orders = [
        [
            Action(Kind.FORWARD, stage, j)
            for _, stage, j in sorted(
                (stage + j, stage, j)
                for stage, owner in enumerate(ranks)
                for j in range(num_microbatches)
                if owner == rank
            )
        ]
        for rank in range(max(ranks) + 1)
    ]
    return with_messages("forward-only", orders, num_microbatches, ranks)
