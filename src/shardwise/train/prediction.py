"""What the planner says of a run's step before the first one, for predicted.json."""

from __future__ import annotations

from typing import Any

from shardwise.planner.memory import memory_on
from shardwise.spec.errors import ShardwiseError
from shardwise.spec.text import printable
from shardwise.train.budget import resolved_plan, shape_of, workload_of
from shardwise.train.resolve import RunConfig


def predict_memory(resolved: RunConfig, device_type: str) -> dict[str, Any]:
    """The bytes of the fullest rank over a step.

    Returns:
        ``memory_timeline``: moments in order, each with its name and its bytes by category; or ``reason``: why there is
        none.
    """
    try:
        shape, plan, workload = shape_of(resolved), resolved_plan(resolved), workload_of(resolved)
        found = memory_on(device_type, shape, plan, workload)
    except (ShardwiseError, ArithmeticError, LookupError) as error:
        lines = printable(error, is_block=True).splitlines()
        return {"reason": lines[0] if lines else "the planner does not know this model"}
    return {"memory_timeline": [[name, dict(held)] for name, held in found.timeline]}
