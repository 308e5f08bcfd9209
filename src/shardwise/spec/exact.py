"""Whether a plan computes what the plain model computes, to the last bit."""

from __future__ import annotations

from shardwise.spec.errors import PlanError
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.precision import FULL_PRECISION

_QUANTIZED = ("quantize_frozen", "quantized_gather", "quantized_reduce")


def check_exact(plan: ParallelPlan, name: str) -> None:
    """Refuse to hold a plan against one process where they would differ by design, or cannot be compared yet.

    Raises:
        PlanError: It casts or quantizes, or has pipeline stages; ``name`` says which plan.
    """
    if plan.pp > 1:
        raise PlanError(
            f"{name}: pp={plan.pp} trains in microbatches through stages, which is not compared with one process here"
            " yet.\n  Compare with pp=1, or two runs of `shardwise train`."
        )
    fields = ["mp_policy"] if plan.precision != FULL_PRECISION else []
    fields += [field for field in _QUANTIZED if getattr(plan, field) != "none"]
    if fields:
        how = ", ".join(f"{field}={'null' if field == 'mp_policy' else 'none'}" for field in fields)
        raise PlanError(
            f"{name}: {', '.join(fields)} rounds numbers that the process (or the peer) it is compared with does not"
            f" round: they would differ by design.\n  Compare without: {how}."
        )
