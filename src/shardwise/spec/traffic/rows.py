"""Rows whose number depends on values: tokens sent to experts, and rows of an embedding spread over ranks.

From a batch of n tokens with k choices each, a rank has n·k rows to send, each as wide as a token. Forward exchanges
the counts, then sends rows to the ranks that have the experts, and the results back. Backward sends the same number of
rows: the gradients of the results to the experts' ranks, then the gradients of the rows back::

    forward    counts    8 (E - E/ep) bytes
               dispatch  rows for experts of other ranks
               combine   rows that came from other ranks
    backward   rows for experts of other ranks, then rows that came from other ranks

If tokens choose evenly, (ep-1)/ep of the n·k rows are sent each time.
"""

from __future__ import annotations

import math

from shardwise.spec.memory.footprint import own_part


def capacity(factor: float | None, num_tokens: int, num_choices: int, num_experts: int) -> int | None:
    """The most rows that an expert processes from a batch of ``num_tokens``; ``None``: all."""
    return None if factor is None else math.ceil(factor * num_tokens * num_choices / num_experts)


def even_counts(num_rows: int, num_experts: int, limit: int | None = None) -> list[int]:
    """Rows for each expert if tokens choose as evenly as possible, the assumption if values are not known."""
    counts = [own_part(num_rows, num_experts, expert) for expert in range(num_experts)]
    return counts if limit is None else [min(count, limit) for count in counts]


def local_range(num_experts: int, size: int, rank: int) -> tuple[int, int]:
    """The range of experts of a rank of ``ep``."""
    each = num_experts // size
    return rank * each, (rank + 1) * each


def row_bounds(num_rows: int, size: int) -> tuple[int, ...]:
    """Bounds of the rows of each rank, divided evenly: rank ``r`` has rows from bound ``r`` up to bound ``r + 1``."""
    return tuple(rank * num_rows // size for rank in range(size + 1))
