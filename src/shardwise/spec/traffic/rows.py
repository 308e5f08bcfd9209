"""Rows that travel in numbers that depend on values: tokens of experts, and rows of an embedding spread over ranks.

Of a batch of n tokens with k choices each, a rank has n·k rows to send, each of the width of a token. Forward exchanges
the counts, then sends rows to the ranks that hold the experts, and their results back; backward sends as much again, in
the other order (the gradients of the results go where the rows went, those of the rows come back)::

    forward    counts    8 (E - E/ep) bytes
               dispatch  rows for experts of other ranks
               combine   rows that came from other ranks
    backward   rows for experts of other ranks, then rows that came from other ranks

Where tokens choose evenly, (ep-1)/ep of the n·k rows travel each time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.spec.memory.footprint import own_part
from shardwise.spec.traffic.data import Collective

#: Bytes of a count, and of an id, as they travel.
COUNT_BYTES = ID_BYTES = 8


def capacity(factor: float | None, num_tokens: int, num_choices: int, num_experts: int) -> int | None:
    """The most rows that an expert takes from a batch of ``num_tokens``; ``None``: all."""
    return None if factor is None else math.ceil(factor * num_tokens * num_choices / num_experts)


def even_counts(num_rows: int, num_experts: int, limit: int | None = None) -> list[int]:
    """Rows for each expert if tokens choose as evenly as possible, which is assumed where values are not known."""
    counts = [own_part(num_rows, num_experts, expert) for expert in range(num_experts)]
    return counts if limit is None else [min(count, limit) for count in counts]


def local_range(num_experts: int, size: int, rank: int) -> tuple[int, int]:
    """The first expert that a rank of ``ep`` holds, and the one after its last."""
    each = num_experts // size
    return rank * each, (rank + 1) * each


@dataclass(frozen=True)
class MixtureTraffic:
    """What one call of a mixture sends on ``ep``.

    Attributes:
        unit: Path of the module.
        width: Elements of a token.
        rank: This rank on ``ep``.
        sent: By rank of ``ep``, the rows that it sends to each expert.
        item_bytes: Bytes of an element.
    """

    unit: str
    width: int
    rank: int
    sent: Sequence[Sequence[int]]
    item_bytes: int = 4

    def forward(self) -> Iterator[Collective]:
        """The collectives of a forward, in the order of issue."""
        size, num_experts = len(self.sent), len(self.sent[0])
        yield self._event((num_experts - num_experts // size) * COUNT_BYTES)
        yield self._event(self.num_away * self.width * self.item_bytes)
        yield self._event(self.num_foreign * self.width * self.item_bytes)

    def backward(self) -> Iterator[Collective]:
        """The gradients of the results, then of the rows."""
        _, dispatch, combine = self.forward()
        yield from (dispatch, combine)

    @property
    def num_away(self) -> int:
        """Rows for experts of other ranks."""
        return sum(self.sent[self.rank]) - self._between(self.rank)

    @property
    def num_foreign(self) -> int:
        """Rows from other ranks for this rank's experts."""
        return sum(self._between(source) for source in range(len(self.sent)) if source != self.rank)

    def _between(self, source: int) -> int:
        start, stop = local_range(len(self.sent[0]), len(self.sent), self.rank)
        return sum(self.sent[source][start:stop])

    def _event(self, num_bytes: int) -> Collective:
        return Collective("all_to_all", self.unit, num_bytes, "ep")


def row_bounds(num_rows: int, size: int) -> tuple[int, ...]:
    """Rank ``r`` of ``size`` holds the rows from bound ``r`` up to bound ``r + 1``; sizes differ by one at most."""
    return tuple(rank * num_rows // size for rank in range(size + 1))


def lookup_bytes(rank: int, asked: Sequence[Sequence[int]], row_bytes: int) -> tuple[int, ...]:
    """What a rank sends for a lookup: counts, ids, rows, and in backward gradients of rows.

    Args:
        rank: The rank.
        asked: ``asked[r][s]`` is the number of different rows of rank ``s`` that rank ``r`` looks up.
        row_bytes: Bytes of a row, and of its gradient.
    """
    peers = [other for other in range(len(asked)) if other != rank]
    wanted, answered = sum(asked[rank][other] for other in peers), sum(asked[other][rank] for other in peers)
    return ID_BYTES * len(peers), ID_BYTES * wanted, row_bytes * answered, row_bytes * wanted
