"""A run's plan under other strategies."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from shardwise.spec.errors import PlanError
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.policies import check_offload

#: What says how the model is cut and what is done to its modules: nothing where one process runs copies of it.
_OF_UNITS = ("auto_wrap_policy", "merge_units", "activation_checkpointing", "compile")


def under_strategies(plan: ParallelPlan, strategies: Sequence[str]) -> dict[str, ParallelPlan]:
    """``plan`` under each of ``strategies``, by a name that says what had to be left out, as the strategy has none.

    ``reshard_after_forward`` and ``accumulation`` follow the strategy.

    Raises:
        PlacementError: A strategy is unknown.
    """
    plans: dict[str, ParallelPlan] = {}
    for strategy in strategies:
        if strategy == plan.strategy:
            plans[strategy] = plan
            continue
        other = dataclasses.replace(plan, strategy=strategy, reshard_after_forward="auto", accumulation="auto")
        left_out = [field for field in _foreign(other) if getattr(plan, field) != _default(field)]
        other = dataclasses.replace(other, **{field: _default(field) for field in left_out})
        plans[strategy + "".join(f" -{field}" for field in left_out)] = other
    return plans


def _foreign(plan: ParallelPlan) -> list[str]:
    """Fields that mean nothing to the strategy of ``plan``."""
    fields = [*_OF_UNITS] if plan.placements.is_threaded else []
    fields += [] if plan.placements.shards_optimizer else ["quantized_gather"]
    try:
        check_offload(plan.offload, plan.placements)
    except PlanError:
        fields.append("offload_policy")
    return fields


def _default(field: str) -> Any:
    return next(known.default for known in dataclasses.fields(ParallelPlan) if known.name == field)
