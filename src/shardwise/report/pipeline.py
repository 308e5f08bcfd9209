"""A pipeline's schedule, drawn: what each rank computes and when."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.report.element import Content
from shardwise.report.lanes import Bar, Lanes
from shardwise.report.page import figure, legend, scroll, table
from shardwise.report.scale import seconds, time_unit
from shardwise.report.svg import picture
from shardwise.sim.pipeline import SimulatedPipeline
from shardwise.spec.schedule import PipelinePolicy
from shardwise.spec.schedule.actions import Action, Kind, Schedule
from shardwise.spec.schedule.simulate import Durations, Timing, simulate

WORDS = {
    Kind.FORWARD: ("F", "forward", "k0"),
    Kind.BACKWARD: ("B", "backward", "k1"),
    Kind.BACKWARD_INPUT: ("B", "backward: gradient of the input", "k1"),
    Kind.BACKWARD_WEIGHT: ("W", "backward: gradients of the weights", "k2"),
}
#: Computations that are drawn at most, and pixels of the drawing.
MOST_CELLS, WIDEST = 6000, 8000


def pipeline_chart(policy: PipelinePolicy, pp: int) -> list[Content]:
    """The schedule where forward and each half of backward take the same time."""
    built = policy.build(pp)
    words = (
        "A row is a rank; time goes from left to right; F3 is the forward of microbatch 3. Forward, and each half of"
        " backward, is drawn to take the same time. What is empty is the bubble."
    )
    return timing_chart(built, simulate(built, Durations()), words)


def simulated_chart(step: SimulatedPipeline, num_microbatches: int) -> list[Content]:
    """A simulated step of a pipeline, with the times of its stages."""
    drawn = step.schedule.num_microbatches
    some = f" Of {num_microbatches} microbatches {drawn} are drawn." if drawn < num_microbatches else ""
    words = f"A row is a rank; F3 is the forward of microbatch 3. What is empty is the bubble.{some}"
    return timing_chart(step.schedule, step.timing, words, unit_s=float(step.timing.unit))


def timing_chart(built: Schedule, timing: Timing, words: str, *, unit_s: float | None = None) -> list[Content]:
    """The chart, what its colours mean, and what the schedule costs.

    Args:
        built: The schedule.
        timing: When each computation runs.
        words: What the chart shows.
        unit_s: Seconds of a unit of time, where they are known.
    """
    kinds = list(dict.fromkeys(span.action.kind for spans in timing.spans for span in spans))
    facts = [
        ("schedule", built.name),
        ("ranks of a pipeline", str(built.num_ranks)),
        ("stages of a rank", str(built.num_virtual_stages)),
        ("microbatches of a step", str(built.num_microbatches)),
        ("bubble, share of the step", f"{float(timing.bubble_share):.1%}"),
    ]
    if unit_s is not None:
        facts.append(("from the first forward to the last backward", seconds(float(timing.makespan))))
    made: list[Content] = []
    if sum(len(spans) for spans in timing.spans) <= MOST_CELLS:
        entries = [(f"{WORDS[kind][0]} {WORDS[kind][1]}", WORDS[kind][2]) for kind in kinds]
        chart = scroll(_drawn(built, timing, unit_s), "Chart of the pipeline")
        made.append(figure("Chart of the pipeline", [chart, legend(entries, is_plain=True)], words))
    made.append(table("The schedule", ["what", "value"], facts))
    return made


def _drawn(built: Schedule, timing: Timing, unit_s: float | None) -> Content:
    spans = [span for held in timing.spans for span in held]
    end = max(span.end for span in spans)
    each = 22 + 7 * (built.num_virtual_stages > 1)
    shortest = sorted(span.end - span.start for span in spans)[len(spans) // 4]
    lanes = Lanes(
        {str(rank): f"rank {rank}" for rank in range(built.num_ranks)},
        end=end,
        width=min(WIDEST, max(1080.0, 80 + each * end / shortest)),
        height=24,
        gap=6,
    )
    bars: Sequence[Bar] = [
        Bar(str(rank), span.start, span.end, _label(built, span.action), WORDS[span.action.kind][2], str(span.action))
        for rank, held in enumerate(timing.spans)
        for span in held
    ]
    parts = [lanes.parts(bars)]
    if unit_s is not None:
        factor, unit = time_unit(end * unit_s)
        parts.append(lanes.axis(unit, factor=factor / unit_s))
    title = (
        f"Schedule {built.name} of {built.num_ranks} ranks and {built.num_microbatches} microbatches: a rank is idle"
        f" for {float(timing.bubble_share):.1%} of the step."
    )
    return picture(lanes.width, lanes.bottom + (28 if unit_s is not None else 6), title, parts)


def _label(built: Schedule, action: Action) -> str:
    """``F3``; with several stages per rank ``F3b``."""
    which = "abcdefgh"[action.stage // built.num_ranks % 8] if built.num_virtual_stages > 1 else ""
    return f"{WORDS[action.kind][0]}{action.microbatch}{which}"
