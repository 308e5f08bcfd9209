"""Inputs with a target of their own: an answer for models with an encoder and a decoder, or the number of a class.

An example of ``data.examples`` holds the input's ids and behind them the target's, which are its one span.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.spec.errors import ConfigError
from shardwise.spec.text import printable
from shardwise.train.data.examples import Examples
from shardwise.train.data.records import Example, Placed, text_of
from shardwise.train.data.rows import Rows
from shardwise.train.data.token_files import DataError
from shardwise.train.task import Task


@dataclass(frozen=True, slots=True)
class Pairs:
    """Rows of pairs as examples."""

    held: Any  # the tokenizer of transformers
    column: str  # of the inputs
    target: str  # column of the targets: texts, or where ``labels`` is set, classes
    #: Number of each class by its name; empty where classes have numbers only. ``None``: targets are texts.
    labels: Mapping[str, int] | None = None

    def check(self, columns: Sequence[str], name: str) -> None:
        """Refuse data without these columns."""
        missing = [column for column in (self.column, self.target) if column not in columns]
        if missing:
            raise ConfigError(
                f"{printable(name)} has the columns {', '.join(map(printable, columns))}: no {missing[0]}.\n"
                f"  Rename them: this model is trained on rows with {self.column} and {self.target}."
            )

    def encode(self, rows: Sequence[Placed]) -> list[Example]:
        """The examples of rows."""
        inputs = self._encoded([text_of(place, row, self.column) for place, row in rows])
        if self.labels is None:
            targets = self._encoded([text_of(place, row, self.target) for place, row in rows])
        else:
            targets = [[self._label(place, row.get(self.target))] for place, row in rows]
        pairs = zip(inputs, targets, strict=True)
        return [Example([*given, *wanted], [(len(given), len(given) + len(wanted))]) for given, wanted in pairs]

    def _encoded(self, texts: Sequence[str]) -> list[list[int]]:
        return self.held(list(texts), add_special_tokens=True, verbose=False, padding=False)["input_ids"]

    def _label(self, place: str, value: Any) -> int:
        found = (self.labels or {}).get(value, value) if isinstance(value, str) else value
        found = int(found) if isinstance(found, str) and found.isdecimal() else found  # CSV holds texts alone
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise DataError(
                f"{place} has {self.target} {printable(repr(value))}, expected a class's number from 0, or a name in"
                " label2id of the model's config.json.\n  Correct the row."
            )
        return found


@dataclass(frozen=True, slots=True)
class PairRows:
    """Examples of :class:`Pairs` as samples, each cut to ``seq_len`` on both sides."""

    examples: Examples  # they are of these
    seq_len: int  # tokens of an input, and of a target, at most and with padding
    pad: int  # the id of padding
    is_label: bool  # the target is the number of a class
    targets: np.ndarray  # how many tokens of each target are learned

    @property
    def num_samples(self) -> int:
        """As many as examples."""
        return len(self.examples)

    def num_targets(self, indices: Iterable[int]) -> int:
        """Tokens of these targets, or where they are classes, their number."""
        return int(self.targets[list(indices)].sum())

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


def pairs(examples: Examples, seq_len: int, task: Task) -> PairRows:
    """Examples as samples of ``seq_len`` tokens on both sides."""
    starts, ends = examples.edges().T
    return PairRows(examples, seq_len, task.pad, task.labels is not None, np.minimum(ends - starts, seq_len))
