"""Streams over time: what computes, gathers, reduces when, and what computation waits for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardwise.report.element import Content
from shardwise.report.lanes import Bar, Lanes, merged
from shardwise.report.memory_parts import why_not
from shardwise.report.page import figure, folded, legend, scroll, table
from shardwise.report.run import Run, finite
from shardwise.report.scale import seconds, time_unit
from shardwise.report.svg import picture
from shardwise.sim.step import SimulatedStep
from shardwise.spec.run_files import PROFILE

#: Class of a stream's colour; those of the same words as in the bars of a step's time.
FILLS = {
    "compute": "k0",
    "gather": "k1",
    "reduce": "k2",
    "replicate": "k9",
    "tp": "k3",
    "pp": "k4",
    "cp": "k5",
    "ep": "k6",
    "optimizer": "k7",
    "up": "k8",
    "down": "k8",
    "update": "k7",
    "host": "k10",
    "wait": "k10",
}
WORDS = {
    "gather": "all-gather",
    "reduce": "reduce-scatter",
    "replicate": "all-reduce over replicas",
    "up": "from the host",
    "down": "to the host",
    "update": "updates on the host",
    "host": "launches of the host",
    "wait": "host waits",
}
#: Pixels of a drawing, at most, and pixels that a computation is given if there is room.
WIDEST, EACH = 5000, 16


class Span(NamedTuple):
    """Something that a stream does from one moment to another, in seconds."""

    stream: str
    begin_s: float
    end_s: float
    label: str


def simulated_spans(step: SimulatedStep) -> tuple[list[Span], str]:
    """The spans of a step's last microbatch and the optimizer, and which that is, in words."""
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


def streams_figure(spans: Sequence[Span], title: str, *, waits: Mapping[str, float], note: str = "") -> list[Content]:
    """A lane for each stream, and a table of how long each is busy.

    Args:
        spans: What the streams do.
        title: What is shown.
        waits: Seconds in which computation waits, by what it waits for.
        note: What a reader has to know.
    """
    if not spans:
        return []
    first = min(span.begin_s for span in spans)
    end = max(span.end_s for span in spans) - first
    names = sorted({span.stream for span in spans}, key=lambda name: ([*list(FILLS), name]).index(name))
    most = max(sum(span.stream == name for span in spans) for name in names)
    width = min(WIDEST, max(1080, EACH * most))
    lanes = Lanes({name: WORDS.get(name, name) for name in names}, end=end, width=width, height=24, gap=6)
    bars = merged([_bar(span, first) for span in spans], lanes)
    factor, unit = time_unit(end)
    words = f"{title}: {len(names)} streams over {seconds(end)}. The table below says how long each is busy."
    chart = picture(width, lanes.bottom + 28, words, [lanes.parts(bars), lanes.axis(unit, factor=factor)])
    busy = {name: _busy_s([span for span in spans if span.stream == name]) for name in names}
    rows = [(WORDS.get(name, name), seconds(held), f"{held / end:.1%}") for name, held in busy.items()]
    rows += [(f"computation waits: {name}", seconds(held), f"{held / end:.1%}") for name, held in waits.items() if held]
    entries = [(WORDS.get(name, name), FILLS.get(name, "k8")) for name in names]
    caption = "A row is a stream, a box the work for one unit." + (f" {note}" if note else "")
    return [
        figure(title, [scroll(chart, title), legend(entries, is_plain=True)], caption),
        folded("Values", table(f"Streams: {title}", ["stream", "busy", "share of the time"], rows)),
    ]


def _busy_s(spans: Sequence[Span]) -> float:
    """Seconds in which at least one of the spans runs: on a CPU several collectives of one stream overlap."""
    busy_s, until = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.begin_s):
        busy_s += max(0.0, span.end_s - max(span.begin_s, until))
        until = max(until, span.end_s)
    return busy_s


def _bar(span: Span, first: float) -> Bar:
    words = f"{WORDS.get(span.stream, span.stream)} {span.label}: {seconds(span.end_s - span.begin_s)}"
    return Bar(span.stream, span.begin_s - first, span.end_s - first, span.label, FILLS.get(span.stream, "k8"), words)


def predicted_streams(run: Run, missing: list[str]) -> list[Content]:
    """The planner's step of a run, as streams."""
    found = run.predicted.get("spans")
    spans = [
        Span(str(each[0]), float(each[1]), float(each[2]), str(each[3]))
        for each in (found if isinstance(found, list) else [])
        if isinstance(each, list) and len(each) == 4 and finite(each[1]) is not None and finite(each[2]) is not None
    ]
    if not spans:
        missing.append(f"Predicted streams: {why_not(run)}.")
        return []
    note = str(run.predicted.get("note") or "")
    return streams_figure(spans, "Predicted step, simulated", waits={}, note=note)


def measured_streams(run: Run, missing: list[str]) -> list[Content]:
    """The trace of rank 0 that ``train --profile-steps`` left, as streams."""
    try:
        events = json.loads((run.directory / PROFILE / "rank-0.json").read_text("utf-8"))["traceEvents"]
        names = {each["tid"]: str(each["args"]["name"]) for each in events if each.get("name") == "thread_name"}
        spans = [
            Span(names[each["tid"]], each["ts"] / 1e6, (each["ts"] + each["dur"]) / 1e6, str(each["name"]))
            for each in events
            if each.get("ph") == "X"
        ]
    except (OSError, ValueError, KeyError, TypeError):
        spans = []
    if not spans:
        missing.append("Measured streams: no steps were profiled (`shardwise train --profile-steps 10:12`).")
        return []
    note = "The whole trace is in the folder profile, for ui.perfetto.dev."
    return streams_figure(innermost(spans), "Measured streams of rank 0", waits={}, note=note)


def innermost(spans: Sequence[Span]) -> list[Span]:
    """The spans without those that enclose another of their stream, as the root's forward does its units'."""
    found: list[Span] = []
    for name in dict.fromkeys(span.stream for span in spans):
        row = sorted((span for span in spans if span.stream == name), key=lambda span: (span.begin_s, -span.end_s))
        found += [
            span for span, inner in zip(row, [*row[1:], None], strict=True) if not inner or inner.end_s > span.end_s
        ]
    return found
