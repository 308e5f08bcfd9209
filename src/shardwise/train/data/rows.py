"""The samples of a step: some rows of tokens, by their index."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np


class Rows(NamedTuple):
    """Some samples, int64 each."""

    inputs: np.ndarray  # (B, T)
    targets: np.ndarray  # (B, T), what should follow; -100 where nothing is learned
    #: (B, T), places in the document, where documents do not see each other; else ``None``
    positions: np.ndarray | None = None
    mask: np.ndarray | None = None  # (B, T), 1 where attention may look, 0 at padding; ``None``: everywhere


def joined(found: Sequence[Rows], *, has_positions: bool) -> Rows:
    """Some rows as one, all with a mask or none. Where positions are wanted, rows without any are one document each."""
    inputs = np.concatenate([rows.inputs for rows in found])
    places = np.arange(inputs.shape[1])
    positions = [
        np.broadcast_to(places, rows.inputs.shape) if rows.positions is None else rows.positions for rows in found
    ]
    masks = [rows.mask for rows in found if rows.mask is not None]
    return Rows(
        inputs,
        np.concatenate([rows.targets for rows in found]),
        np.concatenate(positions) if has_positions else None,
        np.concatenate(masks) if masks else None,
    )


def shifted(tokens: np.ndarray, end: int | None) -> Rows:
    """Rows of (B, T + 1) tokens; positions begin anew behind every ``end``, the end of a document."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if end is None:
        return Rows(inputs, targets, None)
    places = np.broadcast_to(np.arange(inputs.shape[1]), inputs.shape)
    begins = np.zeros_like(places)
    begins[:, 1:] = np.where(inputs[:, :-1] == end, places[:, 1:], 0)
    return Rows(inputs, targets, places - np.maximum.accumulate(begins, axis=1))


class Samples(Protocol):
    """Samples that are read by index."""

    @property
    def num_samples(self) -> int:
        """As above."""

    def rows(self, indices: Sequence[int]) -> Rows:
        """These samples."""

    def num_targets(self, indices: Iterable[int]) -> int | None:
        """The number of learned tokens of these samples; ``None``: all. Reads no tokens."""
