"""Routing of tokens to experts and of results back: all-to-alls on ``ep`` as a pair of autograd functions.

=================  =========================================  ====================================================
function           forward                                    backward
=================  =========================================  ====================================================
:func:`dispatch`   each choice's token to its expert's rank   gradients back; those of a token's choices are added
:func:`combine`    results back to the tokens' ranks          gradients of results to the experts' ranks
=================  =========================================  ====================================================

Shape suffixes: ``N`` tokens of this rank, ``K`` choices per token, ``S`` rows that this rank sends, ``M`` rows that its
experts compute, ``E`` experts, ``R`` ranks of ``ep``, ``C`` width.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.base import Comm
from shardwise.comm.record import RecordComm
from shardwise.comm.rows import exchange_counts, exchange_rows
from shardwise.spec.traffic.rows import capacity, even_counts, local_range


@dataclass(frozen=True, eq=False)
class Route:
    """The routing of one call of a mixture on this rank.

    Attributes:
        unit: Path of the module, for traces.
        comm: Comm of ``ep``; ``None`` if this rank stores all experts.
        shape: Number of tokens, and of choices per token.
        order: The choices that are sent, sorted by expert, (S,); choice ``k`` of token ``n`` is number ``k * N + n``.
        sent: Number of rows that this rank sends to each expert.
        received: By rank of ``ep``, number of rows that it sends to each of this rank's experts.
        counts: Number of rows for each of this rank's experts, (E,), on the device.
    """

    unit: str
    comm: Comm | None
    shape: tuple[int, int]
    order: Tensor
    sent: list[int]
    received: list[list[int]]
    counts: Tensor

    @property
    def sent_by_rank(self) -> list[int]:
        """Number of rows that this rank sends to each rank of ``ep``."""
        size = len(self.received)
        ranges = [local_range(len(self.sent), size, rank) for rank in range(size)]
        return [sum(self.sent[start:stop]) for start, stop in ranges]

    @property
    def received_by_rank(self) -> list[int]:
        """Number of rows that this rank receives from each rank of ``ep``."""
        return [sum(counts) for counts in self.received]

    @property
    def by_expert(self) -> list[int]:
        """Number of rows for each of this rank's experts."""
        return [sum(counts) for counts in zip(*self.received, strict=True)]


@torch.no_grad()
def find_route(chosen_NK: Tensor, num_experts: int, factor: float | None, comm: Comm | None, unit: str) -> Route:
    """Sort the choices by expert, drop those over the capacity, and exchange the numbers of rows.

    First choices come before second ones, each in the order of tokens. An expert drops the last ones over its capacity.

    Collective:
        All-to-all of the counts on ``ep``, for which the host waits.
    """
    num_tokens, num_choices = chosen_NK.shape
    limit = capacity(factor, num_tokens, num_choices, num_experts)
    sorted_S, order_S = chosen_NK.t().reshape(-1).sort(stable=True)
    starts_E = torch.searchsorted(sorted_S, torch.arange(num_experts + 1, dtype=sorted_S.dtype, device=sorted_S.device))
    counts_E = starts_E.diff()
    if limit is not None:
        counts_E = counts_E.clamp(max=limit)
    received_RE = counts_E.unsqueeze(0) if comm is None else exchange_counts(counts_E, comm, unit)
    if chosen_NK.is_meta or isinstance(comm, RecordComm):  # without values, or peers: assume an even choice
        sent = even_counts(len(sorted_S), num_experts, limit)
        start, stop = (0, num_experts) if comm is None else local_range(num_experts, comm.size, comm.rank)
        received = [sent[start:stop]] * len(received_RE)
        received_RE = torch.tensor(received, device=received_RE.device)
        order_S = order_S[: sum(sent)]
    else:  # the only time that the host waits for the device
        numbers = torch.cat([counts_E, received_RE.flatten()]).tolist()
        sent, each = numbers[:num_experts], received_RE.shape[1]
        received = [numbers[at : at + each] for at in range(num_experts, len(numbers), each)]
        if sum(sent) < len(order_S):  # the rows that are kept are the first ones of each expert
            skipped_E = starts_E[:-1] - (counts_E.cumsum(0) - counts_E)
            places_S = torch.arange(sum(sent), device=order_S.device)
            order_S = order_S[places_S + skipped_E.repeat_interleave(counts_E, output_size=sum(sent))]
    return Route(unit, comm, (num_tokens, num_choices), order_S, sent, received, received_RE.sum(0))


def dispatch(x_NC: Tensor, route: Route) -> Tensor:
    """Return the rows for this rank's experts, (M, C): sorted by expert, then by sending rank, then in its order.

    Collective:
        All-to-all on ``ep``; in backward another one, if ``x_NC`` needs a gradient.
    """
    return _Dispatch.apply(x_NC, route)


def combine(rows_MC: Tensor, route: Route) -> Tensor:
    """Return the results for this rank's tokens, (K, N, C); zero for choices that were dropped.

    Collective:
        All-to-all on ``ep``; in backward another one.
    """
    return _Combine.apply(rows_MC, route)


def _send_to_experts(rows_SC: Tensor, route: Route) -> Tensor:
    """Send rows, sorted by expert, to the experts' ranks; returns received rows in the order of :func:`dispatch`."""
    if route.comm is None:
        return rows_SC
    bounds, out_bounds = _bounds(route.sent_by_rank), _bounds(route.received_by_rank)
    return _transposed(exchange_rows(rows_SC, bounds, out_bounds, route.comm, route.unit), route.received)


def _send_back(rows_MC: Tensor, route: Route) -> Tensor:
    """Undo :func:`_send_to_experts`."""
    if route.comm is None:
        return rows_MC
    returned = _transposed(rows_MC, list(zip(*route.received, strict=True)))
    return exchange_rows(returned, _bounds(route.received_by_rank), _bounds(route.sent_by_rank), route.comm, route.unit)


def _bounds(counts: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(counts, initial=0))


def _transposed(rows: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    """Reorder runs of ``sizes[i][j]`` rows by j, then i; returns ``rows`` itself if that is their order."""
    if len(sizes) == 1 or len(sizes[0]) == 1:
        return rows
    runs = rows.split([size for of_one in sizes for size in of_one])
    count = len(sizes[0])
    return torch.cat([run for j in range(count) for run in runs[j::count]])


def _scatter_to_choices(rows_SC: Tensor, route: Route) -> Tensor:
    """Scatter rows, sorted by expert, to their choices: (K, N, C), zero for dropped choices."""
    num_tokens, num_choices = route.shape
    make = rows_SC.new_empty if len(route.order) == num_choices * num_tokens else rows_SC.new_zeros
    by_choice = make(num_choices * num_tokens, rows_SC.shape[1])
    return by_choice.index_copy_(0, route.order, rows_SC).view(num_choices, num_tokens, rows_SC.shape[1])


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return _send_to_experts(x_NC.index_select(0, route.order % max(1, route.shape[0])), route)

    @staticmethod
    def backward(ctx: Any, grad_MC: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _scatter_to_choices(_send_back(grad_MC, ctx.route), ctx.route).sum(0), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_MC: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return _scatter_to_choices(_send_back(rows_MC, route), route)

    @staticmethod
    def backward(ctx: Any, grad_KNC: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _send_to_experts(grad_KNC.flatten(0, 1).index_select(0, ctx.route.order), ctx.route), None
