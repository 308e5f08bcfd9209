"""Where the time went: of a step, and of the whole run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.report.chart import Stack, fills_of, stacked_bars
from shardwise.report.element import Content
from shardwise.report.memory_parts import ordered, why_not
from shardwise.report.page import figure, folded, legend, table
from shardwise.report.run import Run, finite
from shardwise.report.scale import seconds, time_unit

#: Parts of a step in metrics.jsonl, in the order in which they are drawn; what they leave is computation.
STEP = {"exposed_time_s": "exposed communication", "optimizer_time_s": "optimizer", "data_time_s": "data"}
#: Parts of a run in summary.json; what they leave is the start, and whatever else is between steps.
RUN = {"steps_time_s": "steps", "eval_time_s": "held-out loss", "checkpoint_time_s": "checkpoints"}
#: Categories of a predicted time in the order in which they are stacked.
TIME = (
    "compute", "exposed gather", "exposed reduce", "tp", "pp bubble", "cp", "ep", "optimizer", "offload", "host",
)  # fmt: skip
#: Colours of what is measured, or left over; a predicted category has the colour of its place in :data:`TIME`.
FILLS = {
    "compute and communication": "k0",
    "exposed communication": "k1",
    "data": "k10",
    "steps": "k0",
    "held-out loss": "k5",
    "checkpoints": "k2",
    "start and the rest": "k8",
}


@dataclass(frozen=True, slots=True)
class Parts:
    """A time and its parts.

    Attributes:
        name: What stands above its bar, and before its table.
        caption: Over what it is taken.
        parts: Seconds by name.
    """

    name: str
    caption: str
    parts: Mapping[str, float]

    @property
    def whole(self) -> float:
        """Seconds."""
        return sum(self.parts.values())


def bars(run: Run, missing: list[str]) -> list[Content]:
    """A step as predicted and as measured, to one scale, and the run."""
    step = [parts for parts in (predicted_parts(run), step_parts(run)) if parts is not None]
    whole = run_parts(run)
    if not step and whole is None:
        missing.append("Where the time went: the run's files hold no times.")
    if predicted_parts(run) is None:
        missing.append(f"Predicted time of a step: {why_not(run)}.")
    return [*_drawn("Parts of a step", step), *_drawn("Parts of the run", [whole] if whole else [])]


def predicted_parts(run: Run) -> Parts | None:
    """Parts of the step that the planner predicted."""
    given = run.predicted.get("by_category")
    parts = (
        {str(name): held for name, value in given.items() if (held := finite(value))} if isinstance(given, dict) else {}
    )
    if not parts:
        return None
    caption = f"Predicted: by the planner, before the first step, for {run.predicted.get('device', 'this machine')}."
    return Parts("predicted", caption, {name: parts[name] for name in ordered(list(parts), TIME)})


def step_parts(run: Run) -> Parts | None:
    """Parts of the mean step, the first ones left out."""
    whole = run.mean("step_time_s")
    if not whole:
        return None
    known = {name: held for key, name in STEP.items() if (held := run.mean(key)) is not None}
    rest = "compute" if "exposed communication" in known else "compute and communication"
    skipped = len(run.records) - len(run.steady)
    count = len(run.steady)
    caption = f"Measured: mean of {count:,} step{'s' * (count != 1)}."
    caption += f" {skipped:,} before them are left out." * (skipped > 0)
    return Parts("measured", caption, {rest: max(0.0, whole - sum(known.values())), **known})


def run_parts(run: Run) -> Parts | None:
    """Parts of the process that ended last: of a resumed run, since then."""
    whole = finite(run.summary.get("wall_time_s"))
    if not whole:
        return None
    known = {name: held for key, name in RUN.items() if (held := finite(run.summary.get(key))) is not None}
    rest = {"start and the rest": max(0.0, whole - sum(known.values()))}
    caption = "From the start of training on rank 0 to its end; of a resumed run, since it was resumed."
    return Parts("measured", caption, known | rest)


def _drawn(title: str, found: Sequence[Parts]) -> list[Content]:
    if not found:
        return []
    names = list(dict.fromkeys(name for each in found for name in each.parts))
    fills = {
        name: FILLS.get(name) or fills_of([name], TIME)[name] for name in ordered(names, ("compute", *FILLS, *TIME))
    }
    stacks = [Stack(each.name, each.parts, seconds(each.whole)) for each in found]
    caption = " ".join(each.caption for each in found)
    unit_s, _ = time_unit(max(each.whole for each in found))
    chart = stacked_bars(stacks, fills, title=f"{title}. {caption}", unit=unit_s, shown=seconds)
    tables = []
    for each in found:
        rows = [(name, seconds(held), f"{held / each.whole:.1%}") for name, held in each.parts.items()]
        rows.append(("whole", seconds(each.whole), "100.0%"))
        tables.append(table(f"{title}, {each.name}", ["part", "time", "share"], rows))
    entries = []
    for name, colour in fills.items():
        held = [(each.name, seconds(each.parts[name])) for each in found if name in each.parts]
        words = ", ".join(f"{time} {kind}" if len(found) > 1 else time for kind, time in held)
        entries.append((f"{name}, {words}", colour))
    return [figure(title, [chart, legend(entries)], caption), folded("Values", tables)]
