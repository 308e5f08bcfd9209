"""Which rows go to which expert: the choices of this rank's tokens in the order in which they travel.

Shape suffixes: ``N`` tokens, ``K`` choices of each, ``S`` rows that are sent, ``E`` experts, ``R`` ranks of ``ep``.
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
        counts: Rows for each of this rank's experts, on the device.
    """

    unit: str
    comm: Comm | None
    shape: tuple[int, int]
    order: Tensor  # (S,)
    sent: list[int]
    received: list[list[int]]
    counts: Tensor  # (E,), those of this rank

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
        All-to-all of the counts on ``ep``; the host waits for them, once.
    """
    num_tokens, num_choices = chosen_NK.shape
    limit = capacity(factor, num_tokens, num_choices, num_experts)
    sorted_S, order_S = chosen_NK.t().reshape(-1).sort(stable=True)
    starts_E = torch.searchsorted(sorted_S, torch.arange(num_experts + 1, dtype=sorted_S.dtype, device=sorted_S.device))
    counts_E = starts_E.diff()
    if limit is not None:
        counts_E = counts_E.clamp(max=limit)
    arrived_RE = counts_E.unsqueeze(0) if comm is None else _exchange_counts(counts_E, comm, unit)
    if chosen_NK.is_meta or isinstance(comm, RecordComm):  # without values, or peers: as if tokens chose evenly
        sent = even_counts(len(sorted_S), num_experts, limit)
        start, stop = (0, num_experts) if comm is None else local_range(num_experts, comm.size, comm.rank)
        received = [sent[start:stop]] * len(arrived_RE)
        arrived_RE = torch.tensor(received, device=arrived_RE.device)
        order_S = order_S[: sum(sent)]
    else:  # the one time that the host waits for the device
        numbers = torch.cat([counts_E, arrived_RE.flatten()]).tolist()
        sent, each = numbers[:num_experts], arrived_RE.shape[1]
        received = [numbers[at : at + each] for at in range(num_experts, len(numbers), each)]
        if sum(sent) < len(order_S):  # the rows that fit are a run of each expert's
            skipped_E = starts_E[:-1] - (counts_E.cumsum(0) - counts_E)
            places_S = torch.arange(sum(sent), device=order_S.device)
            order_S = order_S[places_S + skipped_E.repeat_interleave(counts_E, output_size=sum(sent))]
    return Route(unit, comm, (num_tokens, num_choices), order_S, sent, received, arrived_RE.sum(0))


def _exchange_counts(counts_E: Tensor, comm: Comm, unit: str) -> Tensor:
    """By rank of ``ep``, the rows that it sends to each of this rank's experts."""
    each = len(counts_E) // comm.size
    cuts = [rank * each for rank in range(comm.size + 1)]
    arrived = torch.empty_like(counts_E)
    comm.all_to_all(counts_E, arrived, unit=unit, cuts=cuts, out_cuts=cuts).wait()
    arrived_RE = arrived.view(comm.size, each)
    arrived_RE[comm.rank] = counts_E[cuts[comm.rank] : cuts[comm.rank + 1]]  # what is a rank's own is not moved
    return arrived_RE
