"""What plans other people's trainers can run."""

from __future__ import annotations

from collections.abc import Collection

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


def check_ddp_options(names: Collection[str], strategy: str) -> None:
    """Refuse options of ``DistributedDataParallel``, which no model is wrapped in here.

    Raises:
        PlanError: There are some.
    """
    if names:
        raise PlanError(
            f"{strategy} got {', '.join(sorted(names))}: DistributedDataParallel is not used here.\n"
            "  Leave them out: layers that a step does not use need no option, and the rest is in sw.ParallelPlan."
        )
