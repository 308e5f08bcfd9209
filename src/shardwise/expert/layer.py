"""Forwards of mixtures whose experts are divided.

Shape suffixes: ``B`` batch, ``T`` sequence, ``N`` tokens, ``K`` choices of each, ``M`` rows that this rank's experts
compute, ``E`` experts, ``C`` width.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from shardwise.comm.base import Comm
from shardwise.comm.forward import Forward
from shardwise.expert.exchange import combine, dispatch
from shardwise.expert.find import Mixture
from shardwise.expert.route import Route, find_route


class ExpertLayer(Forward):
    """A mixture's.

    Args:
        mixture: The module, held weakly.
        comm: On ``ep``; ``None`` where this rank holds all experts.
        capacity: ``ParallelPlan.expert_capacity``.
    """

    def __init__(self, mixture: Mixture, comm: Comm | None, capacity: float | None) -> None:
        super().__init__(mixture.module, mixture.path)
        self._num_experts = mixture.num_experts
        self._capacity = capacity
        self.comm = comm

    @abstractmethod
    def _compute(self, rows_MC: Tensor, route: Route) -> Tensor:
        """Rows through this rank's experts, ``route.by_expert`` of them for each, in order."""

    def _mix(self, x_NC: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """The weighted sum of what each token's experts give, (N, C).

        Collective:
            Three all-to-alls on ``ep``: of counts, of rows to experts, and back; two in backward.
        """
        route = find_route(chosen_NK, self._num_experts, self._capacity, self.comm, self.name)
        y_KNC = combine(self._compute(dispatch(x_NC, route), route), route)
        return (y_KNC * weights_NK.t().unsqueeze(-1)).sum(0).to(x_NC.dtype)


class Mix(ExpertLayer):
    """Our mixture. Of the experts on other ranks only the empty modules are here."""

    def __init__(self, mixture: Mixture, comm: Comm | None, capacity: float | None) -> None:
        super().__init__(mixture, comm, capacity)
        size, rank = (1, 0) if comm is None else (comm.size, comm.rank)
        self._own = [index for index, (_, is_here) in enumerate(mixture.experts(size, rank)) if is_here]

    def __call__(self, x_BTC: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        module = self.module
        x_NC = x_BTC.flatten(0, -2)
        top_NK, chosen_NK = module.router(x_NC).topk(module.experts_per_token, dim=-1)
        return self._mix(x_NC, chosen_NK, top_NK.softmax(dim=-1)).view_as(x_BTC)

    def _compute(self, rows_MC: Tensor, route: Route) -> Tensor:
        # An expert without tokens runs on none of them: its gradient is zero, not missing, as in the dense form.
        experts = self.module.experts
        parts = zip(self._own, rows_MC.split(route.by_expert), strict=True)
        return torch.cat([experts[index](part) for index, part in parts])


class StackedMix(ExpertLayer):
    """Experts in stacked parameters, of which this rank has a part: computed by the class's own forward."""

    def install(self) -> None:
        """Be the module's forward, or where ranks of ``tp`` share every expert what that calls: tokens stay apart."""
        around = self.module.__dict__.get("forward")
        if hasattr(around, "inner"):
            around.inner = self  # of tensor.layer.Experts, which adds up once a token, after its experts were mixed
        else:
            super().install()

    def __call__(self, states_NC: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Tokens, the experts that each has chosen, and the weights of the choices, to (N, C)."""
        return self._mix(states_NC, chosen_NK, weights_NK)

    def _compute(self, rows_MC: Tensor, route: Route) -> Tensor:
        module = self.module
        if not len(rows_MC):
            # As above: the gradients are zero. The class's forward would also cut the rows off from the graph, and
            # this rank would not take part in backward's exchange.
            return rows_MC + sum(parameter[:0].sum() for parameter in module.parameters())
        which_M = torch.arange(len(route.counts), device=rows_MC.device)
        which_M = which_M.repeat_interleave(route.counts, output_size=len(rows_MC))
        ones = rows_MC.new_ones(len(rows_MC), 1)
        return type(module).forward(module, rows_MC, which_M.unsqueeze(-1), ones)
