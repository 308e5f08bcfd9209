"""Which rows go to which expert: the choices of this rank's tokens in the order in which they travel.

Shape suffixes: ``N`` tokens, ``K`` choices of each, ``S`` rows that are sent, ``E`` experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm.base import Comm
from shardwise.comm.record import RecordComm
from shardwise.spec.routing import capacity, even_counts, local_range


@dataclass(frozen=True, eq=False)
class Route:
    """One call of a mixture on this rank.

    Attributes:
        unit: Path of the module, in traces.
        comm: On ``ep``; ``None`` where this rank holds all experts.
        shape: Tokens and choices of each.
        order: The choices that are sent, by expert; choice ``k`` of token ``n`` is number ``k * N + n``.
        sent: Rows for each expert.
        received: By rank of ``ep``, rows that it sends to each of this rank's experts.
    """

    unit: str
    comm: Comm | None
    shape: tuple[int, int]
    order: Tensor  # (S,)
    sent: list[int]
    received: list[list[int]]

    @property
    def sent_by_rank(self) -> list[int]:
        """Rows for each rank of ``ep``."""
        size = len(self.received)
        ranges = [local_range(len(self.sent), size, rank) for rank in range(size)]
        return [sum(self.sent[start:stop]) for start, stop in ranges]

    @property
    def received_by_rank(self) -> list[int]:
        """Rows from each rank of ``ep``."""
        return [sum(counts) for counts in self.received]

    @property
    def by_expert(self) -> list[int]:
        """Rows for each of this rank's experts."""
        return [sum(counts) for counts in zip(*self.received, strict=True)]


@torch.no_grad()
def find_route(chosen_NK: Tensor, num_experts: int, factor: float | None, comm: Comm | None, unit: str) -> Route:
    """Sort the choices by expert, drop what is over the capacity, and tell the ranks what to expect.

    First choices come before second ones, each in the order of tokens; an expert takes the first that fit.

    Args:
        chosen_NK: The experts that each token has chosen, best first.
        num_experts: All of them.
        factor: Of the capacity (``ParallelPlan.expert_capacity``).
        comm: On ``ep``.
        unit: Name of the module that it is for.

    Collective:
        All-to-all of the counts on ``ep``; the host waits for them.
    """
    num_tokens, num_choices = chosen_NK.shape
    limit = capacity(factor, num_tokens, num_choices, num_experts)
    by_choice = chosen_NK.t().reshape(-1)
    order_S = by_choice.argsort(stable=True)
    if chosen_NK.is_meta or isinstance(comm, RecordComm):  # without values, or peers: as if tokens chose evenly
        sent = even_counts(len(by_choice), num_experts, limit)
        counts_E = torch.empty(num_experts, dtype=torch.int64, device=chosen_NK.device)
        order_S = order_S[: sum(sent)]
    else:
        counts_E = torch.bincount(by_choice, minlength=num_experts)
        if limit is not None:
            starts_E = counts_E.cumsum(0) - counts_E
            place_S = torch.arange(len(order_S), device=order_S.device) - starts_E[by_choice[order_S]]
            order_S = order_S[place_S < limit]
            counts_E = counts_E.clamp(max=limit)
        sent = counts_E.tolist()
    received = [sent] if comm is None else _exchange_counts(counts_E, sent, comm, unit)
    return Route(unit, comm, (num_tokens, num_choices), order_S, sent, received)


def _exchange_counts(counts_E: Tensor, sent: list[int], comm: Comm, unit: str) -> list[list[int]]:
    each = len(sent) // comm.size
    cuts = [rank * each for rank in range(comm.size + 1)]
    arrived = torch.empty_like(counts_E)
    comm.all_to_all(counts_E, arrived, unit=unit, cuts=cuts, out_cuts=cuts).wait()
    start, stop = local_range(len(sent), comm.size, comm.rank)
    if isinstance(comm, RecordComm):
        return [sent[start:stop]] * comm.size  # all ranks alike
    received = arrived.view(comm.size, each).tolist()
    received[comm.rank] = sent[start:stop]
    return received
