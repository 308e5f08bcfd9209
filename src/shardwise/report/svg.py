"""What pictures are made of: words, boxes and arrows at fixed places. The pages' pictures and the docs' use the same.

Colours are classes of ``picture.css``: ``k0`` to ``k10`` fill areas, ``s0`` to ``s5`` draw lines. The fills are light
enough for dark text in both colour schemes and differ for eyes that confuse red and green (after Paul Tol's light
scheme); neighbours of one colour never occur, as :data:`NUM_FILLS` go round. Lines differ by their dashes too.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shardwise.report.element import Content, Element, el

#: Classes of both: docs' pictures hold it themselves, pages have it in their style.
STYLE = Path(__file__).with_name("picture.css")
NUM_FILLS, NUM_STROKES = 11, 6
#: Pixels that a character of a 12 pixel font takes, about.
CHARACTER = 6.6


def text(
    x: float | str, y: float, words: str, *, size: int = 12, class_: str | None = None, anchor: str | None = None
) -> Element:
    """Words; ``x`` may be a percentage."""
    return el(
        "text",
        words,
        x=float(x) if not isinstance(x, str) else x,
        y=float(y),
        text_anchor=anchor,
        class_=class_,
        font_size=size if size != 12 else None,
    )


def box(x: float, y: float, width: float, height: float, fill: str, *, title: str | None = None) -> Element:
    """A rectangle with an edge; ``title`` is shown where the mouse rests."""
    made = el("rect", x=float(x), y=float(y), width=float(width), height=float(height), rx=3.0, class_=f"{fill} edge")
    if title is not None:
        made.append(el("title", title))
    return made


def arrow(x1: float, y1: float, x2: float, y2: float) -> Element:
    """A line with a head at its end."""
    return el("path", d=_path([(x1, y1), (x2, y2)]), class_="arrow", marker_end="url(#head)")


def level(x1: float, x2: float, y: float) -> Element:
    """A faint horizontal line."""
    return el("path", d=_path([(x1, y), (x2, y)]), class_="grid")


def picture(width: float, height: float, title: str, parts: Iterable[Content], *, has_style: bool = False) -> Element:
    """A picture of a fixed size.

    Args:
        width: Pixels.
        height: Pixels.
        title: What it shows, for those who do not see it.
        parts: What is in it.
        has_style: It holds its colours itself, for a file of its own.
    """
    head = el(
        "marker",
        el("path", d="M0 0 L8 4 L0 8 z", class_="head"),
        id="head",
        viewBox="0 0 8 8",
        refX=7,
        refY=4,
        markerWidth=7,
        markerHeight=7,
        orient="auto",
    )
    own: list[Content] = []
    if has_style:
        own = [
            el("style", STYLE.read_text("utf-8")),
            el("defs", head),
            el("rect", width="100%", height="100%", class_="paper"),
        ]
    return el(
        "svg",
        el("title", title),
        own,
        parts,
        viewBox=f"0 0 {width:g} {height:g}",
        width=f"{width:g}",
        height=f"{height:g}",
        role="img",
        class_="picture",
    )


def fill(index: int) -> str:
    """The class of the ``index``-th fill."""
    return f"k{index % NUM_FILLS}"


def texture(fill_class: str) -> str:
    """The pattern over a fill, so that neighbours differ without their colours: one of the page's :func:`textures`."""
    return f"url(#texture-{int(fill_class[1:]) % len(_TEXTURES)})"


#: Lines and dots over a tile of 8 by 8 pixels; fills take them in turn.
_TEXTURES = ("", "M-1 9L9 -1M-1 1L1 -1M7 9L9 7", "M2 2h.01M6 6h.01", "M0 4H8", "M-1 -1L9 9M7 -1L9 1M-1 7L1 9")


def textures() -> Element:
    """The patterns that :func:`texture` names."""
    return el(
        "defs",
        [
            el(
                "pattern",
                el("path", d=path, class_="texture"),
                id=f"texture-{index}",
                width=8,
                height=8,
                patternUnits="userSpaceOnUse",
            )
            for index, path in enumerate(_TEXTURES)
        ],
    )


def stroke(index: int) -> str:
    """The class of the ``index``-th line."""
    return f"s{index % NUM_STROKES}"


def fits(words: str, width: float, *, size: int = 12) -> bool:
    """Whether words fit a box."""
    return len(words) * CHARACTER * size / 12 + 2 <= width


def _path(points: list[tuple[float, float]]) -> str:
    return "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
