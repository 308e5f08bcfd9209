"""Rows that travel in numbers that depend on values: tokens of experts, and rows of an embedding spread over ranks.

Of a batch of n tokens with k choices each, a rank has n·k rows to send, each of the width of a token. Forward exchanges
the counts, then sends rows to the ranks that hold the experts, and their results back; backward sends as much again, in
the other order (the gradients of the results go where the rows went, those of the rows come back)::

    forward    counts    8 (E - E/ep) bytes
               dispatch  rows for experts of other ranks
               combine   rows that came from other ranks
    backward   rows for experts of other ranks, then rows that came from other ranks

Where tokens choose evenly, (ep-1)/ep of the n·k rows travel each time.
"""

from __future__ import annotations

import math

from shardwise.spec.memory.footprint import own_part


def capacity(factor: float | None, num_tokens: int, num_choices: int, num_experts: int) -> int | None:
    """The most rows that an expert takes from a batch of ``num_tokens``; ``None``: all."""
    return None if factor is None else math.ceil(factor * num_tokens * num_choices / num_experts)


def even_counts(num_rows: int, num_experts: int, limit: int | None = None) -> list[int]:
    """Rows for each expert if tokens choose as evenly as possible, which is assumed where values are not known."""
    counts = [own_part(num_rows, num_experts, expert) for expert in range(num_experts)]
    return counts if limit is None else [min(count, limit) for count in counts]


def local_range(num_experts: int, size: int, rank: int) -> tuple[int, int]:
    """The first expert that a rank of ``ep`` holds, and the one after its last."""
    each = num_experts // size
    return rank * each, (rank + 1) * each


def row_bounds(num_rows: int, size: int) -> tuple[int, ...]:
    """Rank ``r`` of ``size`` holds the rows from bound ``r`` up to bound ``r + 1``; sizes differ by one at most."""
    return tuple(rank * num_rows // size for rank in range(size + 1))
