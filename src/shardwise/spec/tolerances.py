"""Permitted differences between a plan and a single process: none, or the effect of a different order of additions."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.spec.errors import PlanError
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.policies import FULL_PRECISION

_QUANTIZED = ("quantize_frozen", "quantized_gather", "quantized_reduce")


def check_exact(plan: ParallelPlan, name: str) -> None:
    """Refuse to compare a plan with one process if the two differ by design.

    Raises:
        PlanError: The plan casts, quantizes or drops tokens; ``name`` is the plan's name in the message.
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
    """Whether each rank computes a part of a sum (``tp``, ``cp``, ``ep``), so that the order of additions differs.

    Gradients of parameters in several pipeline stages (tied embeddings) are such sums too, but cannot be seen in the
    plan.
    """
    return max(plan.tp, plan.cp, plan.ep) > 1


@dataclass(frozen=True)
class Tolerance:
    """The permitted distance from one process, after a few steps, of a run whose sums are split.

    Attributes:
        relative: Relative difference of losses and gradient norms.
        absolute: Absolute difference of elements of parameters.
    """

    relative: float
    absolute: float


#: By dtype: the relative difference, and the difference of parameters as a fraction of the learning rate. Adam's update
#: has about the size of the learning rate whatever the size of the gradient, so rounding decides its sign where a
#: gradient is nearly zero. An exact emulation in fp32 differs by 2e-7 and, at a learning rate of 1e-3, by 9e-5.
_SPLIT = {"fp64": (1e-9, 1e-5), "fp32": (1e-5, 0.5)}


def tolerance(dtype: str, lr: float) -> Tolerance:
    """The permitted difference if sums are split: 1e-5 and ``lr / 2`` in fp32, 1e-9 and ``lr / 100,000`` in fp64.

    Raises:
        PlanError: No tolerance is known for a model in ``dtype``.
    """
    if dtype not in _SPLIT:
        raise PlanError(
            f"sums in another order are compared with one process in fp32 and fp64, but the model is in {dtype}.\n"
            "  Compare the model in fp32."
        )
    relative, share = _SPLIT[dtype]
    return Tolerance(relative, share * lr)
