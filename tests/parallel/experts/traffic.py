"""What a call of a mixture of experts sends on ``ep``, in closed form: what tests expect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.spec.traffic.data import Collective
from shardwise.spec.traffic.rows import local_range


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
        yield self._event(8 * (num_experts - num_experts // size))
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
