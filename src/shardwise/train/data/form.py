"""From rows to examples, by a form that texts, conversations and pairs have each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from shardwise.spec.text import printable
from shardwise.train.data.token_files import DataError


class Example(NamedTuple):
    """An example, made of a row."""

    ids: Any  # of all its tokens
    #: First and one past the last of those that are learned, in order; of texts none, as all are
    spans: Sequence[tuple[int, int]] = ()


#: A row and its place, such as ``chats.jsonl:3``, which messages name.
Placed = tuple[str, Mapping[str, Any]]


class Form(Protocol):
    """The conversion of rows to examples."""

    def encode(self, rows: Sequence[Placed]) -> Sequence[Example]:
        """The examples of rows; a DataError names the place of a row that cannot be used."""
        ...


def text_of(place: str, row: Mapping[str, Any], column: str) -> str:
    """The text in a column of a row."""
    text = row.get(column)
    if not isinstance(text, str):
        raise DataError(
            f"{place} has no text in column {printable(column)}: {printable(type(text).__name__)}.\n"
            "  Correct the row, or name another column: data.column=..."
        )
    return text
