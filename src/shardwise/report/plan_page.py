"""The report of plans before a launch: which ones fit, how fast they are, and why."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from shardwise.planner import Estimate
from shardwise.planner.estimate import simulated, simulated_spans
from shardwise.planner.explain import gib, recommendation, seconds, title, why
from shardwise.planner.memory import num_microbatches
from shardwise.report.chart import Stack
from shardwise.report.page import page
from shardwise.report.parts import MEMORY, TIME, Figure, memory_timeline, pipeline, stacked_bars, streams
from shardwise.report.run_page import flat, mesh_of
from shardwise.sim.pipeline import SimulatedPipeline
from shardwise.spec.errors import PlanError
from shardwise.spec.mesh import AXES

#: Maximum number of plans whose bars are drawn.
BARS = 12


def plan_report(estimates: Sequence[Estimate], *, remedies: Sequence[str] = ()) -> str:
    """Return an HTML page about plans for one model on one cluster, best plan first.

    Args:
        estimates: The plans.
        remedies: If none fits: changes with which one would, in words.

    Raises:
        PlanError: There is no plan.
    """
    if not estimates:
        raise PlanError("there is no plan to report.\n  Ask for fewer restrictions, or for more GPUs.")
    best = estimates[0]
    model = getattr(best.shape, "name", "") or f"A model of {best.shape.num_parameters / 1e9:.3g}B parameters"
    return page(
        "plan.html.jinja",
        f"{model} on {best.cluster.num_gpus:,} x {best.cluster.device}",
        plans=estimates,
        best=best,
        reasons=[*([recommendation(estimates)] if best.fits and len(estimates) > 1 else []), *why(best)],
        remedies=remedies,
        title_of=title,
        gib=gib,
        planned_seconds=seconds,
        times=_times(estimates[:BARS]),
        memory=_memory(estimates[:BARS]),
        over_a_step=memory_timeline(best.memory.timeline, format_value=gib),
        num_microbatches=num_microbatches(best.plan, best.workload),
        mesh=mesh_of({axis: getattr(best.plan, axis) for axis in AXES}, best.plan.ep),
        asked={name: flat(dataclasses.asdict(getattr(best, name))) for name in ("workload", "cluster", "plan")},
        **_step(best),
    )


def _step(best: Estimate) -> dict[str, Figure | None]:
    """Return the first plan's simulated step: streams, or the pipeline's ranks."""
    step = simulated(best)
    if isinstance(step, SimulatedPipeline):
        return {"one_stage": None, "schedule": pipeline(step.schedule, step.timing, float(step.timing.unit))}
    spans, note = simulated_spans(step)
    return {"one_stage": streams(spans, step.microbatches[-1][0].exposed, note), "schedule": None}


def _times(plans: Sequence[Estimate]) -> Figure | None:
    """Return bars of the plans that fit, or of the first plan if none fits."""
    numbered = [(f"{index}. {title(each)}", each) for index, each in enumerate(plans, 1)]
    numbered = [(name, each) for name, each in numbered if each.fits] or numbered[:1]
    stacks = [Stack(name, each.time.by_category, seconds(each.step_time_s)) for name, each in numbered]
    longest = 2 * statistics.median(each.step_time_s for _, each in numbered)
    return stacked_bars(stacks, TIME, format_value=seconds, longest=longest)


def _memory(plans: Sequence[Estimate]) -> Figure | None:
    """Return bars of bytes by category, including what a device stores in addition to tensors."""
    stacks = []
    for index, each in enumerate(plans, 1):
        memory = each.memory
        more = {
            "allocator": memory.reserved_bytes - memory.allocated_bytes,
            "context": memory.device_bytes - memory.reserved_bytes,
        }
        stacks.append(Stack(f"{index}. {title(each)}", {**memory.by_category, **more}, gib(memory.device_bytes)))
    limit = plans[0].cluster.device.memory_bytes
    return stacked_bars(stacks, (*MEMORY, "allocator", "context"), format_value=gib, limit=limit, longest=2 * limit)
