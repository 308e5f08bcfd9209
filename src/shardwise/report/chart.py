"""Data of charts. ``charts.js`` contains the specification of each kind of chart, which Vega-Lite draws.

Fields have fixed names, so that no content of a run is interpreted as an expression. Colours are variables of
``page.css``, with a light and a dark set: ``--k0`` to ``--k10`` fill areas, ``--l0`` to ``--l5`` draw lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from shardwise.report.numbers import finite, percent, thin, unit_of

Chart = dict[str, Any]

NUM_FILLS = 11
#: Number of columns that a curve is thinned to, and the maximum number of points that are marked.
COLUMNS, MARKED = 150, 20


class Line(NamedTuple):
    """A curve; ``None`` in ``ys`` interrupts it."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]


class Stack(NamedTuple):
    """A stacked bar, with parts by name."""

    name: str
    parts: Mapping[str, float]
    note: str = ""

    @property
    def total(self) -> float:
        """The sum of its parts."""
        return sum(self.parts.values())


class Bar(NamedTuple):
    """A bar in a row from ``start`` to ``stop``; ``fill`` is the number of its colour."""

    row: str
    start: float
    stop: float
    label: str
    fill: int
    text: str


def fills_of(names: Sequence[str], order: Sequence[str]) -> dict[str, int]:
    """Return a colour for each name: that of its place in ``order``, so that it is the same in every chart."""
    known = list(dict.fromkeys([*order, *names]))
    return {name: index % NUM_FILLS for index, name in enumerate(known) if name in names}


def line_chart(
    lines: Sequence[Line], format_value: Callable[[float], str], *, from_zero: bool, may_be_log: bool
) -> Chart | None:
    """Make a chart of curves over steps; ``None`` if no curve has a finite value.

    The vertical axis has the unit of ``format_value``, begins at 0 if ``from_zero``, and is logarithmic if
    ``may_be_log`` and values differ by more than a factor of 100.
    """
    values = [y for line in lines for each in line.ys if (y := finite(each)) is not None]
    if not values:
        return None
    low, high = min(values), max(values)
    is_log = may_be_log and low > 0 and high / low > 100
    factor, unit = unit_of(high, format_value)
    rows = []
    for line in lines:
        points = thin(line.xs, line.ys, columns=COLUMNS)
        for before, point, after in zip([None, *points], points, [*points[1:], None], strict=False):
            x, y = point or before or (0, 0)
            is_marked = len(points) <= MARKED or before is after is None
            rows.append({"x": x, "y": y / factor if point else None, "name": line.name, "is_marked": is_marked})
    xs = [x for line in lines for x in line.xs]
    return {
        "kind": "lines",
        "rows": rows,
        "names": [line.name for line in lines],  # with those without points, so that colours agree in all charts
        "drawn": [line.name for line in lines if line.xs],
        "unit": unit,
        "format": "~%" if format_value is percent else "~s" if high >= 1000 and not unit else ".6~g",
        "domain": [min(xs), max(xs)] if min(xs) < max(xs) else [xs[0] - 0.5, xs[0] + 0.5],
        "scale": {"type": "log"} if is_log else {"zero": from_zero},
    }


def bar_chart(
    stacks: Sequence[Stack],
    fills: Mapping[str, int],
    *,
    format_value: Callable[[float], str],
    limit: float = 0,
    longest: float = math.inf,
) -> Chart | None:
    """Make a chart of horizontal bars with one scale in the unit of ``format_value``; ``None`` if all are empty.

    ``fills`` has the colour of each part, from left to right. ``limit`` is a value to mark. ``longest`` is the maximum
    of the axis: longer bars are cut off there.
    """
    most = max([stack.total for stack in stacks] + [limit])
    if not most > 0:
        return None
    factor, unit = unit_of(min(most, longest), format_value)
    rows = [
        {"bar": stack.name, "value": part / factor, "order": index} | _fill(fill, f"{name}: {format_value(part)}")
        for stack in stacks
        for index, (name, fill) in enumerate(fills.items())
        if (part := stack.parts.get(name, 0)) > 0
    ]
    return {
        "kind": "bars",
        "rows": rows,
        "notes": [{"bar": stack.name, "note": stack.note} for stack in stacks],
        "unit": unit,
        "scale": {"domain": [0, min(most, longest) / factor], "nice": most <= longest},
        "limit": limit / factor,
    }


def _fill(fill: int, text: str) -> dict[str, str | int]:
    return {"fill": fill, "text": text}


def column_chart(
    edges: Sequence[float],
    stacks: Sequence[Stack],
    fills: Mapping[str, int],
    x_name: str,
    format_value: Callable[[float], str],
) -> Chart | None:
    """Make a chart of adjacent columns with stacked parts, the first fill at the bottom; ``None`` if all are empty.

    ``edges`` are the starts of the columns and the end of the last one, in the unit ``x_name``.
    """
    highest = max(stack.total for stack in stacks)
    if not highest > 0:
        return None
    factor, unit = unit_of(highest, format_value)
    rows = [
        {"x": start, "x2": stop, "value": part / factor, "order": index}
        | _fill(fill, f"{stack.name}, {name}: {format_value(part)}")
        for (start, stop), stack in zip(pairwise(edges), stacks, strict=True)
        for index, (name, fill) in enumerate(fills.items())
        if (part := stack.parts.get(name, 0)) > 0
    ]
    return {"kind": "columns", "rows": rows, "unit": unit, "x": x_name, "domain": [edges[0], edges[-1]]}


def gantt_chart(names: Mapping[str, str], bars: Sequence[Bar], *, unit: tuple[float, str], width: float) -> Chart:
    """Make a chart of time from left to right in ``unit`` (size and name), with a row for each of ``names``, by key.

    ``width`` is in pixels; labels are shown if they fit.
    """
    end, (factor, title) = max(bar.stop for bar in bars), unit
    rows = [
        {"lane": names[bar.row], "x": bar.start / factor, "x2": bar.stop / factor}
        | {"label": bar.label if 7 * len(bar.label) + 2 <= (bar.stop - bar.start) / end * width else ""}
        | _fill(bar.fill, bar.text)
        for bar in bars
    ]
    titles = list(names.values())
    return {"kind": "lanes", "rows": rows, "lanes": titles, "unit": title, "end": end / factor, "width": round(width)}
