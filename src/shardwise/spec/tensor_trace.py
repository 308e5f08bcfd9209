"""The collectives on ``tp`` of one training step of our GPT, predicted from its shape alone.

Of every block, forward adds up what attention and feed-forward give, and backward the gradients of what they were
given: four all-reduces of batch x sequence x hidden elements (Narayanan et al., SC'21, section 3.2). Around the blocks
there are two more, of the embedding's output and of the gradient before the output projection, and the loss gathers
three numbers for each position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.spec.footprint import own_part
from shardwise.spec.trace import Collective


@dataclass(frozen=True)
class TensorStep:
    """A forward and backward of our GPT on one rank.

    Attributes:
        num_layers: Blocks.
        hidden: Width of the residual stream.
        num_tokens: Batch times sequence, on this rank.
        item_bytes: Of an element of the activations.
        loss_item_bytes: Of an element in the loss: 4, or 8 where logits are float64.
        size: Ranks of ``tp``.
        rank: This one.
        num_experts: Of a block's mixture; 0: there is none.
        is_recomputed: Each block is computed again in backward, up to the last tensor that backward needs.
    """

    num_layers: int
    hidden: int
    num_tokens: int
    size: int
    rank: int = 0
    item_bytes: int = 4
    loss_item_bytes: int = 4
    num_experts: int = 0
    is_recomputed: bool = False

    def trace(self) -> list[Collective]:
        """In the order of issue."""
        blocks = [f"blocks.{index}" for index in range(self.num_layers)]
        trace = [self._sum("token_embedding")]
        for block in blocks:
            trace += self._forward(block)
        sent = (self.size - 1) * 3 * self.num_tokens * self.loss_item_bytes
        trace += [Collective("all_gather", "loss", sent, "tp"), self._sum("lm_head")]
        for block in reversed(blocks):
            if self.is_recomputed:
                trace += list(self._forward(block))[:-1]
            trace += [self._sum(f"{mlp}.up") for mlp in reversed(self._feed_forwards(block))]
            trace.append(self._sum(f"{block}.attention.qkv"))
        return trace

    @property
    def sent_bytes(self) -> int:
        """All bytes that this rank sends on ``tp``."""
        return sum(collective.sent_bytes for collective in self.trace())

    def _forward(self, block: str) -> Iterator[Collective]:
        yield self._sum(f"{block}.attention.out")
        for mlp in self._feed_forwards(block):
            yield self._sum(f"{mlp}.down")

    def _feed_forwards(self, block: str) -> list[str]:
        return [f"{block}.mlp.experts.{index}" for index in range(self.num_experts)] or [f"{block}.mlp"]

    def _sum(self, unit: str) -> Collective:
        numel = self.num_tokens * self.hidden
        own = own_part(numel, self.size, self.rank)
        return Collective("all_reduce", unit, (numel - own + own * (self.size - 1)) * self.item_bytes, "tp")
