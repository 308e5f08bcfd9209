"""Which modules of a model are mixtures of experts, and whether they can be divided."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from shardwise.spec.errors import PlanError
from shardwise.spec.routing import local_range

#: Modules of transformers that hold all experts of a mixture in stacked parameters, experts first, and are called with
#: the tokens, the experts that each chose, and the weights of the choices.
STACKED = {
    "transformers.models.mixtral.modeling_mixtral.MixtralExperts",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts",
}

#: Our own, which holds a module for each expert.
OURS = "shardwise.models.transformer.MixtureOfExperts"


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts in a model.

    Attributes:
        path: Of its module.
        module: The module.
        num_experts: All of them.
        is_stacked: They lie in stacked parameters.
    """

    path: str
    module: nn.Module
    num_experts: int
    is_stacked: bool

    def experts(self, size: int, rank: int) -> Iterator[tuple[nn.Module, bool]]:
        """Every expert's module where each has its own, and whether ``rank`` of ``size`` holds it."""
        start, stop = local_range(self.num_experts, size, rank)
        for index, expert in enumerate(self.module.get_submodule("experts").children()):
            yield expert, start <= index < stop


def find_mixtures(model: nn.Module, size: int, *, units: Iterable[str] = ()) -> list[Mixture]:
    """The mixtures of ``model``, for ``size`` ranks of ``ep``.

    Args:
        model: The whole model.
        size: Ranks of ``ep``.
        units: Names of the model's units.

    Raises:
        PlanError: There are none, or they cannot be divided so.
    """
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
