"""Exchange of rows whose number depends on data: tokens of experts, rows of a row-sharded embedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.comm.base import Comm


def exchange_counts(counts: Tensor, comm: Comm, unit: str) -> Tensor:
    """Exchange counts; returns the counts that every rank has for this one, (ranks, counts of each).

    Collective:
        All-to-all of 8 bytes per count for another rank. All ranks must call; the host does not wait for the values.
    """
    each = len(counts) // comm.size
    cuts = [rank * each for rank in range(comm.size + 1)]
    arrived = torch.empty_like(counts)
    comm.all_to_all(counts, arrived, unit=unit, cuts=cuts, out_cuts=cuts).wait()
    by_rank = arrived.view(comm.size, each)
    by_rank[comm.rank] = counts[cuts[comm.rank] : cuts[comm.rank + 1]]  # a rank's own counts are not moved
    return by_rank


def exchange_rows(rows: Tensor, cuts: Sequence[int], out_cuts: Sequence[int], comm: Comm, unit: str) -> Tensor:
    """Exchange rows; returns the rows that every rank has for this one, in rank order.

    Args:
        rows: Rows in the order of their destination ranks, (rows, ...).
        cuts: Offsets of the rows for each rank, and the end.
        out_cuts: Offsets of the rows from each rank, and the end.
        comm: Comm of the axis.
        unit: Path of the module, for traces.

    Collective:
        All-to-all of the rows for other ranks. All ranks must call.
    """
    rows = rows.contiguous()
    width = rows.shape[1:].numel()
    out = rows.new_empty((out_cuts[-1], *rows.shape[1:]))
    if comm.size > 1:
        comm.all_to_all(
            rows.view(-1),
            out.view(-1),
            unit=unit,
            cuts=[cut * width for cut in cuts],
            out_cuts=[cut * width for cut in out_cuts],
        ).wait()
    own = comm.rank
    out[out_cuts[own] : out_cuts[own + 1]] = rows[cuts[own] : cuts[own + 1]]
    return out
