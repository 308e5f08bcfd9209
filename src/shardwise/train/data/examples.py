"""Tokenized conversations and answers: their ids, where each ends, and which of their tokens are learned.

A folder holds ``tokens`` (a token file of all examples, one behind the other), ``ends.npy`` (int64, one past the last
token of each example) and ``spans.npy`` (int64, (S, 3): example, first learned token, one past the last, counted from
the example's first token). The arrays are mapped, so that a rank reads what its samples need.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardwise.launch.file import replacing
from shardwise.train.data.token_files import map_tokens, write_tokens

TOKENS, _ENDS, _SPANS = "tokens", "ends.npy", "spans.npy"


class Example(NamedTuple):
    """One of them.

    Attributes:
        ids: Of all its tokens.
        spans: First and one past the last of those that are learned, in order.
    """

    ids: Any
    spans: Sequence[tuple[int, int]]


def write_examples(folder: Path, examples: Iterable[Example], *, vocab_size: int) -> None:
    """Write the files of a folder, that of the tokens last: where it is there, all are."""
    ends: list[int] = []
    spans: list[tuple[int, int, int]] = []

    def ids() -> Iterator[np.ndarray]:
        total = 0
        for number, example in enumerate(examples):
            total += len(example.ids)
            ends.append(total)
            spans.extend((number, start, end) for start, end in example.spans)
            yield np.asarray(example.ids, np.int64)
        _save(folder / _ENDS, np.asarray(ends, np.int64))
        _save(folder / _SPANS, np.asarray(spans, np.int64).reshape(-1, 3))

    write_tokens(folder / TOKENS, ids(), vocab_size=vocab_size, should_replace=True)


def _save(path: Path, array: np.ndarray) -> None:
    with replacing(path, is_durable=True) as file:
        np.save(file, array)


@dataclass(frozen=True, slots=True)
class Examples:
    """Some neighbouring examples of a folder.

    Attributes:
        folder: Where they are.
        first: The first of them.
        count: How many.
    """

    folder: Path
    first: int
    count: int

    def lengths(self) -> np.ndarray:
        """Tokens of each, int64."""
        ends = _mapped(self.folder / _ENDS)
        start = int(ends[self.first - 1]) if self.first else 0
        return np.diff(ends[self.first : self.first + self.count], prepend=start)

    def num_targets(self, most: int) -> np.ndarray:
        """How many tokens of each are learned where it is cut to ``most``: the first has nothing before it."""
        numbers, starts, ends = self._spans().T
        learned = np.minimum(ends, most) - np.maximum(starts, 1)
        return np.bincount(numbers - self.first, np.maximum(learned, 0), minlength=self.count).astype(np.int64)

    def span_lengths(self, numbers: Sequence[int]) -> np.ndarray:
        """How many tokens of these examples, each with one span, are learned."""
        spans = _mapped(self.folder / _SPANS)[[self.first + number for number in numbers]]
        return spans[:, 2] - spans[:, 1]

    def read(self, number: int, most: int = 1 << 62) -> Example:
        """An example, counted from the first of these, cut to ``most`` tokens."""
        ends, place = _mapped(self.folder / _ENDS), self.first + number
        start = int(ends[place - 1]) if place else 0
        ids = _tokens(self.folder / TOKENS)[start : min(int(ends[place]), start + most)]
        spans = self._spans_of(place)
        cut = [(int(begin), min(int(end), len(ids))) for _, begin, end in spans if begin < len(ids)]
        return Example(ids, cut)

    def _spans(self) -> np.ndarray:
        spans = _mapped(self.folder / _SPANS)
        low, high = np.searchsorted(spans[:, 0], [self.first, self.first + self.count])
        return np.asarray(spans[low:high])

    def _spans_of(self, place: int) -> np.ndarray:
        spans = _mapped(self.folder / _SPANS)
        low, high = np.searchsorted(spans[:, 0], [place, place + 1])
        return spans[low:high]


def num_examples(folder: Path) -> int:
    """How many a folder holds."""
    return len(_mapped(folder / _ENDS))


@functools.lru_cache(64)
def _mapped(path: Path) -> np.ndarray:
    found = np.load(path, allow_pickle=False)  # an empty file cannot be mapped
    return found if found.size == 0 else np.load(path, mmap_mode="r", allow_pickle=False)


@functools.lru_cache(16)
def _tokens(path: Path) -> np.ndarray:
    return map_tokens(path)
