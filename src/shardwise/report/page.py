"""A self-contained HTML page: templates define its content, and embedded Vega-Lite draws its charts."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.report import numbers
from shardwise.spec.text import printable, size

_FOLDER = Path(__file__).parent
#: The runtime that draws charts, as published, and our specifications of charts.
_SCRIPTS = ("vega/vega.min.js", "vega/vega-lite.min.js", "vega/vega-interpreter.min.js", "charts.js")


def page(template: str, title: str, **values: Any) -> str:
    """Render a full page from a template and its values.

    The template sets ``lead``, ``sections`` and ``foot``, and adds the titles of its sections and omitted parts to
    ``page``. The page loads nothing: its policy allows only its own style and scripts, by their hashes.
    """
    environment, listed = _environment(), {"titles": [], "left_out": []}
    body = environment.get_template(template).make_module({"page": listed, **values})
    scripts = [(_FOLDER / name).read_text("utf-8") for name in _SCRIPTS]
    style = (_FOLDER / "page.css").read_text("utf-8")
    policy = f"style-src {_hash(style)}; script-src {' '.join(map(_hash, scripts))}"
    return environment.get_template("page.html.jinja").render(
        title=title, body=body, page=listed, style=style, scripts=scripts, policy=policy
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _environment() -> Any:
    """Return an environment of templates that escape all values, and make hidden characters visible."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def visible_text(value: object) -> object:
        return value if isinstance(value, Markup) else printable(value, is_block=True)

    def data(chart: dict[str, Any]) -> Markup:
        text = json.dumps(_visible(chart), allow_nan=False, separators=(",", ":"))
        return Markup(text.replace("<", "\\u003c"))  # noqa: S704  nothing in it closes the element that it is in

    found = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, finalize=visible_text, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.do"],
    )  # fmt: skip
    found.filters |= {
        "bytes": size, "data": data, "exact": lambda value: "n/a" if value is None else f"{value:.6g}",
        "finite": numbers.finite, "loss": numbers.loss, "percent": numbers.percent, "seconds": numbers.seconds,
        "thousands": "{:,}".format, "whole": "{:,.0f}".format,
    }  # fmt: skip
    return found


def _visible(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _visible(each) for key, each in value.items()}
    if isinstance(value, str | float):
        return printable(value) if isinstance(value, str) else numbers.finite(float(f"{value:.6g}"))
    return [_visible(each) for each in value] if isinstance(value, list | tuple) else value
