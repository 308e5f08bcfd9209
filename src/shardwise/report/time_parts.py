"""Where the time went: of a step, and of the whole run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.report.chart import Stack, fills_of, stacked_bars
from shardwise.report.element import Content
from shardwise.report.memory_parts import ordered, why_not
from shardwise.report.page import figure, folded, legend, table
from shardwise.report.run import Run, finite
from shardwise.report.scale import seconds

#: Parts of a step in metrics.jsonl, in the order in which they are drawn; what they leave is computation.
STEP = {"exposed_time_s": "exposed communication", "optimizer_time_s": "optimizer", "data_time_s": "data"}
#: Parts of a run in summary.json; what they leave is the start, and whatever else is between steps.
RUN = {"steps_time_s": "steps", "eval_time_s": "held-out loss", "checkpoint_time_s": "checkpoints"}
#: Categories of a predicted time in the order in which they are stacked.
TIME = (
    "compute", "exposed gather", "exposed reduce", "tp", "pp bubble", "cp", "ep", "optimizer", "offload", "host",
)  # fmt: skip
FILLS = {
    "compute": "k0",
    "compute and communication": "k0",
    "exposed communication": "k1",
    "optimizer": "k7",
    "data": "k4",
    "steps": "k0",
    "held-out loss": "k5",
    "checkpoints": "k2",
    "start and the rest": "k8",
}


@dataclass(frozen=True, slots=True)
class Parts:
    """A time and its parts.

    Attributes:
        title: What is divided.
        caption: Over what it is taken.
        whole: Seconds.
        parts: Seconds by name.
    """

    title: str
    caption: str
    whole: float
    parts: Mapping[str, float]


def bars(run: Run, missing: list[str]) -> list[Content]:
    """A bar for the mean step and one for the run."""
    found = [parts for parts in (predicted_parts(run), step_parts(run), run_parts(run)) if parts is not None]
    if not found:
        missing.append("Where the time went: the run's files hold no times.")
    if predicted_parts(run) is None:
        missing.append(f"Predicted time of a step: {why_not(run)}.")
    return [_drawn(parts) for parts in found]


def predicted_parts(run: Run) -> Parts | None:
    """Parts of the step that the planner predicted."""
    given = run.predicted.get("by_category")
    parts = (
        {str(name): held for name, value in given.items() if (held := finite(value))} if isinstance(given, dict) else {}
    )
    if not parts:
        return None
    caption = f"By the planner, before the first step, for {run.predicted.get('device', 'this machine')}."
    return Parts(
        "Predicted parts of a step", caption, sum(parts.values()), {n: parts[n] for n in ordered(list(parts), TIME)}
    )


def step_parts(run: Run) -> Parts | None:
    """Parts of the mean step, the first ones left out."""
    whole = _mean(run.steady, "step_time_s")
    if not whole:
        return None
    known = {name: held for key, name in STEP.items() if (held := _mean(run.steady, key)) is not None}
    rest = "compute" if "exposed communication" in known else "compute and communication"
    skipped = len(run.records) - len(run.steady)
    caption = f"Mean of {len(run.steady):,} steps." + (f" The first {skipped} are left out." if skipped else "")
    return Parts("Parts of a step", caption, whole, {rest: max(0.0, whole - sum(known.values())), **known})


def run_parts(run: Run) -> Parts | None:
    """Parts of the process that ended last: of a resumed run, since then."""
    whole = finite(run.summary.get("wall_time_s"))
    if not whole:
        return None
    known = {name: held for key, name in RUN.items() if (held := finite(run.summary.get(key))) is not None}
    rest = {"start and the rest": max(0.0, whole - sum(known.values()))}
    caption = "From the start of training on rank 0 to its end; of a resumed run, since it was resumed."
    return Parts("Parts of the run", caption, whole, known | rest)


def _mean(records: list[dict[str, Any]], key: str) -> float | None:
    found = [value for record in records if (value := finite(record.get(key))) is not None]
    return sum(found) / len(found) if found else None


def _drawn(found: Parts) -> Content:
    fills = fills_of(list(found.parts), TIME) if "Predicted" in found.title else {n: FILLS[n] for n in found.parts}
    kind = "predicted" if "Predicted" in found.title else "measured"
    bar = [Stack(kind, found.parts, seconds(found.whole))]
    chart = stacked_bars(bar, fills, title=f"{found.title}. {found.caption}", shown=seconds)
    rows = [(name, seconds(held), f"{held / found.whole:.1%}") for name, held in found.parts.items()]
    rows.append(("whole", seconds(found.whole), "100.0%"))
    entries = [(f"{name}, {seconds(held)}", fills[name]) for name, held in found.parts.items()]
    return [
        figure(found.title, [chart, legend(entries)], found.caption),
        folded("Values", table(found.title, ["part", "time", "share"], rows)),
    ]
