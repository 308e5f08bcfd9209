"""Charts that fill the width they are given: lines, stacked columns, stacked bars.

Places along the width are percentages, and curves are drawn in a box that is stretched; words keep their size. So one
picture serves a phone and a wide screen.
"""

from __future__ import annotations

import math
import operator
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.report.element import Content, Element, el, number
from shardwise.report.scale import Scale, linear, logarithmic, short, thin, tick_texts, whole
from shardwise.report.svg import CHARACTER, NUM_STROKES, fill, stroke, text, texture

#: Units across the box that curves are drawn in, and columns that a curve is thinned to.
ACROSS, COLUMNS = 1000, 500
HEIGHT = 170
#: Pixels of a chart on a phone and on a wide screen, for labels that have to fit; characters of a bar's name in a line.
NARROW, WIDE, NAME_WIDTH = 300, 640, 34


@dataclass(frozen=True, slots=True)
class Line:
    """A curve.

    Attributes:
        name: Its label.
        xs, ys: Its points; ``None`` breaks it.
        index: Which stroke.
        has_marks: Points are marked.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    index: int = 0
    has_marks: bool = False

    @property
    def values(self) -> list[float]:
        """The finite values."""
        return [y for y in self.ys if y is not None and math.isfinite(y)]


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_name: str = "step",
    from_zero: bool = False,
    may_be_log: bool = False,
    has_names: bool = True,
    shown: Callable[[float], str] = short,
) -> Element | None:
    """Curves over whole numbers such as steps; ``None`` where no curve has a finite value.

    Args:
        lines: The curves.
        title: What the picture shows, for those who do not see it.
        x_name: What the horizontal axis counts.
        from_zero: The vertical axis begins at 0.
        may_be_log: The vertical axis is logarithmic where values differ more than hundredfold.
        has_names: Where there are several, each curve's name is at its end.
        shown: Text of a tick.
    """
    values = [value for line in lines for value in line.values]
    if not values:
        return None
    low, high = min(values), max(values)
    is_log = may_be_log and low > 0 and high / low > 100
    y_scale = logarithmic(low, high) if is_log else linear(min(low, 0.0) if from_zero else low, high)
    xs = [x for line in lines for x in line.xs]
    x_scale = whole(int(min(xs)), int(max(xs)))
    parts: list[Content] = [_grid(y_scale, shown), _below(x_scale, x_name)]
    parts.append(
        el(
            "svg",
            [_curve(line, x_scale, y_scale) for line in lines],
            width="100%",
            height=HEIGHT,
            viewBox=f"0 0 {ACROSS} {HEIGHT}",
            preserveAspectRatio="none",
            class_="stretched",
        )
    )
    for line in lines:
        points = [(x, y) for x, y in zip(line.xs, line.ys, strict=True) if y is not None and math.isfinite(y)]
        if line.has_marks or len(points) == 1:
            parts += [_mark(x_scale.share(x), HEIGHT * (1 - y_scale.share(y)), line.index) for x, y in points]
    is_named = has_names and len(lines) > 1
    if is_named:
        parts += _end_labels(lines, x_scale, y_scale)
    return frame(title, parts, class_="chart named" if is_named else "chart")


def frame(title: str, parts: Sequence[Content], *, height: float = HEIGHT, class_: str = "chart") -> Element:
    """A chart's outer box; room for axes is around it, by its class."""
    return el("svg", el("title", title), parts, width="100%", height=f"{height:g}", role="img", class_=class_)


def _scaled(high: float, unit: float) -> Scale:
    """An axis from 0 with ticks at round multiples of ``unit``."""
    scale = linear(0.0, high / unit, num_ticks=6)
    return Scale(0.0, scale.high * unit, tuple(tick * unit for tick in scale.ticks))


def percent(share: float) -> str:
    """A share of the width."""
    return f"{number(100 * share)}%"


def _grid(scale: Scale, shown: Callable[[float], str]) -> list[Content]:
    made: list[Content] = []
    for tick, words in zip(scale.ticks, tick_texts(scale, shown), strict=True):
        y = HEIGHT * (1 - scale.share(tick))
        made.append(el("line", x1=0, x2="100%", y1=y, y2=y, class_="grid"))
        made.append(text(-6, y + 4, words, class_="faint", anchor="end"))
    return made


def _below(scale: Scale, name: str) -> list[Content]:
    made: list[Content] = [el("line", x1=0, x2="100%", y1=float(HEIGHT), y2=float(HEIGHT), class_="axis")]
    made += _ticks_below(scale, short, HEIGHT + 16)
    made.append(text("50%", HEIGHT + 31, name, class_="faint", anchor="middle"))
    return made


def _ticks_below(scale: Scale, shown: Callable[[float], str], y: float) -> list[Content]:
    """Labels under an axis; where they are too many for a phone, every other one is for wide screens only."""
    words = tick_texts(scale, shown)
    widths = [len(each) * CHARACTER + 8 for each in words]
    is_crowded = sum(widths) + max(widths) > NARROW - 40
    made: list[Content] = []
    for index, (tick, each) in enumerate(zip(scale.ticks, words, strict=True)):
        share = scale.share(tick)
        anchor = "start" if share < 0.03 else "end" if share > 0.97 else "middle"
        class_ = "faint roomy" if is_crowded and index % 2 else "faint"
        made.append(text(percent(share), y, each, class_=class_, anchor=anchor))
    return made


def _curve(line: Line, x_scale: Scale, y_scale: Scale) -> Element | None:
    words: list[str] = []
    is_new = True
    for point in thin(line.xs, line.ys, columns=COLUMNS):
        if point is None:
            is_new = True
            continue
        x, y = point
        at = f"{number(ACROSS * x_scale.share(x))} {number(HEIGHT * (1 - y_scale.share(y)))}"
        words.append(("M" if is_new else "L") + at)
        is_new = False
    if len(words) < 2:
        return None
    return el("path", d="".join(words), class_=f"curve {stroke(line.index)}", vector_effect="non-scaling-stroke")


def _mark(share: float, y: float, index: int) -> Element:
    return el("circle", cx=percent(share), cy=y, r=4, class_=f"mark {stroke(index)}")


def _end_labels(lines: Sequence[Line], x_scale: Scale, y_scale: Scale) -> list[Content]:
    """Each line's name behind its last point, moved up where it would lie on another or on the axis."""
    ends: list[tuple[float, float, Line]] = []
    for line in lines:
        points = [(x, y) for x, y in zip(line.xs, line.ys, strict=True) if y is not None and math.isfinite(y)]
        if points:
            x, y = points[-1]
            ends.append((HEIGHT * (1 - y_scale.share(y)), x_scale.share(x), line))
    ends.sort(key=operator.itemgetter(0), reverse=True)
    made: list[Content] = []
    placed: list[tuple[float, float]] = []
    for end, share, line in ends:
        y = min([end, HEIGHT - 4.0, *(below - 13 for below, near in placed if abs(near - share) < 0.08)])
        placed.append((y, share))
        made.append(text(percent(share), y + 4, f"\u2002{line.name}", class_=f"label t{line.index % NUM_STROKES}"))
    return made


def stacked_columns(
    moments: Sequence[tuple[str, Mapping[str, float]]],
    fills: Mapping[str, str],
    *,
    title: str,
    unit: float = 1.0,
    shown: Callable[[float], str] = short,
) -> Element | None:
    """One column for each moment, parts on top of each other; as many moments as there are fill the width.

    Args:
        moments: Name and parts of each.
        fills: Class of each part's colour, from the lowest up.
        title: What the picture shows.
        unit: Ticks are at round multiples of it.
        shown: Text of a tick and of a part.
    """
    top = max((sum(parts.values()) for _, parts in moments), default=0)
    if not top > 0:
        return None
    scale, each = _scaled(top, unit), 1 / len(moments)
    made: list[Content] = [_grid(scale, shown)]
    for index, (moment, parts) in enumerate(moments):
        base = 0.0
        for name, colour in fills.items():
            part = parts.get(name, 0)
            if part <= 0:
                continue
            y = HEIGHT * (1 - scale.share(base + part))
            place: dict[str, str | float] = {
                "x": percent(index * each), "y": y, "width": percent(each), "height": HEIGHT * scale.share(part)
            }  # fmt: skip
            words = f"{index + 1}. {moment}, {name}: {shown(part)}"
            made.append(el("rect", el("title", words), class_=f"{colour} crisp", **place))
            made.append(el("rect", fill=texture(colour), class_="over", **place))
            made.append(el("line", x1=percent(index * each), x2=percent((index + 1) * each), y1=y, y2=y, class_="seam"))
            base += part
    made.append(el("line", x1=0, x2="100%", y1=float(HEIGHT), y2=float(HEIGHT), class_="axis"))
    every = -(-len(moments) // 8)
    made += [
        text(percent((index + 0.5) * each), HEIGHT + 16, str(index + 1), class_="faint", anchor="middle")
        for index in range(0, len(moments), every)
    ]
    made.append(text("50%", HEIGHT + 31, "moment of the step", class_="faint", anchor="middle"))
    return frame(title, made)


@dataclass(frozen=True, slots=True)
class Area:
    """A part of a stack over time.

    Attributes:
        name: Its label.
        values: Its size at each moment, at least 0.
        fill: Class of its colour.
    """

    name: str
    values: Sequence[float]
    fill: str


def stacked_areas(
    xs: Sequence[float],
    areas: Sequence[Area],
    *,
    title: str,
    x_name: str,
    unit: float = 1.0,
    shown: Callable[[float], str] = short,
) -> Element | None:
    """Areas on top of each other over time, each with its name in it where it is high enough.

    Args:
        xs: Moments, ascending from 0.
        areas: From the lowest up.
        title: What the picture shows.
        x_name: What the horizontal axis counts.
        unit: Ticks of the vertical axis are at round multiples of it.
        shown: Text of such a tick.
    """
    sums = [sum(column) for column in zip(*(area.values for area in areas), strict=True)]
    if len(xs) < 2 or not xs[-1] > 0 or not max(sums) > 0:
        return None
    y_scale, x_scale = _scaled(max(sums), unit), linear(0.0, xs[-1], is_tight=True)
    made: list[Content] = [_grid(y_scale, shown)]
    shapes, labels = [], []
    base = [0.0] * len(xs)
    for area in areas:
        top = [low + part for low, part in zip(base, area.values, strict=True)]
        points = [(ACROSS * x_scale.share(x), HEIGHT * (1 - y_scale.share(y))) for x, y in zip(xs, top, strict=True)]
        under = [(ACROSS * x_scale.share(x), HEIGHT * (1 - y_scale.share(y))) for x, y in zip(xs, base, strict=True)]
        path = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points + under[::-1]) + "Z"
        shape = el("path", el("title", area.name), d=path, class_=f"{area.fill} seam")
        shape.set("vector-effect", "non-scaling-stroke")
        shapes.append(shape)
        if min(area.values) * HEIGHT / y_scale.high >= 15:  # as high everywhere: the words fit at the left end
            middle = (points[0][1] + under[0][1]) / 2
            labels.append(text(8, middle + 4, area.name, class_="on"))
        base = top
    stretched = el("svg", shapes, width="100%", height=HEIGHT, viewBox=f"0 0 {ACROSS} {HEIGHT}", class_="stretched")
    stretched.set("preserveAspectRatio", "none")
    made += [stretched, *labels, *_ticks_below(x_scale, short, HEIGHT + 16)]
    made.append(el("line", x1=0, x2="100%", y1=float(HEIGHT), y2=float(HEIGHT), class_="axis"))
    made.append(text("50%", HEIGHT + 31, x_name, class_="faint", anchor="middle"))
    return frame(title, made)


@dataclass(frozen=True, slots=True)
class Stack:
    """A horizontal bar of parts.

    Attributes:
        name: What stands above it.
        parts: Sizes by name.
        note: What stands above it on the right.
    """

    name: str
    parts: Mapping[str, float]
    note: str = ""


def stacked_bars(
    stacks: Sequence[Stack],
    fills: Mapping[str, str],
    *,
    title: str,
    limit: tuple[float, str] | None = None,
    longest: float = math.inf,
    unit: float = 1.0,
    shown: Callable[[float], str] = short,
) -> Element | None:
    """Horizontal bars under each other, all to one scale.

    A bar that is longer than the axis is cut off, with an arrow at its end.

    Args:
        stacks: The bars.
        fills: Class of each part's colour, from left to right.
        title: What the picture shows.
        limit: A value that is marked in every bar, and what it is called.
        longest: Where the axis ends at the latest.
        unit: Ticks are at round multiples of it.
        shown: Text of a tick and of a part.
    """
    most = max([sum(stack.parts.values()) for stack in stacks] + ([limit[0]] if limit else []), default=0)
    if not most > 0:
        return None
    scale = _scaled(min(most, longest), unit)
    made: list[Content] = []
    y = 0.0
    for stack in stacks:
        lines = textwrap.wrap(stack.name, NAME_WIDTH) or [""]
        made += [text("0", y + 13 + 15 * line, words, class_="strong") for line, words in enumerate(lines)]
        y += 19 + 15 * (len(lines) - 1)
        if stack.note:
            made.append(text("100%", y - 6, stack.note, class_="faint", anchor="end"))
        at = 0.0
        for name, colour in fills.items():
            part = stack.parts.get(name, 0)
            if part > 0 and at < 1:
                share = min(scale.share(part), 1 - at)
                made += _part(name, f"{name}: {shown(part)}", colour, share=share, at=at, y=y)
                at += scale.share(part)
        if at > 1 + 1e-9:
            cut = el("svg", el("path", d="M-14 0h14v24h-14l6-6-6-6 6-6z", class_="paper"), x="100%", y=y, height=24)
            cut.set("class", "stretched")
            made += [cut, text("100%", y + 17, "\u25b6", anchor="end")]
        if limit:
            x = percent(scale.share(limit[0]))
            made.append(el("line", x1=x, x2=x, y1=y - 2, y2=y + 28, class_="limit"))
        y += 38
    made.append(el("line", x1=0, x2="100%", y1=y, y2=y, class_="axis"))
    made += _ticks_below(scale, shown, y + 16)
    if limit:
        share = scale.share(limit[0])
        anchor = "end" if share > 0.6 else "start"
        made.append(text(percent(share), y + 32, limit[1], class_="strong", anchor=anchor))
    return frame(title, made, height=y + (36 if limit else 20), class_="bars")


def _part(name: str, words: str, colour: str, *, share: float, at: float, y: float) -> list[Content]:
    """A part of a bar, its texture, and its name where it fits: on a wide screen, or on any."""
    place: dict[str, str | float] = {"x": percent(at), "y": y, "width": percent(share), "height": 24.0}
    needed = len(name) * CHARACTER + 8
    made: list[Content] = [
        el("rect", el("title", words), class_=f"{colour} seam", **place),
        el("rect", fill=texture(colour), class_="over", **place),
    ]
    if share * WIDE >= needed:
        class_ = None if share * NARROW >= needed else "roomy"
        shown = el("rect", x="50%", y=4, width=needed, height=16, transform=f"translate({-needed / 2:g} 0)", rx=3)
        shown.set("class", f"{colour}")
        made.append(el("svg", shown, text("50%", 16, name, class_="on", anchor="middle"), class_=class_, **place))
    return made


def fills_of(names: Sequence[str], order: Sequence[str] = ()) -> dict[str, str]:
    """A colour for each name: that of its place in ``order``, so that it is the same in every picture."""
    known = list(dict.fromkeys([*order, *names]))
    return {name: fill(known.index(name)) for name in names}
