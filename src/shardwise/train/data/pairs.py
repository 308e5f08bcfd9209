"""Inputs with a separate target: an answer for encoder-decoder models, or the number of a class.

An example of ``data.examples`` contains the input's ids followed by the target's ids, which are its only span.
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
    """Converts rows with pairs to examples."""

    tokenizer: Any  # the tokenizer of transformers
    column: str  # column of the inputs
    target: str  # column of the targets: texts, or classes if ``labels`` is set
    #: Number of each class by name. ``None``: targets are texts.
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
        """Convert rows to examples."""
        inputs = self._encode_texts([text_of(location, row, self.column) for location, row in rows])
        if self.labels is None:
            targets = self._encode_texts([text_of(location, row, self.target) for location, row in rows])
            end = missing_end(self.tokenizer)
            for (location, _), target in zip(rows, targets, strict=True):
                if not target:
                    raise DataError(f"{location} has an empty {self.target}.\n  Correct the row, or leave it out.")
                if end is not None:
                    target.append(end)
        else:
            targets = [[self._label(location, row.get(self.target))] for location, row in rows]
        pairs = zip(inputs, targets, strict=True)
        return [Example([*prompt, *target], [(len(prompt), len(prompt) + len(target))]) for prompt, target in pairs]

    def _encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        return self.tokenizer(list(texts), add_special_tokens=True, verbose=False, padding=False)["input_ids"]

    def _label(self, location: str, value: Any) -> int:
        labels = self.labels or {}
        found = labels.get(value, value) if isinstance(value, str) else value
        found = int(found) if isinstance(found, str) and found.isdecimal() else found  # CSV has only texts
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < len(labels):
            raise DataError(
                f"{location} has {self.target} {printable(repr(value))}, expected a class's number from 0 to"
                f" {len(labels) - 1}, or a name in label2id of the model's config.json.\n  Correct the row."
            )
        return found


def missing_end(tokenizer: Any) -> int | None:
    """Return the token that ends answers if the tokenizer does not add it by itself, as T5's and BART's do."""
    end = tokenizer.eos_token_id
    return None if end is None or end in tokenizer("a", add_special_tokens=True)["input_ids"] else end


@dataclass(frozen=True, slots=True)
class PairRows:
    """Examples of :class:`Pairs` as samples, with input and target cut to ``seq_len`` each."""

    examples: Examples
    seq_len: int  # maximum number of tokens of an input and of a target, and the padded length
    pad: int  # id of padding
    is_label: bool  # whether the target is the number of a class
    targets: np.ndarray  # number of learned tokens of each target

    @property
    def num_samples(self) -> int:
        """Number of examples."""
        return len(self.examples)

    def __str__(self) -> str:
        """Describe the samples in a line."""
        starts, ends = self.examples.edges().T
        num_cut = int(((starts > self.seq_len) | (ends - starts > self.seq_len)).sum())
        cut = f"; {num_cut:,} have an input or a target of more than {self.seq_len:,} tokens, which is cut"
        return f"{self.num_samples:,} samples of rows{cut if num_cut else ''}"

    def num_targets(self, indices: Iterable[int]) -> int:
        """Return the number of tokens of these targets, or the number of targets if they are classes."""
        return int(self.targets[list(indices)].sum())

    def rows(self, indices: Sequence[int]) -> Rows:
        """Return these samples. Padding is masked and not learned. Targets are (B, T), or (B,) for classes."""
        inputs = np.full((len(indices), self.seq_len), self.pad, np.int64)
        targets, mask = np.full_like(inputs, -100), np.zeros_like(inputs)
        for row, index in enumerate(indices):
            if not 0 <= index < self.num_samples:
                raise IndexError(index)
            ids, ((begin, end),) = self.examples.read(index)
            prompt, target = ids[:begin][: self.seq_len], ids[begin:end][: self.seq_len]
            inputs[row, : len(prompt)], mask[row, : len(prompt)] = prompt, 1
            targets[row, : len(target)] = target
        return Rows(inputs, targets[:, 0] if self.is_label else targets, None, mask)


def pairs(examples: Examples, seq_len: int, task: Task) -> PairRows:
    """Make samples of examples, with input and target of at most ``seq_len`` tokens each."""
    starts, ends = examples.edges().T
    return PairRows(examples, seq_len, task.pad, task.labels is not None, np.minimum(ends - starts, seq_len))
