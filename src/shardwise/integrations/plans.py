"""What plans other people's trainers can run."""

from __future__ import annotations

from shardwise.spec.errors import PlanError
from shardwise.spec.plan import ParallelPlan


def check_samples(plan: ParallelPlan, trainer: str) -> None:
    """Refuse a plan that divides the computation of a sample over ranks: the trainer gives each rank other samples.

    Raises:
        PlanError: It does.
    """
    for axis in ("tp", "pp", "cp"):
        if getattr(plan, axis) > 1:
            raise PlanError(
                f"{axis}={getattr(plan, axis)}: {trainer} gives every rank samples of its own.\n"
                "  Use a data-parallel plan here, or `shardwise train` and sw.train_step for tp, pp and cp."
            )
