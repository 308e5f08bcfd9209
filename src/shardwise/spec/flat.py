"""Runs of parameters that an optimizer may update as one flat tensor. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.spec.layout import Piece


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Elements ``start`` to ``stop`` of what a rank holds of a group: pieces of one class and the padding between.

    Attributes:
        kind: Class of every piece in it.
        pieces: In the order in which they lie.
    """

    kind: int
    pieces: tuple[Piece, ...]

    @property
    def start(self) -> int:
        """Where its first piece begins."""
        return self.pieces[0].offset

    @property
    def stop(self) -> int:
        """Where its last piece ends."""
        return self.pieces[-1].offset + self.pieces[-1].numel

    @property
    def numel(self) -> int:
        """Elements, padding between pieces included."""
        return self.stop - self.start


def flat_ranges(pieces: Sequence[Piece], kinds: Sequence[int | None]) -> tuple[FlatRange, ...]:
    """The fewest ranges that hold every piece together with pieces of its own class only.

    Args:
        pieces: What a rank holds of each parameter of a group; empty ones are in no range.
        kinds: Class of each parameter by index, such as its weight-decay group; ``None`` for one that is left out.
    """
    runs: list[list[Piece]] = []
    last: int | None = None
    for piece in sorted((piece for piece in pieces if piece.numel), key=lambda piece: piece.offset):
        kind = kinds[piece.index]
        if kind is not None and kind == last:
            runs[-1].append(piece)
        elif kind is not None:
            runs.append([piece])
        last = kind
    return tuple(FlatRange(kinds[run[0].index] or 0, tuple(run)) for run in runs)
