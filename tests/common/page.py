"""Tables of the pages that scripts write into bench/results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    head = f"| {' | '.join(headings)} |".replace("|  |", "| |")
    lines = [f"| {' | '.join(map(cell, row))} |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(headings), *lines])


def cell(value: object) -> str:
    """A value as a cell of a table."""
    return str(value).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
