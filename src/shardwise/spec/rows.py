"""Rows of a table spread over ranks: who holds which, and what a lookup sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.spec.errors import PlanError

#: Bytes of an id, and of a count of ids, as they travel.
ID_BYTES = 8


def row_bounds(num_rows: int, size: int) -> tuple[int, ...]:
    """Rank ``r`` of ``size`` holds the rows from bound ``r`` up to bound ``r + 1``; sizes differ by one at most."""
    return tuple(rank * num_rows // size for rank in range(size + 1))


def lookup_bytes(rank: int, asked: Sequence[Sequence[int]], row_bytes: int) -> tuple[int, ...]:
    """What a rank sends for a lookup: counts, ids, rows, and in backward gradients of rows.

    Args:
        rank: Which rank.
        asked: Of rank ``r`` for rank ``s``: how many different rows of ``s`` it looks up.
        row_bytes: Of a row, and of its gradient.
    """
    peers = [other for other in range(len(asked)) if other != rank]
    wanted, answered = sum(asked[rank][other] for other in peers), sum(asked[other][rank] for other in peers)
    return ID_BYTES * len(peers), ID_BYTES * wanted, row_bytes * answered, row_bytes * wanted


def row_sharded_names(value: Any) -> tuple[str, ...]:
    """``ParallelPlan.row_sharded`` as a tuple of name patterns.

    Raises:
        PlanError: It is something else.
    """
    names = (value,) if isinstance(value, str) else value
    if not (isinstance(names, (list, tuple)) and all(isinstance(name, str) and name for name in names)):
        raise PlanError(
            f"row_sharded={value!r}: expected names of embeddings.\n  Write for example row_sharded=['embedding']."
        )
    return tuple(names)
