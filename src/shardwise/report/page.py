"""The page: one file that needs nothing else, its sections, tables, figures and legends."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.report.element import Content, Element, el, html
from shardwise.report.svg import STYLE, texture, textures

_PAGE_STYLE = Path(__file__).with_name("page.css")


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page with a heading.

    Attributes:
        title: The heading; the page's navigation lists it.
        content: What is below it.
    """

    title: str
    content: Sequence[Content]

    @property
    def key(self) -> str:
        """Where links to it lead."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


def page(title: str, lead: Sequence[Content], sections: Sequence[Section], *, foot: str) -> str:
    """A whole page as text.

    It has no script and loads nothing: its policy forbids both, and allows the one style that is in it.
    """
    style = STYLE.read_text("utf-8") + _PAGE_STYLE.read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", name="referrer", content="no-referrer"),
        el("link", rel="icon", href="data:,"),
        el("title", title),
        _style(style),
    )
    links = [el("li", el("a", section.title, href=f"#{section.key}")) for section in sections]
    body = el(
        "body",
        el("a", "Skip to the content", class_="skip", href="#content"),
        el("header", el("h1", title), lead, el("nav", el("ul", links), aria_label="Sections")),
        el("main", [_section(section) for section in sections], id="content", tabindex="-1"),
        el("footer", el("p", foot)),
        el("svg", textures(), class_="shared", width=0, height=0, aria_hidden="true"),
    )
    return html(el("html", head, body, lang="en"))


def _style(css: str) -> Element:
    made = Element("style")
    made.text = css  # as it is: its hash is in the policy
    return made


def _section(section: Section) -> Element:
    heading = el("h2", section.title, id=f"{section.key}-title")
    return el("section", heading, section.content, id=section.key, aria_labelledby=f"{section.key}-title")


def left_out(sentences: Sequence[str]) -> list[Section]:
    """The section that says what the page lacks and why; none where nothing is lacking."""
    return [Section("Left out", [el("ul", [el("li", prose(words)) for words in sentences])])] if sentences else []


def prose(words: str) -> list[Content]:
    """A sentence in which commands stand between backticks."""
    return [el("code", part) if place % 2 else part for place, part in enumerate(words.split("`"))]


def figure(title: str, content: Sequence[Content], caption: str | None = None) -> Element:
    """A picture with a heading above and words below."""
    return el("figure", el("h3", title), content, el("figcaption", caption) if caption else None)


def scroll(content: Content, label: str) -> Element:
    """A region that scrolls sideways where it does not fit, by keyboard too."""
    return el("div", content, class_="scroll", tabindex=0, role="region", aria_label=label)


def table(
    caption: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Content]],
    *,
    numbers: Sequence[int] | None = None,
    words: Sequence[int] = (),
) -> Element:
    """A table whose first column names its rows.

    Args:
        caption: What it is about.
        columns: Headings.
        rows: The cells.
        numbers: Columns that are numbers, on the right; by default all but the first.
        words: Columns of whole sentences, which are not made narrow.
    """
    right = set(range(1, len(columns)) if numbers is None else numbers)

    def cell(tag: str, place: int, content: Content, scope: str | None = None) -> Element:
        return el(tag, content, scope=scope, class_="number" if place in right else "words" if place in words else None)

    heads = el("tr", [cell("th", place, name, "col") for place, name in enumerate(columns)])
    body = [
        el("tr", [cell("td" if at else "th", at, item, None if at else "row") for at, item in enumerate(row)])
        for row in rows
    ]
    made = el("table", el("caption", el("span", caption)), el("thead", heads), el("tbody", body))
    return scroll(made, caption)


def folded(summary: str, *content: Content, is_printed: bool = False) -> Element:
    """Something that is shown on request; in print only where ``is_printed``."""
    return el("details", el("summary", summary), content, class_="printed" if is_printed else None)


def tiles(facts: Iterable[tuple[str, str, str]]) -> Element:
    """The figures that matter most: name, value, a note below."""
    return el(
        "dl",
        [
            el("div", el("dt", name), el("dd", value, el("small", note) if note else None))
            for name, value, note in facts
        ],
        class_="tiles",
    )


def legend(entries: Iterable[tuple[str, str]], *, is_lines: bool = False, is_plain: bool = False) -> Element:
    """What colours mean.

    Args:
        entries: Words and class of each.
        is_lines: They are strokes, not fills.
        is_plain: The fills have no texture.
    """

    def swatch(class_: str) -> Element:
        shape = (
            el("line", x1=0, x2=26, y1=6, y2=6, class_=f"curve {class_}")
            if is_lines
            else [
                el("rect", width=22, height=14, rx=2, class_=f"{class_} edge"),
                None if is_plain else el("rect", width=22, height=14, rx=2, fill=texture(class_)),
            ]
        )
        return el("svg", shape, width=26 if is_lines else 22, height=14 if not is_lines else 12, aria_hidden="true")

    return el("ul", [el("li", swatch(class_), el("span", words)) for words, class_ in entries], class_="legend")
