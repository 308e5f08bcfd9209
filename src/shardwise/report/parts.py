"""Figures that several pages show: times and bytes by part, memory over a step, streams, a pipeline's schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwise.planner.estimate import Span
from shardwise.report.chart import Bar, Chart, Stack, bar_chart, column_chart, fills_of, gantt_chart
from shardwise.report.numbers import seconds, unit_of
from shardwise.spec.schedule.actions import Kind, Schedule
from shardwise.spec.schedule.simulate import Timing

#: The values of a figure for a template by name, including ``chart``.
Figure = dict[str, Any]
#: Categories of memory, and of a predicted time, in stacking order.
MEMORY = (
    "parameters", "gradients", "optimizer", "gathered", "reduce", "activations", "logits", "host", "average", "buffers",
)  # fmt: skip
TIME = (
    "compute", "exposed gather", "exposed reduce", "tp", "pp bubble", "cp", "ep", "optimizer", "offload", "host",
)  # fmt: skip
#: Colours of measured parts and of the remainder; the colour of a predicted category is that of its place above.
MEASURED = {
    "measured": 8, "compute and communication": 0, "exposed communication": 1, "data": 10, "steps": 0,
    "held-out loss": 5, "checkpoints": 2, "start and the rest": 8,
}  # fmt: skip
#: Titles and colours of streams; the colours are the same as those of the titles in a step's time.
STREAMS = {
    "compute": ("compute", 0), "gather": ("all-gather", 1), "reduce": ("reduce-scatter", 2),
    "replicate": ("all-reduce over replicas", 9), "tp": ("tp", 3), "pp": ("pp", 4), "cp": ("cp", 5), "ep": ("ep", 6),
    "optimizer": ("optimizer", 7), "up": ("from the host", 8), "down": ("to the host", 8),
    "update": ("updates on the host", 7), "host": ("launches of the host", 10), "wait": ("host waits", 10),
}  # fmt: skip
ACTIONS = {
    Kind.FORWARD: ("F", "forward", 0),
    Kind.BACKWARD: ("B", "backward", 1),
    Kind.BACKWARD_INPUT: ("B", "backward: gradient of the input", 1),
    Kind.BACKWARD_WEIGHT: ("W", "backward: gradients of the weights", 2),
}
#: Minimum and maximum width in pixels; maximum number of computations of a pipeline that are drawn.
NARROWEST, WIDEST, MOST_ACTIONS = 950.0, 8000.0, 5000


def stacked_bars(
    stacks: Sequence[Stack], order: Sequence[str], *, format_value: Callable[[float], str], **more: Any
) -> Figure | None:
    """Make a figure of bars with parts in the order and colours of ``order``; ``None`` if all are empty."""
    fills = fills_of([name for stack in stacks for name, amount in stack.parts.items() if amount > 0], order)
    fills = dict(sorted(((name, MEASURED.get(name, fill)) for name, fill in fills.items()), key=lambda item: item[1]))
    return with_values(bar_chart(stacks, fills, format_value=format_value, **more), stacks, fills, format_value)


def with_values(
    chart: Chart | None, stacks: Sequence[Stack], fills: Mapping[str, int], format_value: Callable[[float], str]
) -> Figure | None:
    """Combine a chart of bars or columns with its colours, and a row of values for each bar: name, parts, sum."""
    rows = [
        [stack.name, *(format_value(stack.parts.get(n, 0)) for n in fills), stack.note or format_value(stack.total)]
        for stack in stacks
    ]
    return {"chart": chart, "stacks": stacks, "fills": fills, "rows": rows} if chart else None


def memory_timeline(
    moments: Sequence[tuple[str, Mapping[str, float]]], *, format_value: Callable[[float], str]
) -> Figure | None:
    """Make a figure of bytes by category at the moments of a step; ``None`` for fewer than two moments."""
    if len(moments) < 2:
        return None
    stacks = [Stack(f"{index}. {name}", parts) for index, (name, parts) in enumerate(moments, 1)]
    fills = fills_of([name for stack in stacks for name, amount in stack.parts.items() if amount > 0], MEMORY)
    edges = [index + 0.5 for index in range(len(stacks) + 1)]
    chart = column_chart(edges, stacks, fills, "moment of the step", format_value)
    return with_values(chart, stacks, fills, format_value)


def streams(spans: Sequence[Span], waits: Mapping[str, float] | None = None, note: str = "") -> Figure | None:
    """Make a figure with a row for each stream, and each stream's busy time; ``None`` without spans.

    ``waits`` are seconds in which computation waits, by cause; ``note`` is a sentence about the spans.
    """
    if not spans:
        return None
    first = min(span.begin_s for span in spans)
    total_s = max(span.end_s for span in spans) - first or 1e-9
    names = fills_of([span.stream for span in spans], [*STREAMS])
    by_stream = {name: [span for span in spans if span.stream == name] for name in names}
    titles = {name: STREAMS.get(name, (name, 8)) for name in by_stream}
    width = min(WIDEST, max(NARROWEST, 16.0 * max(map(len, by_stream.values()))))
    bars: list[Bar] = []
    for name, active in by_stream.items():
        for span in sorted(active, key=lambda span: span.begin_s):
            start, stop, (word, fill) = span.begin_s - first, span.end_s - first, titles[name]
            if bars and bars[-1].row == name and stop - bars[-1].start < total_s / 1000:  # too narrow
                bars[-1] = bars[-1]._replace(stop=max(stop, bars[-1].stop), text=f"{word}: several")
            else:
                bars.append(Bar(name, start, stop, span.label, fill, f"{word} {span.label}: {seconds(stop - start)}"))
    rows_by_stream = {name: word for name, (word, _) in titles.items()}
    times = [(titles[name][0], _busy_s(active)) for name, active in by_stream.items()]
    times += [(f"computation waits: {name}", wait_s) for name, wait_s in (waits or {}).items() if wait_s > 0]
    rows = [(name, seconds(time_s), f"{time_s / total_s:.1%}") for name, time_s in times]
    chart = gantt_chart(rows_by_stream, bars, unit=unit_of(total_s, seconds), width=width)
    return {"chart": chart, "legend": list(titles.values()), "whole_s": total_s, "rows": rows, "note": note}


def _busy_s(spans: Sequence[Span]) -> float:
    """Return the seconds in which at least one span is active; on a CPU collectives of one stream may overlap."""
    busy_s, until = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.begin_s):
        busy_s += max(0.0, span.end_s - max(span.begin_s, until))
        until = max(until, span.end_s)
    return busy_s


def pipeline(built: Schedule, timing: Timing, unit_s: float | None = None) -> Figure:
    """Make a figure of a schedule, without chart if it is too large; ``unit_s`` is the duration of a unit of time."""
    found = {"built": built, "timing": timing, "unit_s": unit_s, "chart": None}
    actions = [(rank, span, *ACTIONS[span.action.kind]) for rank, row in enumerate(timing.spans) for span in row]
    legend = list(dict.fromkeys((f"{letter} {word}", fill) for _, _, letter, word, fill in actions))
    if len(actions) > MOST_ACTIONS:
        return found
    is_deep = built.num_virtual_stages > 1
    bars = []
    for rank, span, letter, word, fill in actions:
        stage, microbatch = span.action.stage, span.action.microbatch
        label = f"{letter}{microbatch}" + ("abcdefgh"[stage // built.num_ranks % 8] if is_deep else "")
        start, stop = (at * (unit_s or 1.0) for at in (span.start, span.end))
        text = f"stage {stage}, microbatch {microbatch}: {word}"
        bars.append(Bar(str(rank), start, stop, label, fill, text))
    end, shortest = max(bar.stop for bar in bars), sorted(bar.stop - bar.start for bar in bars)[len(bars) // 4]
    width = min(WIDEST, max(NARROWEST, (32 if is_deep else 25) * end / shortest))
    rows = {str(rank): f"rank {rank}" for rank in range(built.num_ranks)}
    chart = gantt_chart(rows, bars, unit=unit_of(end, seconds) if unit_s else (1.0, ""), width=width)
    order = [(rank, " ".join(bar.label for bar in bars if bar.row == rank)) for rank in rows]
    return found | {"chart": chart, "legend": legend, "order": order}
