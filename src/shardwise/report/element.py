"""Elements of HTML and SVG: nested calls in, escaped text out.

The standard library's ElementTree holds the elements and writes them, so that every text and attribute is escaped in
one place that is not ours. A template language is no dependency of the package, and pictures would not use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from xml.etree.ElementTree import Element, tostring

from shardwise.spec.text import printable

#: What can stand inside an element: text, elements, or several of them. ``None`` is left out.
Content = str | int | Element | None | Iterable[Any]

__all__ = ["Content", "Element", "add", "el", "html", "svg_file"]


def el(tag: str, *content: Content, **attributes: str | float | bool | None) -> Element:
    """An element.

    Args:
        tag: Its name.
        content: What is inside, in order.
        attributes: By name, where ``class_`` is ``class`` and ``aria_label`` is ``aria-label``. ``None`` and ``False``
            are left out, ``True`` is an attribute without a value, numbers have at most two decimals.
    """
    made = Element(tag)
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        text = "" if value is True else number(value) if isinstance(value, float) else printable(value)
        made.set(name.rstrip("_").replace("_", "-"), text)
    add(made, *content)
    return made


def add(parent: Element, *content: Content) -> None:
    """Append to an element."""
    for item in content:
        if item is None:
            continue
        if isinstance(item, Element):
            parent.append(item)
        elif isinstance(item, str | int):
            _add_text(parent, printable(item, is_block=True))
        else:
            add(parent, *item)


def number(value: float) -> str:
    """A coordinate: two decimals at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value == value else "0"  # noqa: PLR0124  NaN


def html(root: Element) -> str:
    """A whole page."""
    return "<!doctype html>\n" + tostring(root, encoding="unicode", method="html") + "\n"


def svg_file(root: Element) -> str:
    """A picture in a file of its own, an element to a line."""
    root.set("xmlns", "http://www.w3.org/2000/svg")
    for child in root:
        child.tail = "\n"
    root.text = "\n"
    return tostring(root, encoding="unicode") + "\n"


def _add_text(parent: Element, text: str) -> None:
    if len(parent):
        parent[-1].tail = (parent[-1].tail or "") + text
    else:
        parent.text = (parent.text or "") + text
