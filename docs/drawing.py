"""Words, boxes, arrows and lanes at fixed places, for ``pictures.py``. Colours are classes of ``pictures.css``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element, tostring

STYLE = Path(__file__).with_name("pictures.css")
#: Pixels that a character of a 12 pixel font takes, about.
CHARACTER = 6.6

#: What can stand inside an element: text, elements, or several of them.
Content = str | Element | Iterable[Any]


def el(tag: str, *content: Content, **attributes: str | float | None) -> Element:
    """An element; ``class_`` is ``class`` and ``text_anchor`` is ``text-anchor``, and ``None`` is left out."""
    made = Element(tag)
    for name, value in attributes.items():
        if value is not None:
            text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
            made.set(name.rstrip("_").replace("_", "-"), text)
    _add(made, content)
    return made


def _add(parent: Element, content: Content) -> None:
    if isinstance(content, Element):
        parent.append(content)
    elif isinstance(content, str):
        parent.text = content
    else:
        for item in content:
            _add(parent, item)


def text(
    x: float, y: float, words: str, *, size: int = 12, class_: str | None = None, anchor: str | None = None
) -> Element:
    """Words."""
    font_size = size if size != 12 else None
    return el("text", words, x=float(x), y=float(y), text_anchor=anchor, class_=class_, font_size=font_size)


def box(x: float, y: float, width: float, height: float, fill: str) -> Element:
    """A rectangle with an edge."""
    return el("rect", x=float(x), y=float(y), width=float(width), height=float(height), rx=3.0, class_=f"{fill} edge")


def arrow(x1: float, y1: float, x2: float, y2: float) -> Element:
    """A line with a head at its end."""
    return el("path", d=f"M{x1:g} {y1:g} L{x2:g} {y2:g}", class_="arrow", marker_end="url(#head)")


def picture_file(width: float, height: float, title: str, parts: Iterable[Content]) -> str:
    """A picture in a file of its own, an element to a line; ``title`` is for those who do not see it."""
    head = el(
        "marker", el("path", d="M0 0 L8 4 L0 8 z", class_="head"), id="head", viewBox="0 0 8 8", refX=7, refY=4,
        markerWidth=7, markerHeight=7, orient="auto",
    )  # fmt: skip
    content = (
        el("title", title),
        el("style", STYLE.read_text("utf-8")),
        el("defs", head),
        el("rect", width="100%", height="100%", class_="paper"),
        parts,
    )
    size = {"width": f"{width:g}", "height": f"{height:g}"}
    root = el("svg", *content, viewBox=f"0 0 {width:g} {height:g}", **size, role="img", class_="picture")
    root.set("xmlns", "http://www.w3.org/2000/svg")
    root.text = "\n"
    for child in root:
        child.tail = "\n"
    return tostring(root, encoding="unicode") + "\n"


class Bar(NamedTuple):
    """Something that occupies a lane for a while; the label is shown where it fits."""

    lane: str
    start: float
    stop: float
    label: str
    fill: str


@dataclass
class Lanes:
    """Time from left to right, a lane for each thing that is busy.

    Attributes:
        names: What stands before each lane, by its key, from top to bottom.
        end: The last moment; the first is 0.
        width, top, height, gap: Pixels of the drawing, above the first lane, of a lane, between two lanes.
        breaks: Keys of lanes with a wider gap before them.
    """

    names: Mapping[str, str]
    end: float
    width: float
    top: float
    height: float
    gap: float
    breaks: Sequence[str] = ()
    y: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Place the lanes."""
        self.left = 14 + CHARACTER * max(len(name) for name in self.names.values())
        at = self.top
        for key in self.names:
            at += 14 if key in self.breaks else 0
            self.y[key] = at
            at += self.height + self.gap
        self.bottom = at - self.gap

    def x(self, moment: float) -> float:
        """Where a moment lies."""
        return self.left + moment / self.end * (self.width - self.left - 10)

    def parts(self, bars: Iterable[Bar]) -> list[Content]:
        """The lanes' names and the bars."""
        middle, made = self.height / 2 + 4, list[Content]()
        for key, name in self.names.items():
            made.append(text(self.left - 8, self.y[key] + middle, name, anchor="end"))
            y = self.y[key] + self.height
            made.append(el("path", d=f"M{self.left:g} {y:g} L{self.width - 10:g} {y:g}", class_="grid"))
        for bar in bars:
            x, width = self.x(bar.start), self.x(bar.stop) - self.x(bar.start)
            made.append(box(x, self.y[bar.lane], width, self.height, bar.fill))
            if bar.label and len(bar.label) * CHARACTER + 2 <= width:
                made.append(text(x + width / 2, self.y[bar.lane] + middle, bar.label, class_="on", anchor="middle"))
        return made
