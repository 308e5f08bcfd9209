"""What a step of our GPT sends on ``cp``, in closed form: what tests expect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.spec.traffic.context import padded_length
from shardwise.spec.traffic.data import Collective, all_reduced_numel


@dataclass(frozen=True)
class ContextStep:
    """A forward and backward of our GPT on one rank.

    Attributes:
        num_layers: Blocks.
        kv_width: Number of key heads times their width, on this rank.
        batch: Sequences.
        length: Tokens of a whole sequence.
        size: Ranks of ``cp``.
        rank: Coordinate on ``cp``.
        item_bytes: Bytes of an element of the activations.
        sum_item_bytes: Bytes of an element of the gradients that are sent: at least 4.
        is_recomputed: Each block is recomputed in backward.
        multiple: A rank's number of positions is a multiple of this: ``tp`` under sequence parallelism.
    """

    num_layers: int
    kv_width: int
    batch: int
    length: int
    size: int
    rank: int = 0
    item_bytes: int = 4
    sum_item_bytes: int = 4
    is_recomputed: bool = False
    multiple: int = 1

    def trace(self) -> list[Collective]:
        """In the order of issue."""
        units = [f"blocks.{index}.attention" for index in range(self.num_layers)]
        trace = [message for unit in units for message in self._forward(unit)]
        trace.append(Collective("all_reduce", "loss", all_reduced_numel(1, self.size, self.rank) * 8, "cp"))
        for unit in reversed(units):
            if self.is_recomputed:
                trace += self._forward(unit)
            trace += self._backward(unit)
        return trace

    @property
    def sent_bytes(self) -> int:
        """All bytes that this rank sends on ``cp``."""
        return sum(collective.sent_bytes for collective in self.trace())

    @property
    def block_numel(self) -> int:
        """Elements of the keys and values of a rank."""
        return 2 * self.batch * padded_length(self.length, self.size, self.multiple) // self.size * self.kv_width

    def _forward(self, unit: str) -> Iterator[Collective]:
        for _ in range(self.size - 1):
            yield from self._hop(unit, self.item_bytes)

    def _backward(self, unit: str) -> Iterator[Collective]:
        for hop in range(self.size):
            if hop < self.size - 1:
                yield from self._hop(unit, self.item_bytes)
            if hop:
                yield from self._hop(unit, self.sum_item_bytes)

    def _hop(self, unit: str, item_bytes: int) -> Iterator[Collective]:
        yield Collective("send", unit, self.block_numel * item_bytes, "cp")
        yield Collective("receive", unit, 0, "cp")
