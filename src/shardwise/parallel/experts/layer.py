"""Mixtures of experts: their modules, their division over ranks, and the forward that sends tokens to their experts.

Shape suffixes: ``B`` batch, ``T`` sequence, ``N`` tokens, ``K`` choices per token, ``M`` rows that this rank's experts
compute, ``E`` experts, ``C`` width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.comm.base import Comm
from shardwise.parallel.experts.route import Route, combine, dispatch, find_route
from shardwise.parallel.tensor.layer import Experts, ReplacedForward
from shardwise.spec.errors import PlanError
from shardwise.spec.slice import Cut, Slice, set_slice, slice_of
from shardwise.spec.traffic.rows import local_range

#: Modules of transformers that store all experts of a mixture in stacked parameters, with experts on dim 0, and are
#: called with the tokens, the chosen experts of each, and the weights of the choices.
STACKED = {
    "transformers.models.mixtral.modeling_mixtral.MixtralExperts",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts",
}

#: Our mixture, with one module for each expert.
OURS = "shardwise.models.transformer.MixtureOfExperts"


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts in a model.

    Attributes:
        path: Path of the module.
        num_experts: Number of experts on all ranks.
        is_stacked: Whether parameters of all experts are stacked.
    """

    path: str
    module: nn.Module
    num_experts: int
    is_stacked: bool

    def experts(self, size: int, rank: int) -> Iterator[tuple[nn.Module, bool]]:
        """Yield every expert's module (not for stacked ones), and whether ``rank`` of ``size`` stores it."""
        start, stop = local_range(self.num_experts, size, rank)
        for index, expert in enumerate(self.module.get_submodule("experts").children()):
            yield expert, start <= index < stop


def find_mixtures(model: nn.Module, size: int, *, units: Iterable[str] = ()) -> list[Mixture]:
    """Find the mixtures of the full ``model``, for ``size`` ranks of ``ep``; ``units`` are the names of its units."""
    found = []
    for path, module in model.named_modules():
        kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__}
        if OURS in kinds:
            found.append(Mixture(path, module, len(list(module.get_submodule("experts").children())), is_stacked=False))
        elif kinds & STACKED:
            found.append(Mixture(path, module, int(getattr(module, "num_experts")), is_stacked=True))  # noqa: B009 - not of every Module
    if not found:
        known = ", ".join(sorted(name.rpartition(".")[2] for name in (OURS, *STACKED)))
        raise PlanError(
            f"expert parallelism: {type(model).__name__} has no mixture of experts that is known ({known}).\n"
            "  Set ep=1 and leave expert_capacity out, or build our GPT with num_experts."
        )
    for mixture in found:
        if mixture.num_experts % size:
            divisors = ", ".join(str(n) for n in range(1, mixture.num_experts + 1) if mixture.num_experts % n == 0)
            raise PlanError(
                f"ep={size} does not divide the {mixture.num_experts} experts of {mixture.path!r}.\n"
                f"  Set ep to one of {divisors}."
            )
        inside = next((unit for unit in units if unit.startswith(f"{mixture.path}.experts.")), None)
        if inside is not None:
            raise PlanError(
                f"unit {inside!r} lies in the experts of {mixture.path!r}, of which each rank of ep has others.\n"
                f"  Let {mixture.path!r} or what is around it be a unit (auto_wrap_policy)."
            )
    return found


class RoutedMixture(ReplacedForward):
    """The forward of a mixture that sends tokens to their experts on any rank of ``ep``.

    Our mixture receives (B, T, C) and chooses experts itself. A stacked one receives tokens, choices and weights.
    """

    def __init__(self, mixture: Mixture, comm: Comm | None, capacity: float | None) -> None:
        super().__init__(mixture.module, mixture.path, comm)
        self._num_experts = mixture.num_experts
        self._is_stacked = mixture.is_stacked
        self._capacity = capacity
        size, rank = (1, 0) if comm is None else (comm.size, comm.rank)
        self._own = range(*local_range(mixture.num_experts, size, rank))

    def install(self) -> None:
        """Replace the module's forward, or with ``tp`` the inner computation of :class:`Experts`, which sums."""
        outer = self.module.__dict__.get("forward")
        if isinstance(outer, Experts):
            outer.inner = self
        else:
            super().install()

    def __call__(self, x: Tensor, chosen_NK: Tensor | None = None, weights_NK: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, in the shape of ``x``.

        Collective:
            Three all-to-alls on ``ep``: of counts, of rows to experts, and of results back; two in backward.
        """
        x_NC = x.flatten(0, -2)
        if chosen_NK is None or weights_NK is None:
            chosen_NK, weights_NK = self.module.choose(x_NC)
        route = find_route(chosen_NK, self._num_experts, self._capacity, self.comm, self.name)
        rows_MC = dispatch(x_NC, route)
        y_KNC = combine(
            self._run_stacked(rows_MC, route) if self._is_stacked else self._run_modules(rows_MC, route), route
        )
        return (y_KNC * weights_NK.t().unsqueeze(-1)).sum(0).to(x.dtype).view_as(x)

    def _run_modules(self, rows_MC: Tensor, route: Route) -> Tensor:
        """Run this rank's experts on their rows; expert ``i`` has ``route.by_expert[i]`` of them, in order."""
        # An expert without tokens runs on an empty tensor, so that its gradient is zero, not missing, as without ep.
        experts = [self.module.experts[index] for index in self._own]
        if len(experts) == 1:
            return experts[0](rows_MC)
        parts = zip(experts, rows_MC.split(route.by_expert), strict=True)
        return torch.cat([expert(part) for expert, part in parts])

    def _run_stacked(self, rows_MC: Tensor, route: Route) -> Tensor:
        """Run this rank's stacked experts on their rows, by the class's own forward."""
        module = self.module
        if not len(rows_MC):
            # As above, gradients are zero. The class's forward would also detach the rows from the graph, and this rank
            # would not take part in the exchange in backward.
            return rows_MC + sum(parameter[:0].sum() for parameter in module.parameters())
        which_M = torch.arange(len(route.counts), device=rows_MC.device)
        which_M = which_M.repeat_interleave(route.counts, output_size=len(rows_MC))
        ones = rows_MC.new_ones(len(rows_MC), 1)
        return type(module).forward(module, rows_MC, which_M.unsqueeze(-1), ones)


def apply_experts(
    mixtures: Sequence[Mixture], comm: Comm | None, capacity: float | None, *, tp: tuple[int, int] = (0, 1)
) -> str:
    """Keep only this rank's experts in the model, in place. Modules, names and classes stay.

    If each expert is a module, modules of other ranks' experts lose their parameters. Stacked weights are sliced.

    Returns:
        A line for a summary.
    """
    for mixture in mixtures:
        layer = RoutedMixture(mixture, comm, capacity)
        if comm is not None:
            if mixture.is_stacked:
                _slice_stack(mixture, comm, tp)
            else:
                _drop_other_experts(mixture, comm, tp)
        layer.install()
    load = "all tokens" if capacity is None else f"up to {capacity:g} times their even share of a rank's tokens"
    if comm is None:
        return f"experts: take {load}"
    start, stop = local_range(mixtures[0].num_experts, comm.size, comm.rank)
    return (
        f"experts: this rank is {comm.rank + 1} of {comm.size} (ep), with experts {start} to {stop - 1} of"
        f" {mixtures[0].num_experts} of {len(mixtures)} mixture{'s' if len(mixtures) > 1 else ''}; they take {load}"
    )


def own_experts(mixtures: Iterable[Mixture], comm: Comm) -> dict[int, slice | None]:
    """Return the rows of this rank in every expert parameter, by ``id``: a slice, all (``:``), or ``None``."""
    found: dict[int, slice | None] = {}
    for mixture in mixtures:
        if mixture.is_stacked:
            own = slice(*local_range(mixture.num_experts, comm.size, comm.rank))
            found |= {id(parameter): own for parameter in mixture.module.parameters()}
        else:
            for expert, is_here in mixture.experts(comm.size, comm.rank):
                found |= {id(parameter): slice(None) if is_here else None for parameter in expert.parameters()}
    return found


def _drop_other_experts(mixture: Mixture, comm: Comm, tp: tuple[int, int]) -> None:
    for expert, is_here in mixture.experts(comm.size, comm.rank):
        for module in expert.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if is_here:
                    part = slice_of(parameter) or Slice(tuple(parameter.shape), copy=tp[0], copies=tp[1])
                    set_slice(parameter, dataclasses.replace(part, is_expert=True))
                else:
                    parameter.data = parameter.data.new_empty(0)  # frees the memory even if it is still referenced
                    module.register_parameter(name, None)


def _slice_stack(mixture: Mixture, comm: Comm, tp: tuple[int, int]) -> None:
    start, stop = local_range(mixture.num_experts, comm.size, comm.rank)
    for parameter in mixture.module.parameters():
        shape = (mixture.num_experts, *parameter.shape[1:])
        part = slice_of(parameter) or Slice(shape, copy=tp[0], copies=tp[1])
        if parameter.shape == shape:  # otherwise only this rank's part was loaded
            parameter.data = parameter.data[start:stop].clone()
        cuts = Cut(0, ((start, stop),)), *part.cuts
        set_slice(parameter, dataclasses.replace(part, cuts=cuts, is_expert=True))
    mixture.module.__dict__["num_experts"] = stop - start
