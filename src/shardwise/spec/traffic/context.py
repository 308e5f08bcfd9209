"""The collectives on ``cp`` of one training step of our GPT, predicted from its shape alone.

With ``n`` ranks, a layer's forward sends ``n - 1`` blocks, each the keys and values of ``tokens / n`` positions. Its
backward sends as many again, and behind them as many blocks of gradients, which travel in fp32 where activations have
16 bit. A rank so sends ``3 (n - 1) * 2 * tokens / n * kv_width`` elements for a layer and step, whatever the length of
the sequence: the arithmetic of attention, which grows with its square, hides them ever better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.spec.memory.footprint import own_part
from shardwise.spec.traffic.data import Collective
from shardwise.spec.zigzag import padded_length


@dataclass(frozen=True)
class ContextStep:
    """A forward and backward of our GPT on one rank.

    Attributes:
        num_layers: Blocks.
        kv_width: Heads of the keys, times their width, on this rank.
        batch: Sequences.
        length: Their tokens, as they are given to every rank of ``cp``.
        size: Ranks of ``cp``.
        rank: This one.
        item_bytes: Of an element of the activations.
        sum_item_bytes: Of an element of the gradients that travel: at least 4.
        is_recomputed: Each block is computed again in backward.
        multiple: What every rank's number of positions is a multiple of besides: ``tp`` under sequence parallelism.
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
        own = own_part(1, self.size, self.rank)
        trace.append(Collective("all_reduce", "loss", (1 - own + own * (self.size - 1)) * 8, "cp"))
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
