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
    bounds = [rank * each for rank in range(comm.size + 1)]
    received = torch.empty_like(counts)
    comm.all_to_all(counts, received, unit=unit, bounds=bounds, out_bounds=bounds).wait()
    by_rank = received.view(comm.size, each)
    by_rank[comm.rank] = counts[bounds[comm.rank] : bounds[comm.rank + 1]]  # a rank's own counts are not moved
    return by_rank


def exchange_rows(rows: Tensor, bounds: Sequence[int], out_bounds: Sequence[int], comm: Comm, unit: str) -> Tensor:
    """Exchange rows; returns the rows that every rank has for this one, in rank order.

    Args:
        rows: Rows in the order of their destination ranks, (rows, ...).
        bounds: Offsets of the rows for each rank, and the end.
        out_bounds: Offsets of the rows from each rank, and the end.
        comm: Comm of the axis.
        unit: Path of the module, for traces.

    Collective:
        All-to-all of the rows for other ranks. All ranks must call.
    """
    rows = rows.contiguous()
    width = rows.shape[1:].numel()
    out = rows.new_empty((out_bounds[-1], *rows.shape[1:]))
    if comm.size > 1:
        comm.all_to_all(
            rows.view(-1),
            out.view(-1),
            unit=unit,
            bounds=[offset * width for offset in bounds],
            out_bounds=[offset * width for offset in out_bounds],
        ).wait()
    own = comm.rank
    out[out_bounds[own] : out_bounds[own + 1]] = rows[bounds[own] : bounds[own + 1]]
    return out
