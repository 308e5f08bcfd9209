"""The display of results: a short ``repr``, text, a table in a notebook, a dict and a ``pandas.DataFrame``."""

from __future__ import annotations

import dataclasses
import functools
import html
from collections.abc import Sequence
from typing import Any, NamedTuple

from shardwise.spec.errors import ConfigError
from shardwise.spec.text import aligned, printable

_with_defaults = functools.cache(lambda kind: kind())


def changed_fields(instance: Any) -> dict[str, Any]:
    """The first field of a dataclass, and all other fields that differ from their defaults, by name."""
    defaults, own = vars_of(_with_defaults(type(instance))), vars_of(instance)
    same = [name for name, value in own.items() if type(value) is type(defaults[name]) and value == defaults[name]]
    return {name: value for name, value in own.items() if name not in same or name == next(iter(own))}


def vars_of(instance: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, without conversion of nested values."""
    return {each.name: getattr(instance, each.name) for each in dataclasses.fields(instance)}


def short_repr(instance: Any) -> str:
    """A ``repr`` of a dataclass that shows only the fields of :func:`changed_fields`."""
    fields = ", ".join(f"{name}={value!r}" for name, value in changed_fields(instance).items())
    return f"{type(instance).__name__}({fields})"


class Page(NamedTuple):
    """A result as text: lines above, a table with its header as first row, lines below, left-aligned columns."""

    above: Sequence[str]
    rows: Sequence[Sequence[str]]
    below: Sequence[str] = ()
    words: Sequence[int] = (0,)


class Shown:
    """Base class of results that show themselves as text or HTML and convert to plain values."""

    __slots__ = ()

    def page(self) -> Page:
        """The result as text and a table."""
        raise NotImplementedError

    def to_records(self) -> list[dict[str, Any]]:
        """The rows of the table, as one dict of values each."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values, which ``json.dumps`` accepts."""
        return {"rows": self.to_records()}

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with a row for each record.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            text = "to_pandas() needs pandas, which is not installed.\n  pip install pandas, or call to_dict()."
            raise ConfigError(text) from None
        return pd.DataFrame(self.to_records())

    def __str__(self) -> str:
        page = self.page()
        return "\n".join([*page.above, *aligned(page.rows, words=page.words), *page.below])

    def __repr__(self) -> str:
        page = self.page()
        return f"{type(self).__name__}({page.above[0] if page.above else f'{len(page.rows) - 1} rows'})"

    def _repr_html_(self) -> str:
        page, rows = self.page(), ""
        for number, row in enumerate(page.rows):
            tag = "td" if number else "th"
            sides = ["left" if index in page.words else "right" for index in range(len(row))]
            cells = zip(sides, row, strict=True)
            rows += "<tr>" + "".join(f'<{tag} style="text-align:{side}">{_safe(cell)}</{tag}>' for side, cell in cells)
        lines = [f"<pre>{_safe(chr(10).join(part))}</pre>" if part else "" for part in (page.above, page.below)]
        return f"{lines[0]}<table>{rows}</table>{lines[1]}"


def _safe(text: str) -> str:
    return html.escape(printable(text, is_block=True))
