"""The simulated step behind an estimate of time, for drawings: streams over time, or a pipeline's ranks."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.planner.estimate import Estimate
from shardwise.planner.time import timing
from shardwise.sim.pipeline import SimulatedPipeline
from shardwise.sim.step import SimulatedStep

#: Microbatches of a pipeline that are simulated for a drawing.
MOST_MICROBATCHES = 32


def simulated(made: Estimate) -> SimulatedStep | SimulatedPipeline:
    """The step of an estimate; of a pipeline with many microbatches the first :data:`MOST_MICROBATCHES`."""
    step = timing(made.shape, made.plan, made.cluster, made.workload, made.software)
    return step.step() if made.plan.pp == 1 else step.pipeline(MOST_MICROBATCHES)


class Span(NamedTuple):
    """Something that a stream does from one moment to another, in seconds."""

    stream: str
    begin_s: float
    end_s: float
    label: str


def simulated_spans(step: SimulatedStep) -> tuple[list[Span], str]:
    """The spans of a step's last microbatch and the optimizer, and a sentence that says which microbatch that is."""
    timeline, _ = step.microbatches[-1]
    found = [
        Span(span.task.stream, span.begin_s, span.end_s, span.task.label)
        for span in timeline.spans
        if span.end_s > span.begin_s
    ]
    if step.optimizer_s:
        found.append(Span("optimizer", timeline.end_s, timeline.end_s + step.optimizer_s, "optimizer"))
    total = sum(count for _, count in step.microbatches)
    return found, f"Drawn is the last of {total} microbatches, with the optimizer's step." if total > 1 else ""
