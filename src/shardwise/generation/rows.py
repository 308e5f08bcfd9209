"""Which rank generates which rows of a batch, and how those in step tell each other of theirs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.comm.base import Comm
from shardwise.comm.control import agree
from shardwise.spec.schedule.decode import divide


class Shares:
    """The rows of a batch by data-parallel rank, in parts that go through the model one after the other.

    Args:
        num_rows: Of each data-parallel rank's batch.
        comm: Over the data-parallel ranks; ``None`` where there is one only.
        is_divided: They have one batch, and each generates some rows of it. Else each has rows of its own.
        max_parts: Into so many parts at most. All ranks have equally many, of which some may be empty.
    """

    def __init__(self, num_rows: Sequence[int], comm: Comm | None, *, is_divided: bool, max_parts: int) -> None:
        self._comm = comm
        self._is_divided = is_divided
        self._rank = 0 if comm is None else comm.rank
        self.num_rows = num_rows[self._rank]
        shares = divide(self.num_rows, len(num_rows)) if is_divided else [range(count) for count in num_rows]
        num_parts = min(max_parts, max(map(len, shares)))
        self._parts = [[share[part.start : part.stop] for part in divide(len(share), num_parts)] for share in shares]
        self.num_parts = num_parts

    def own(self, part: int) -> range:
        """This rank's rows in a part."""
        return self._parts[self._rank][part]

    def exchange(self, part: int, tokens: Sequence[int]) -> dict[int, int]:
        """The new tokens of a part, by row: those of this rank's rows, which are given, and the others'.

        Collective:
            Where the rows are divided an all-gather of eight bytes for each on the data-parallel axes.
        """
        if not self._is_divided or self._comm is None:
            return dict(zip(self.own(part), tokens, strict=True))
        every = [rows[part] for rows in self._parts]
        width = max(map(len, every))
        buffer = torch.zeros(len(every), width, dtype=torch.int64, device=self._comm.device)
        buffer[self._rank, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        self._comm.all_gather(buffer.view(-1), unit="tokens").wait()
        return {
            row: token
            for rows, found in zip(every, buffer.tolist(), strict=True)
            for row, token in zip(rows, found[: len(rows)], strict=True)
        }

    def is_over(self, part: int, is_live: Sequence[bool]) -> bool:
        """Whether all rows of a part have ended, on every rank.

        Collective:
            Where each rank has rows of its own an all-gather of eight bytes on the data-parallel axes.
        """
        if self._comm is None or self._is_divided:
            return not any(is_live[row] for rows in self._parts for row in rows[part])
        return not any(agree(self._comm, int(any(is_live[row] for row in self.own(part)))))
