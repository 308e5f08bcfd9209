"""Curves over the steps of one run or of several: loss, learning rate, speed, norm; each with its values as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.report.chart import Line, line_chart
from shardwise.report.element import Content, Element, el
from shardwise.report.page import figure, folded, legend, table
from shardwise.report.run import Run, finite
from shardwise.report.scale import seconds, short
from shardwise.report.svg import stroke

#: Rows of the table below a chart, at most.
ROWS = 12


@dataclass(frozen=True, slots=True)
class Curve:
    """A number of the records.

    Attributes:
        key: Its name in ``metrics.jsonl``.
        title: What it is.
        shown: Text of a value.
        from_zero: Its axis begins at 0.
        may_be_log: Its axis may be logarithmic.
        caption: Words below.
        is_sparse: It is the held-out loss: most records lack it, and its first value, of step 0, is in summary.json.
    """

    key: str
    title: str
    shown: Callable[[float], str] = short
    from_zero: bool = False
    may_be_log: bool = False
    caption: str | None = None
    is_sparse: bool = False


def _share(value: float) -> str:
    return f"{100 * value:.3g}%"


LOSS = Curve("loss", "Loss")
HELD_OUT = Curve("eval_loss", "Held-out loss", is_sparse=True)
CURVES = (
    Curve("lr", "Learning rate", from_zero=True),
    Curve("tokens_per_s", "Throughput, tokens per second", from_zero=True),
    Curve("grad_norm", "Gradient norm before clipping", may_be_log=True, from_zero=True),
    Curve("step_time_s", "Time of a step", seconds, from_zero=True, may_be_log=True),
    Curve("mfu", "Share of the devices' peak (MFU)", _share, from_zero=True),
    Curve("loss_scale", "Loss scale (fp16)", may_be_log=True),
)


def loss_figure(run: Run) -> Element | None:
    """Training loss and, where it was taken, the held-out loss."""
    lines = [Line("training", run.steps, run.values("loss"), 0)]
    held_out = Line("held out", *_points(run, HELD_OUT), 1, has_marks=True)
    if held_out.xs:
        lines.append(held_out)
    chart = line_chart(lines, title=_described(run, LOSS), has_names=False)
    if chart is None:
        return None
    entries = [(line.name, stroke(line.index)) for line in lines]
    key = legend(entries, is_lines=True) if held_out.xs else None
    tables = [_values([run], curve) for curve in (LOSS, HELD_OUT) if _points(run, curve)[0]]
    return el("div", figure("Loss", [chart, key]), folded("Values", tables))


def curve_figure(runs: Sequence[Run], curve: Curve, names: Sequence[str] = ()) -> Element | None:
    """One number of one run, or of several on top of each other."""
    lines = [
        Line(names[index] if names else run.name, *_points(run, curve), index, has_marks=curve.is_sparse)
        for index, run in enumerate(runs)
        if run.has(curve.key)
    ]
    title = _described(runs[0], curve) if len(runs) == 1 else f"{curve.title} of {len(lines)} runs over the steps."
    chart = line_chart(lines, title=title, from_zero=curve.from_zero, may_be_log=curve.may_be_log, shown=curve.shown)
    if chart is None:
        return None
    gaps = 0 if curve.is_sparse else sum(line.ys.count(None) for line in lines)
    broken = f"No finite value at {gaps} steps: the line is broken there." if gaps else None
    return el(
        "div", figure(curve.title, [chart], curve.caption or broken), folded("Values", _values(runs, curve, names))
    )


def _points(run: Run, curve: Curve) -> tuple[list[int], list[float | None]]:
    """Steps and values; of a sparse curve only those that there are."""
    if not curve.is_sparse:
        return run.steps, run.values(curve.key)
    before = [(0, finite(run.summary.get("eval_loss_first")))]
    found = [(s, v) for s, v in (*before, *zip(run.steps, run.values(curve.key), strict=True)) if v is not None]
    return [step for step, _ in found], [value for _, value in found]


def _described(run: Run, curve: Curve) -> str:
    found = [value for value in run.values(curve.key) if value is not None]
    if not found:
        return curve.title
    ends = f"from {curve.shown(found[0])} to {curve.shown(found[-1])}" if len(found) > 1 else curve.shown(found[0])
    return (
        f"{curve.title} over {len(found)} steps: {ends}, least {curve.shown(min(found))},"
        f" greatest {curve.shown(max(found))}. The values are in a table below."
    )


def _values(runs: Sequence[Run], curve: Curve, names: Sequence[str] = ()) -> Element:
    """Some of the steps, evenly spread, the first and the last among them."""
    steps = sorted({step for run in runs for step in _points(run, curve)[0]})
    shown = steps if len(steps) <= ROWS else [steps[index * (len(steps) - 1) // (ROWS - 1)] for index in range(ROWS)]
    by_step = [dict(zip(*_points(run, curve), strict=True)) for run in runs]
    rows: list[list[Content]] = [[str(step), *(_exact(values.get(step)) for values in by_step)] for step in shown]
    some = f", {len(shown)} of {len(steps):,} steps" if len(shown) < len(steps) else ""
    return table(f"{curve.title}{some}", ["step", *(names or [curve.key])], rows)


def _exact(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.6g}"
