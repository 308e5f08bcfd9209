"""A pipeline's schedule, drawn: what each rank computes and when."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.report.element import Content
from shardwise.report.lanes import Bar, Lanes
from shardwise.report.page import figure, legend, scroll, table
from shardwise.report.scale import seconds
from shardwise.report.svg import picture
from shardwise.spec.schedule import PipelinePolicy
from shardwise.spec.schedule.actions import Action, Kind, Schedule
from shardwise.spec.schedule.simulate import Durations, Timing, simulate

WORDS = {
    Kind.FORWARD: ("F", "forward", "k0"),
    Kind.BACKWARD: ("B", "backward", "k1"),
    Kind.BACKWARD_INPUT: ("B", "backward: gradient of the input", "k1"),
    Kind.BACKWARD_WEIGHT: ("W", "backward: gradients of the weights", "k2"),
}
#: Microbatches and ranks that are drawn at most; more would be stripes.
MOST_CELLS = 6000


def pipeline_chart(policy: PipelinePolicy, pp: int, *, forward_s: float | None = None) -> list[Content]:
    """The chart, what its colours mean, and what the schedule costs.

    Args:
        policy: The schedule.
        pp: Ranks of a pipeline.
        forward_s: Seconds of one stage's forward of one microbatch, where they are known.
    """
    built = policy.build(pp)
    timing = simulate(built, Durations())
    kinds = list(dict.fromkeys(span.action.kind for spans in timing.spans for span in spans))
    facts = [
        ("schedule", built.name),
        ("ranks of a pipeline", str(pp)),
        ("stages of a rank", str(built.num_virtual_stages)),
        ("microbatches of a step", str(built.num_microbatches)),
        ("bubble, share of the step", f"{float(timing.bubble_share):.1%}"),
    ]
    if forward_s is not None:
        facts.append(("one forward of one stage", seconds(forward_s)))
    made: list[Content] = []
    if sum(len(spans) for spans in timing.spans) <= MOST_CELLS:
        caption = (
            "A row is a rank; time goes from left to right; F3 is the forward of microbatch 3. Forward, and each half"
            " of backward, is drawn to take the same time. What is empty is the bubble."
        )
        entries = [(f"{WORDS[kind][0]} {WORDS[kind][1]}", WORDS[kind][2]) for kind in kinds]
        chart = scroll(_drawn(built, timing), "Chart of the pipeline")
        made.append(figure("Chart of the pipeline", [chart, legend(entries, is_plain=True)], caption))
    made.append(table("The schedule", ["what", "value"], facts))
    return made


def _drawn(built: Schedule, timing: Timing) -> Content:
    end = max(spans[-1].end for spans in timing.spans)
    lanes = Lanes(
        {str(rank): f"rank {rank}" for rank in range(built.num_ranks)},
        end=end,
        width=max(1080.0, 80 + (22.0 + 7 * (built.num_virtual_stages > 1)) * end),
        height=24,
        gap=6,
    )
    bars: Sequence[Bar] = [
        Bar(str(rank), span.start, span.end, _label(built, span.action),
            WORDS[span.action.kind][2], str(span.action))
        for rank, spans in enumerate(timing.spans)
        for span in spans
    ]  # fmt: skip
    title = (
        f"Schedule {built.name} of {built.num_ranks} ranks and {built.num_microbatches} microbatches: a rank is idle"
        f" for {float(timing.bubble_share):.1%} of the step."
    )
    return picture(lanes.width, lanes.bottom + 6, title, lanes.parts(bars))


def _label(built: Schedule, action: Action) -> str:
    """``F3``; with several stages per rank ``F3b``."""
    which = "abcdefgh"[action.stage // built.num_ranks % 8] if built.num_virtual_stages > 1 else ""
    return f"{WORDS[action.kind][0]}{action.microbatch}{which}"
