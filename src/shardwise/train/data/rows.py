"""Samples as rows of tokens, read by index."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np


class Rows(NamedTuple):
    """Several samples, int64 each."""

    inputs: np.ndarray  # (B, T)
    targets: np.ndarray  # (B, T), the next tokens; -100 for tokens that are not learned
    #: (B, T), positions in the document if documents are separated; else ``None``
    positions: np.ndarray | None = None
    mask: np.ndarray | None = None  # (B, T), 1 for tokens, 0 for padding; ``None``: no padding


def concatenate(found: Sequence[Rows], *, has_positions: bool) -> Rows:
    """Concatenate rows, which must all have a mask or none. With ``has_positions``, rows without any get 0, 1, ..."""
    inputs = np.concatenate([rows.inputs for rows in found])
    columns = np.arange(inputs.shape[1])
    positions = [
        np.broadcast_to(columns, rows.inputs.shape) if rows.positions is None else rows.positions for rows in found
    ]
    masks = [rows.mask for rows in found if rows.mask is not None]
    return Rows(
        inputs,
        np.concatenate([rows.targets for rows in found]),
        np.concatenate(positions) if has_positions else None,
        np.concatenate(masks) if masks else None,
    )


def shift(tokens: np.ndarray, end: int | None) -> Rows:
    """Split (B, T + 1) tokens into inputs and targets; positions restart at 0 after every ``end`` token."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if end is None:
        return Rows(inputs, targets, None)
    columns = np.broadcast_to(np.arange(inputs.shape[1]), inputs.shape)
    begins = np.zeros_like(columns)
    begins[:, 1:] = np.where(inputs[:, :-1] == end, columns[:, 1:], 0)
    return Rows(inputs, targets, columns - np.maximum.accumulate(begins, axis=1))


class Samples(Protocol):
    """Samples that are read by index."""

    @property
    def num_samples(self) -> int:
        """Number of samples."""

    def rows(self, indices: Sequence[int]) -> Rows:
        """Return the rows of these samples."""

    def num_targets(self, indices: Iterable[int]) -> int | None:
        """Return the number of learned tokens of these samples; ``None``: all. Reads no tokens."""
