"""Rows to the ranks that hold their experts, and back: all-to-alls on ``ep`` as a pair of autograd functions.

=================  =========================================  ====================================================
function           forward                                    backward
=================  =========================================  ====================================================
:func:`dispatch`   each choice's token to its expert's rank   gradients back; those of a token's choices are added
:func:`combine`    results back to where the tokens are       gradients of results to the experts' ranks
=================  =========================================  ====================================================

Shape suffixes: ``N`` tokens of this rank, ``K`` choices of each, ``S`` rows that this rank sends, ``M`` rows that its
experts compute, ``C`` width.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.base import Comm
from shardwise.expert.route import Route


def dispatch(x_NC: Tensor, route: Route) -> Tensor:
    """The rows for this rank's experts, (M, C): by expert, then by rank that sent them, then in its order.

    Collective:
        All-to-all on ``ep``; in backward another one, where ``x_NC`` needs a gradient.
    """
    return _Dispatch.apply(x_NC, route)


def combine(rows_MC: Tensor, route: Route) -> Tensor:
    """The results for this rank's tokens, (K, N, C); zero for choices that were dropped.

    Collective:
        All-to-all on ``ep``; in backward another one.
    """
    return _Combine.apply(rows_MC, route)


def _go(rows_SC: Tensor, route: Route) -> Tensor:
    """Rows sorted by expert to the ranks that hold those, and there in the order of :func:`dispatch`."""
    if route.comm is None:
        return rows_SC
    arrived = _exchanged(rows_SC, route.sent_by_rank, route.received_by_rank, route.comm, route.unit)
    return _transposed(arrived, route.received)


def _return(rows_MC: Tensor, route: Route) -> Tensor:
    """The way back."""
    if route.comm is None:
        return rows_MC
    by_expert = list(zip(*route.received, strict=True))
    home = _transposed(rows_MC, by_expert)
    return _exchanged(home, route.received_by_rank, route.sent_by_rank, route.comm, route.unit)


def _transposed(rows: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    """Runs of ``sizes[i][j]`` rows, put into the order of j, then i."""
    runs = rows.split([size for of_one in sizes for size in of_one])
    count = len(sizes[0])
    return torch.cat([run for j in range(count) for run in runs[j::count]])


def _exchanged(rows: Tensor, sent: Sequence[int], received: Sequence[int], comm: Comm, unit: str) -> Tensor:
    """What the other ranks have sent to this one, in the order of ranks.

    Args:
        rows: In the order of the ranks that they go to.
        sent: Rows for each rank.
        received: Rows from each rank.
        comm: On ``ep``.
        unit: Name of the module that it is for.

    Collective:
        All-to-all on ``ep``.
    """
    rows = rows.contiguous()
    width = rows.shape[1]
    out = rows.new_empty(sum(received), width)
    cuts, out_cuts = (list(itertools.accumulate(counts, initial=0)) for counts in (sent, received))
    comm.all_to_all(
        rows.view(-1),
        out.view(-1),
        unit=unit,
        cuts=[cut * width for cut in cuts],
        out_cuts=[cut * width for cut in out_cuts],
    ).wait()
    own = comm.rank
    out[out_cuts[own] : out_cuts[own + 1]].copy_(rows[cuts[own] : cuts[own + 1]])
    return out


def _placed(rows_SC: Tensor, route: Route) -> Tensor:
    """Rows, sorted by expert, at the places of their choices: (K, N, C), zero where there is none."""
    num_tokens, num_choices = route.shape
    places = rows_SC.new_zeros(num_choices * num_tokens, rows_SC.shape[1])
    return places.index_copy_(0, route.order, rows_SC).view(num_choices, num_tokens, rows_SC.shape[1])


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return _go(x_NC.index_select(0, route.order % max(1, route.shape[0])), route)

    @staticmethod
    def backward(ctx: Any, grad_MC: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _placed(_return(grad_MC, ctx.route), ctx.route).sum(0), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_MC: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return _placed(_return(rows_MC, route), route)

    @staticmethod
    def backward(ctx: Any, grad_KNC: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _go(grad_KNC.flatten(0, 1).index_select(0, ctx.route.order), ctx.route), None
