"""Inputs with a target of their own: an answer for models with an encoder and a decoder, or the number of a class.

An example of ``data.examples`` holds the input's ids and behind them the target's, which are its one span.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.spec.errors import ConfigError
from shardwise.spec.text import printable
from shardwise.train.data.examples import Example, Examples
from shardwise.train.data.rows import Rows
from shardwise.train.data.token_files import DataError

_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Pairs:
    """How rows become examples.

    Attributes:
        held: The tokenizer of transformers.
        column: Of the inputs.
        target: Column of the targets: texts, or where ``labels`` is set, classes.
        labels: Number of each class by its name; empty where classes have numbers only. ``None``: targets are texts.
    """

    held: Any
    column: str
    target: str
    labels: Mapping[str, int] | None = None

    @property
    def key(self) -> list[str]:
        """What of it decides about the examples."""
        return [self.column, self.target, repr(self.labels)]

    def check(self, columns: Sequence[str], name: str) -> None:
        """Refuse data without these columns.

        Raises:
            ConfigError: With the columns that there are.
        """
        missing = [column for column in (self.column, self.target) if column not in columns]
        if missing:
            raise ConfigError(
                f"{printable(name)} has the columns {', '.join(map(printable, columns))}: no {missing[0]}.\n"
                f"  Rename them: this model is trained on rows with {self.column} and {self.target}."
            )

    def examples(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[Example]:
        """The examples of rows, in their order.

        Raises:
            DataError: A row cannot be used; it is named by its number.
        """
        numbered = enumerate(rows)
        while some := list(itertools.islice(numbered, _AT_ONCE)):
            inputs = self._encoded([self._text(number, row, self.column) for number, row in some])
            if self.labels is None:
                targets = self._encoded([self._text(number, row, self.target) for number, row in some])
            else:
                targets = [[self._label(number, row)] for number, row in some]
            for given, wanted in zip(inputs, targets, strict=True):
                yield Example([*given, *wanted], [(len(given), len(given) + len(wanted))])

    def _encoded(self, texts: Sequence[str]) -> list[list[int]]:
        return self.held(list(texts), add_special_tokens=True, verbose=False, padding=False)["input_ids"]

    def _text(self, number: int, row: Mapping[str, Any], column: str) -> str:
        value = row.get(column)
        if not isinstance(value, str):
            raise DataError(f"row {number:,} of the data has no text in column {column}.\n  Correct the row.")
        return value

    def _label(self, number: int, row: Mapping[str, Any]) -> int:
        value = row.get(self.target)
        found = (self.labels or {}).get(value) if isinstance(value, str) else value
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise DataError(
                f"row {number:,} of the data has {self.target} {printable(repr(value))}, expected a class's number from"
                " 0, or a name in label2id of the model's config.json.\n  Correct the row."
            )
        return found


@dataclass(frozen=True, slots=True)
class PairRows:
    """Examples of :class:`Pairs` as samples, each cut to ``seq_len`` on both sides.

    Attributes:
        examples: They are of these.
        seq_len: Tokens of an input, and of a target, at most and with padding.
        pad: The id of padding.
        is_label: The target is the number of a class.
    """

    examples: Examples
    seq_len: int
    pad: int
    is_label: bool

    @property
    def num_samples(self) -> int:
        """As many as examples."""
        return self.examples.count

    @property
    def num_tokens(self) -> int:
        """Of inputs and targets."""
        return int(self.examples.lengths().sum())

    def num_targets(self, indices: Iterable[int]) -> int:
        """Tokens of these targets, or where they are classes, their number."""
        return int(np.minimum(self.examples.span_lengths(list(indices)), self.seq_len).sum())

    def rows(self, indices: Sequence[int]) -> Rows:
        """These samples: padding is not attended to, and not learned. Targets are (B, T), or (B,) where classes."""
        inputs = np.full((len(indices), self.seq_len), self.pad, np.int64)
        targets, mask = np.full_like(inputs, -100), np.zeros_like(inputs)
        for row, index in enumerate(indices):
            if not 0 <= index < self.num_samples:
                raise IndexError(index)
            ids, ((begin, end),) = self.examples.read(index)
            given, wanted = ids[:begin][: self.seq_len], ids[begin:end][: self.seq_len]
            inputs[row, : len(given)], mask[row, : len(given)] = given, 1
            targets[row, : len(wanted)] = wanted
        return Rows(inputs, targets[:, 0] if self.is_label else targets, None, mask)
