"""The planner's prediction of a run's step, made before the first one, for predicted.json."""

from __future__ import annotations

from typing import Any

from shardwise.planner.memory import memory_on
from shardwise.planner.simulated import simulated, simulated_spans
from shardwise.sim.step import SimulatedStep
from shardwise.spec.errors import ShardwiseError
from shardwise.spec.text import printable
from shardwise.train.config.resolve import RunConfig
from shardwise.train.predicted.time import PredictedStep
from shardwise.train.predicted.workload import resolved_plan, shape_of, workload_of


def describe(resolved: RunConfig, device_type: str, step: PredictedStep) -> dict[str, Any]:
    """The content of predicted.json: memory and time of a step, or why they are not known (``reason``)."""
    return _memory(resolved, device_type) | _time(step)


def _memory(resolved: RunConfig, device_type: str) -> dict[str, Any]:
    """``memory_timeline``: the moments of a step, each with its name and the fullest rank's bytes by category."""
    try:
        shape, plan, workload = shape_of(resolved), resolved_plan(resolved), workload_of(resolved)
        found = memory_on(device_type, shape, plan, workload)
    except (ShardwiseError, ArithmeticError, LookupError) as error:
        lines = printable(error, is_block=True).splitlines()
        return {"memory_reason": lines[0] if lines else "the planner does not know this model"}
    return {"memory_timeline": [[name, dict(held)] for name, held in found.timeline]}


def _time(step: PredictedStep) -> dict[str, Any]:
    """Seconds by category, and what the streams do: ``spans`` of stream, begin, end, unit."""
    made = step.made
    if made is None:
        return {"reason": step.reason}
    values = {
        "device": made.cluster.device.name,
        "step_time_s": made.step_time_s,
        "by_category": dict(made.time.by_category),
        "sent_bytes": sum(made.time.sent_bytes.values()) or None,  # not known on a calibrated machine
    }
    try:
        drawn = simulated(made)
    except (ShardwiseError, ArithmeticError, LookupError) as error:
        return values | {"reason": printable(error)}
    if not isinstance(drawn, SimulatedStep):
        return values | {"reason": "inside the stages of a pipeline streams are not drawn"}
    spans, note = simulated_spans(drawn)
    return values | {"spans": [list(span) for span in spans], "note": note}
