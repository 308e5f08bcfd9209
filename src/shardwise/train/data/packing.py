"""Places examples into rows of one length.

With packing, an example goes into the fullest row with enough room, longest examples first (best fit decreasing: at
most 11/9 of the minimum number of rows, plus 4; Johnson, "Near-optimal bin packing algorithms", 1973). Positions
restart at 0 with every example, and attention does not cross examples. Examples longer than a row are cut. Examples
without learned tokens are left out.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.train.data.examples import Examples
from shardwise.train.data.rows import Rows


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of examples, as samples."""

    examples: Examples
    seq_len: int  # tokens per row; the rest of a row is padding
    order: np.ndarray  # numbers of the examples, row by row
    ends: np.ndarray  # end (exclusive) of each row in ``order``
    targets: np.ndarray  # number of learned tokens of each row
    num_tokens: int  # tokens of all rows, without padding
    num_cut: int  # number of examples that are longer than a row
    num_left_out: int  # number of examples without learned tokens
    has_positions: bool  # whether several examples share a row, without attending to each other

    @property
    def num_samples(self) -> int:
        """Number of rows."""
        return len(self.ends)

    def __str__(self) -> str:
        """Describe the layout of the examples in a line."""
        room = max(self.num_samples * self.seq_len, 1)
        notes = [f"{self.num_cut:,} longer than {self.seq_len:,} tokens and cut"] if self.num_cut else []
        notes += [f"{self.num_left_out:,} left out, as nothing of them is learned"] if self.num_left_out else []
        return (
            f"{len(self.order):,} conversations in {self.num_samples:,} samples, {self.num_tokens / room:.0%} full;"
            f" {self.targets.sum() / max(self.num_tokens, 1):.0%} of the tokens are learned"
        ) + "".join(f"; {note}" for note in notes)

    def num_targets(self, indices: Iterable[int]) -> int:
        """Return the number of learned tokens of these rows."""
        return int(self.targets[list(indices)].sum())

    def rows(self, indices: Sequence[int]) -> Rows:
        """Return these rows; padding is a separate document."""
        shape = len(indices), self.seq_len
        inputs, targets = np.zeros(shape, np.int64), np.full(shape, -100, np.int64)
        positions = np.zeros(shape, np.int64)
        for row, index in enumerate(indices):
            if not 0 <= index < self.num_samples:
                raise IndexError(index)
            at = 0
            for number in self.order[self.ends[index - 1] if index else 0 : self.ends[index]]:
                ids, spans = self.examples.read(int(number), self.seq_len)
                end = at + len(ids)
                inputs[row, at:end] = ids
                positions[row, at:end] = np.arange(len(ids))
                for first, last in spans:
                    begin = max(first, 1)  # the first token has no predecessor
                    targets[row, at + begin - 1 : at + last - 1] = ids[begin:last]
                at = end
            positions[row, at:] = np.arange(self.seq_len - at)
        return Rows(inputs, targets, positions if self.has_positions else None)


def pack(examples: Examples, seq_len: int, *, packs: bool) -> PackedRows:
    """Place examples into rows of ``seq_len`` tokens: several per row, or one per row.

    Takes about 2 s for a million examples. The result is the same in every process.
    """
    lengths, targets = examples.lengths(), examples.num_targets(seq_len)
    used = np.flatnonzero(targets > 0)
    sizes = np.minimum(lengths, seq_len)
    rows = _best_fit(used[np.argsort(-sizes[used], kind="stable")], sizes, seq_len) if packs else [[i] for i in used]
    order = np.array([number for row in rows for number in row], np.int64)
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    return PackedRows(
        examples,
        seq_len,
        order,
        ends,
        np.array([targets[row].sum() for row in rows], np.int64),
        int(sizes[used].sum()),
        int((lengths[used] > seq_len).sum()),
        len(lengths) - len(used),
        has_positions=packs,
    )


def _best_fit(order: np.ndarray, lengths: np.ndarray, capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # rows by remaining room
    rooms: list[int] = []  # its keys, in order
    for number in order.tolist():
        length = int(lengths[number])
        index = bisect.bisect_left(rooms, length)
        if index == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[index]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[index]
        rows[row].append(number)
        remaining = room - length
        if remaining:
            if remaining not in with_room:
                with_room[remaining] = []
                bisect.insort(rooms, remaining)
            with_room[remaining].append(row)
    return rows
