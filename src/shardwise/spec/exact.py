"""How near a plan comes to one plain process: equal to the last bit, or as near as sums in another order allow."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.spec.errors import PlanError
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.policies import FULL_PRECISION

_QUANTIZED = ("quantize_frozen", "quantized_gather", "quantized_reduce")


def check_exact(plan: ParallelPlan, name: str) -> None:
    """Refuse to hold a plan against one process where they would differ by design.

    Raises:
        PlanError: It casts, quantizes or drops tokens; ``name`` says which plan.
    """
    if plan.expert_capacity is not None:
        raise PlanError(
            f"{name}: expert_capacity={plan.expert_capacity} drops tokens, but what it is compared with does not.\n"
            "  Compare without: expert_capacity=null."
        )
    fields = ["mp_policy"] if plan.precision != FULL_PRECISION else []
    fields += [field for field in _QUANTIZED if getattr(plan, field) != "none"]
    if fields:
        how = ", ".join(f"{field}={'null' if field == 'mp_policy' else 'none'}" for field in fields)
        raise PlanError(
            f"{name}: {', '.join(fields)} rounds numbers that the process (or the peer) it is compared with does not"
            f" round: they would differ by design.\n  Compare without: {how}."
        )


def splits_sums(plan: ParallelPlan) -> bool:
    """Whether ranks each make a part of a sum that one process makes in one go: the order of additions is another one.

    Parameters that several stages of a pipeline hold (tied embeddings) are such sums too; that only the model knows.
    """
    return max(plan.tp, plan.cp, plan.ep) > 1


@dataclass(frozen=True)
class Tolerance:
    """How far a run whose sums are split may be from one process after a few steps.

    Attributes:
        relative: Of losses and gradient norms.
        absolute: Of the elements of parameters.
    """

    relative: float
    absolute: float


#: By dtype: relative, and of parameters the share of a learning rate. Adam's update has the size of the learning rate
#: whatever the gradient's, so where a gradient is nearly zero rounding alone decides on a part of it. An exact
#: emulation in fp32 differs by 2e-7 and, at a learning rate of 1e-3, by 9e-5.
_SPLIT = {"fp64": (1e-9, 1e-5), "fp32": (1e-5, 0.5)}


def tolerance(dtype: str, lr: float) -> Tolerance:
    """What is allowed where sums are split: at a learning rate of 1e-3 1e-5 and 5e-4 in fp32, 1e-9 and 1e-8 in fp64.

    Raises:
        PlanError: Of a model in ``dtype`` none is known.
    """
    if dtype not in _SPLIT:
        raise PlanError(
            f"sums in another order are compared with one process in fp32 and fp64, but the model is in {dtype}.\n"
            "  Compare the model in fp32."
        )
    relative, share = _SPLIT[dtype]
    return Tolerance(relative, share * lr)
