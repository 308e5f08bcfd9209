"""Reports of one run and comparisons of several: the values for ``run.html.jinja`` and ``compare.html.jinja``."""

from __future__ import annotations

import json
import os.path
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shardwise.planner.estimate import Span
from shardwise.report import parts
from shardwise.report.chart import Line, Stack, column_chart, fills_of, line_chart
from shardwise.report.numbers import finite, numbers_of, percent, seconds
from shardwise.report.page import page
from shardwise.report.run import Run
from shardwise.spec.errors import MeshError, PlanError
from shardwise.spec.mesh import AXES, Mesh
from shardwise.spec.run_files import PROFILE
from shardwise.spec.schedule.builders import pipeline_policy
from shardwise.spec.schedule.simulate import Durations, simulate
from shardwise.spec.text import size

#: Maximum number of rows of a table of values.
ROWS = 12
#: Parts of a step in metrics.jsonl, and of a run in summary.json. The remainder is computation, or the start of the run
#: and time between steps.
STEP = {"exposed_time_s": "exposed communication", "optimizer_time_s": "optimizer", "data_time_s": "data"}
RUN = {"steps_time_s": "steps", "eval_time_s": "held-out loss", "checkpoint_time_s": "checkpoints"}


class Curve(NamedTuple):
    """A number of the records: its key in ``metrics.jsonl``, its title, the format of a value, and its axis."""

    key: str
    title: str
    format_value: Callable[[float], str] = "{:,.6g}".format
    from_zero: bool = False
    may_be_log: bool = False

    def line(self, run: Run, name: str = "") -> Line:
        """Return a run's line. The held-out loss skips steps without a value, and begins with that of summary.json."""
        is_known = run.has(self.key) and (self.key != "tokens_per_s" or run.last("tokens") != 0)
        steps, values = (run.steps, run.values(self.key)) if is_known else ([], [])
        if self is HELD_OUT:
            before = (0, finite(run.summary.get("eval_loss_first")))
            points = [each for each in (before, *zip(steps, values, strict=True)) if each[1] is not None]
            steps, values = [step for step, _ in points], [value for _, value in points]
        return Line(name or self.key, steps, values)


LOSS, HELD_OUT = Curve("loss", "Loss"), Curve("eval_loss", "Held-out loss")
CURVES = (
    Curve("lr", "Learning rate", from_zero=True),
    Curve("tokens_per_s", "Throughput, tokens per second", from_zero=True),
    Curve("grad_norm", "Gradient norm before clipping", may_be_log=True, from_zero=True),
    Curve("step_time_s", "Time of a step", seconds, from_zero=True, may_be_log=True),
    Curve("mfu", "Share of the devices' peak (MFU)", percent, from_zero=True),
    Curve("loss_scale", "Loss scale (fp16)", may_be_log=True),
)


def run_page(run: Run) -> str:
    """Return an HTML page about a run."""
    held_out = HELD_OUT.line(run, "held out")
    losses = {LOSS: [LOSS.line(run, "training")], HELD_OUT: [held_out] * bool(held_out.xs)}
    figures = [curve_figure(losses), *(curve_figure({curve: [curve.line(run)]}) for curve in CURVES)]
    return page(
        "run.html.jinja",
        f"Run {run.name}",
        run=run,
        training=[figure for figure in figures if figure],
        peak=parts.stacked_bars(memory_stacks(run), parts.MEMORY, format_value=size) if run.predicted_bytes else None,
        predicted_memory=parts.memory_timeline(_moments(run), format_value=size),
        measured_memory=_measured_memory(run),
        by_unit=numbers_of(run.memory.get("peak_by_unit")),
        **_times(run),
        predicted_streams=_predicted_streams(run),
        measured_streams=_measured_streams(run),
        schedule=_pipeline(run),
        mesh=mesh_of(run.plan.get("mesh"), run.parallel.get("ep", 1)),
        units=_units(run),
        configuration=flat(run.config),
        environment=flat(run.environment),
    )


def curve_figure(lines_by_curve: Mapping[Curve, Sequence[Line]]) -> parts.Figure | None:
    """Draw curves in one chart, with the first number's title and axis; include evenly spaced values of each number."""
    curve = next(iter(lines_by_curve))
    lines = [line for drawn in lines_by_curve.values() for line in drawn]
    chart = line_chart(lines, curve.format_value, from_zero=curve.from_zero, may_be_log=curve.may_be_log)
    if chart is None:
        return None
    values = [value for line in lines_by_curve[curve] for value in line.ys if value is not None]
    extremes = [curve.format_value(most(values)) for most in (min, max)] if values else []
    least_and_greatest = f", least {extremes[0]}, greatest {extremes[1]}" if values else ""
    tables = []
    for each, curves in lines_by_curve.items():
        drawn = [line for line in curves if line.xs]
        steps = sorted({step for line in drawn for step in line.xs})
        last = len(steps) - 1
        chosen = [steps[at * last // (ROWS - 1)] for at in range(ROWS)] if last >= ROWS else steps
        some = f", {len(chosen)} of {len(steps):,} steps" if len(chosen) < len(steps) else ""
        by_step = [dict(zip(line.xs, line.ys, strict=True)) for line in drawn]
        rows = [[step, *(values.get(step) for values in by_step)] for step in chosen]
        tables += [(f"{each.title}{some}", ["step", *(line.name for line in drawn)], rows)] if rows else []
    return {
        "title": curve.title,
        "chart": chart,
        "described": f"{curve.title}: {len(values)} values{least_and_greatest}.",
        "gaps": sum(line.ys.count(None) for line in lines),
        "tables": tables,
    }


def memory_stacks(run: Run, before: str = "") -> list[Stack]:
    """Return bars of the predicted and the measured peak, as far as they are known."""
    peaks = {"predicted": run.predicted_bytes, "measured": {"measured": run.peak_bytes or 0.0}}
    stacks = [Stack(before + name, peak) for name, peak in peaks.items()]
    return [stack._replace(note=size(stack.total)) for stack in stacks if stack.total > 0]


def _moments(run: Run) -> list[tuple[str, dict[str, float]]]:
    found = run.predicted.get("memory_timeline")
    return [
        (str(moment[0]), numbers_of(moment[1]))
        for moment in (found if isinstance(found, list) else [])
        if isinstance(moment, list) and len(moment) == 2 and isinstance(moment[1], dict)
    ]


def _measured_memory(run: Run) -> parts.Figure | None:
    """Return measured bytes of rank 0 over one step: the engine's constant bytes, and temporary ones."""
    engine_bytes, moments, counts = (run.memory.get(key) for key in ("held_bytes", "seconds", "bytes"))
    if not (isinstance(engine_bytes, dict) and isinstance(moments, list) and isinstance(counts, list)):
        return None
    is_whole = all(finite(value) is not None for value in (*engine_bytes.values(), *moments, *counts))
    if not is_whole or len(moments) != len(counts) or len(moments) < 2:
        return None
    temporary = "activations and other tensors of the step"
    constant = {name: float(engine_bytes[name]) for name in parts.MEMORY if engine_bytes.get(name)}
    fills = fills_of(list(constant), parts.MEMORY) | {temporary: parts.MEMORY.index("activations")}
    base, edges = sum(constant.values()), [1000.0 * moment for moment in (*moments, 2 * moments[-1] - moments[-2])]
    stacks = [
        Stack(f"{ms:.1f}", constant | {temporary: max(0.0, count - base)}, size(count))
        for ms, count in zip(edges, counts, strict=False)
    ]
    last = len(stacks) - 1
    chosen = sorted({round(at * last / (ROWS - 1)) for at in range(ROWS)} | {counts.index(max(counts))})
    chart = column_chart(edges, stacks, fills, "ms", size)
    return parts.with_values(chart, [stacks[at] for at in chosen], fills, size)


def _times(run: Run) -> dict[str, parts.Figure | None]:
    """Return parts of a step, predicted and measured (mean without the first steps), and parts of the last process."""
    step_times = {name: times for key, name in STEP.items() if (times := run.mean(key)) is not None}
    run_times = {name: times for key, name in RUN.items() if (times := finite(run.summary.get(key))) is not None}
    remainder = "compute" if "exposed communication" in step_times else "compute and communication"
    found: dict[str, parts.Figure | None] = {}
    for key, groups in {
        "step_times": {
            "predicted": numbers_of(run.predicted.get("by_category")),
            "measured": _with_rest(run.mean("step_time_s"), step_times, remainder),
        },
        "run_times": {"measured": _with_rest(finite(run.summary.get("wall_time_s")), run_times, "start and the rest")},
    }.items():
        stacks = [Stack(name, times, seconds(sum(times.values()))) for name, times in groups.items() if times]
        found[key] = parts.stacked_bars(stacks, (*parts.TIME, *parts.MEASURED), format_value=seconds)
    return found


def _with_rest(total_s: float | None, known: Mapping[str, float], remainder: str) -> Mapping[str, float]:
    return {remainder: max(0.0, total_s - sum(known.values())), **known} if total_s else {}


def _predicted_streams(run: Run) -> parts.Figure | None:
    """Return the planner's predicted step as streams."""
    found = run.predicted.get("spans")
    spans = [
        Span(str(each[0]), float(each[1]), float(each[2]), str(each[3]))
        for each in (found if isinstance(found, list) else [])
        if isinstance(each, list) and len(each) == 4 and finite(each[1]) is not None and finite(each[2]) is not None
    ]
    return parts.streams(spans, note=str(run.predicted.get("note") or ""))


def _measured_streams(run: Run) -> parts.Figure | None:
    """Return rank 0's trace from ``train --profile-steps`` as streams."""
    try:
        events = json.loads((run.directory / PROFILE / "rank-0.json").read_text("utf-8"))["traceEvents"]
        names = {each["tid"]: str(each["args"]["name"]) for each in events if each.get("name") == "thread_name"}
        spans = [
            Span(names[each["tid"]], each["ts"] / 1e6, (each["ts"] + each["dur"]) / 1e6, str(each["name"]))
            for each in events
            if each.get("ph") == "X"
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return parts.streams(innermost(spans), note="The whole trace is in the folder profile, for ui.perfetto.dev.")


def innermost(spans: Sequence[Span]) -> list[Span]:
    """Return the spans that enclose no other span of their stream; the root's forward, for example, encloses units'."""
    found: list[Span] = []
    for name in dict.fromkeys(span.stream for span in spans):
        row = sorted((span for span in spans if span.stream == name), key=lambda span: (span.begin_s, -span.end_s))
        found += [s for s, inner in zip(row, [*row[1:], None], strict=True) if not inner or inner.end_s > s.end_s]
    return found


def _pipeline(run: Run) -> parts.Figure | str:
    """Return the schedule if forward and each half of backward take the same time; or why there is none."""
    pp = run.parallel.get("pp", 1)
    if not isinstance(pp, int) or pp < 2:
        return "the plan has one stage"
    try:
        policy = pipeline_policy(run.parallel.get("pipeline"))
        count = policy.num_microbatches or (run.plan.get("batch") or {}).get("accumulation")
        fields = {"schedule": policy.schedule, "num_virtual_stages": policy.num_virtual_stages}
        built = pipeline_policy(fields | {"num_microbatches": count}).build(pp)
    except (PlanError, TypeError, AttributeError):
        return "its schedule cannot be read from plan.json"
    return parts.pipeline(built, simulate(built, Durations()))


def mesh_of(sizes: Any, ep: int) -> Mesh | None:
    """Return the mesh of the given sizes if they are valid."""
    try:
        return Mesh(**{axis: sizes.get(axis, 1) for axis in AXES}, ep=ep)
    except (MeshError, TypeError, AttributeError):
        return None


def _units(run: Run) -> list[dict[str, Any]]:
    """Return names, elements and owned elements of the units, if plan.json has all of them."""
    units = run.plan.get("units")
    valid = units if isinstance(units, list) and all(isinstance(unit, dict) for unit in units) else []
    owned = [(unit.get("owned"), unit.get("numel")) for unit in valid]
    are_numbers = all(isinstance(each, list) and None not in map(finite, (*each, numel)) for each, numel in owned)
    return valid if are_numbers else []


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Flatten a nested mapping to text by ``section.field``."""
    found: dict[str, str] = {}
    for key, value in values.items():
        is_nested = isinstance(value, dict) and value
        found |= flat(value, f"{before}{key}.") if is_nested else {f"{before}{key}": _text(value)}
    return found


def _text(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value) or "none"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def compare_page(runs: Sequence[Run]) -> str:
    """Return an HTML page that compares runs."""
    letters = [chr(ord("A") + index) if index < 26 else f"#{index + 1}" for index in range(len(runs))]
    names = [f"{letter} {name}" for letter, name in zip(letters, _names(runs), strict=True)]
    figures = [
        curve_figure({curve: [curve.line(run, letter) for letter, run in zip(letters, runs, strict=True)]})
        for curve in (LOSS, HELD_OUT, *CURVES)
    ]
    stacks = [stack for letter, run in zip(letters, runs, strict=True) for stack in memory_stacks(run, f"{letter}, ")]
    return page(
        "compare.html.jinja",
        f"{len(runs)} runs compared",
        letters=letters,
        runs=list(zip(names, runs, strict=True)),
        training=[figure for figure in figures if figure],
        memory=parts.stacked_bars(stacks, parts.MEMORY, format_value=size),
        settings=_differences([flat(run.config) for run in runs]),
        environments=_differences([flat(run.environment) for run in runs]),
    )


def _names(runs: Sequence[Run]) -> list[str]:
    """Return the folders' names, extended by parts of the path if they are not unique."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    paths = [run.directory.resolve() for run in runs]
    shared = os.path.commonpath([path.parent for path in paths])
    return [os.path.relpath(path, shared) for path in paths]


def _differences(found: Sequence[dict[str, str]]) -> list[list[str]] | None:
    """Return settings that differ between runs; ``None`` if there are no settings."""
    keys = list(dict.fromkeys(key for values in found for key in values))
    rows = [[key, *(values.get(key, "not set") for values in found)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1] if keys else None
