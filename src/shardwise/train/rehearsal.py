"""What only the model can say about a plan, found before any process starts."""

from __future__ import annotations

from shardwise.spec.errors import ConfigError, MeshError, PlanError
from shardwise.spec.plan import ParallelPlan
from shardwise.train.resolve import RunConfig


def rehearse(resolved: RunConfig, world_size: int, local_size: int | None = None) -> None:
    """Apply the plan to the model on meta where the plan names parts of the model, or divides it by them.

    Degrees against heads, layers and experts, names of modules: everything that ``sw.parallelize`` would refuse in the
    workers. Loads torch for such plans only.

    Raises:
        PlanError, MeshError, ConfigError: The plan does not fit the model.
    """
    if not _depends_on_model(resolved.plan):
        return
    import torch

    from shardwise.api.dry_run import rehearse as apply
    from shardwise.train.build import build_model

    try:
        apply(
            lambda: build_model(resolved, torch.device("meta")),
            resolved.plan,
            world_size=world_size,
            ranks_per_machine=local_size,
        )
    except (PlanError, MeshError, ConfigError):
        raise
    except Exception:  # noqa: BLE001, S110  a model that cannot be built on meta is refused, if at all, where it is built
        pass


def _depends_on_model(plan: ParallelPlan) -> bool:
    if plan.placements.is_threaded:
        return False  # replicas of the whole model
    by_name = (plan.ignored, plan.row_sharded, plan.tp_plan, plan.precision.parts, plan.recompute)
    divides = max(plan.tp, plan.pp, plan.cp, plan.ep) > 1 or plan.routes_tokens
    return divides or any(by_name) or plan.auto_wrap_policy not in {"auto", "none"} or plan.quantize_frozen != "none"
