"""Timelines as Chrome traces, for https://ui.perfetto.dev and chrome://tracing, with a row for each stream.

The format is Google's "Trace Event Format" (complete events, ``ph: X``; times in microseconds).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from shardwise.sim.pipeline import SimulatedPipeline
from shardwise.sim.step import SimulatedStep
from shardwise.sim.streams import Timeline


class Slice(NamedTuple):
    """A named time interval on a row."""

    row: str
    name: str
    begin_s: float
    end_s: float
    category: str = ""
    facts: Mapping[str, Any] = {}


def slices_of(timeline: Timeline, *, offset_s: float = 0.0) -> list[Slice]:
    """The tasks of a simulated timeline with a duration, and every collective, one row for each stream."""
    found = []
    for begin, end, task in timeline.spans:
        if end <= begin and task.collective is None:
            continue
        facts = {} if task.collective is None else task.collective._asdict()
        name = f"{task.collective.kind} {task.label}" if task.collective is not None else task.label
        found.append(Slice(task.stream, name, begin + offset_s, end + offset_s, task.category or task.stream, facts))
    return found


def chrome_trace(processes: Mapping[str, Iterable[Slice]]) -> str:
    """The JSON of a trace with the slices of each process, by the process's name (``rank 0``, ``simulated``)."""
    events: list[dict[str, Any]] = []
    for process, (name, slices) in enumerate(processes.items()):
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})
        rows: dict[str, int] = {}
        for each in slices:
            if each.row not in rows:
                rows[each.row] = len(rows)
                events.append(_row(process, rows[each.row], each.row))
            events.append(
                {
                    "ph": "X",
                    "pid": process,
                    "tid": rows[each.row],
                    "name": each.name,
                    "cat": each.category or each.row,
                    "ts": round(each.begin_s * 1e6, 3),
                    "dur": round((each.end_s - each.begin_s) * 1e6, 3),
                    "args": dict(each.facts),
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _row(process: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": row, "name": "thread_name", "args": {"name": name}}


def step_trace(step: SimulatedStep | SimulatedPipeline) -> str:
    """The trace of a simulated step as JSON: a row for each stream, or for each rank of a pipeline."""
    if isinstance(step, SimulatedPipeline):
        return chrome_trace({"simulated": _pipeline_slices(step)})
    found: list[Slice] = []
    begin = 0.0
    for number, (timeline, count) in enumerate(step.microbatches):
        of_how_many = f", {count} times" if count > 1 else ""
        found.append(Slice("steps", f"microbatch {number + 1}{of_how_many}", begin, begin + timeline.end_s))
        found += slices_of(timeline, offset_s=begin)
        begin += timeline.end_s
    if step.optimizer_s:
        found.append(Slice("compute", "optimizer", begin, begin + step.optimizer_s, "optimizer"))
    return chrome_trace({"simulated": found})


def _pipeline_slices(step: SimulatedPipeline) -> list[Slice]:
    unit = float(step.timing.unit)
    return [
        Slice(
            f"rank {rank}",
            f"{span.action.kind.replace('_', ' ')} {span.action.microbatch}, stage {span.action.stage}",
            span.start * unit,
            span.end * unit,
            str(span.action.kind),
        )
        for rank, spans in enumerate(step.timing.spans)
        for span in spans
    ]
