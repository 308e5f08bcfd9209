"""The collectives on ``tp`` of one training step of our GPT, predicted from its shape alone.

Each block issues four all-reduces of batch x sequence x hidden elements: forward sums the outputs of attention and of
the feed-forward, backward the gradients of their inputs (Narayanan et al., SC'21, section 3.2). Two more sum the
output of the embedding and the gradient before the output projection, and the loss gathers three numbers for each
position. A mixture of experts counts as one feed-forward; its backward also sums the gradients of the routing weights.

Under sequence parallelism each of the four becomes a reduce-scatter and an all-gather, which together send as much.
Gradients of norms, and of biases that are added after a sum, are then all-reduced by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.spec.traffic.data import Collective, all_reduced_numel


def gpt_elements(num_layers: int) -> list[str]:
    """The modules with parameters that our GPT's forward calls, in order."""
    blocks = [f"blocks.{index}" for index in range(num_layers)]
    return ["token_embedding", "position_embedding", *blocks, "final_norm", "lm_head"]


@dataclass(frozen=True)
class TensorStep:
    """A forward and backward of our GPT on one rank.

    Attributes:
        num_layers: Blocks.
        hidden: Width of the residual stream.
        num_tokens: Batch times sequence, on this rank.
        size: Ranks of ``tp``.
        rank: Coordinate on ``tp``.
        item_bytes: Bytes of an element of the activations.
        loss_item_bytes: Bytes of an element in the loss: 4, or 8 where logits are float64.
        num_experts: Experts of a block's mixture; 0: a plain feed-forward.
        is_recomputed: Each block is recomputed in backward, up to the last tensor that backward needs.
        divides_sequence: Sequence parallelism; predicted for blocks without experts.
        has_bias: Whether the model has biases.
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
    divides_sequence: bool = False
    has_bias: bool = True

    def trace(self) -> list[Collective]:
        """In the order of issue."""
        elements = gpt_elements(self.num_layers)
        return [*self.forward(elements), *self.backward(elements)]

    def forward(self, elements: Sequence[str]) -> list[Collective]:
        """The collectives of a forward through neighbouring modules, such as those of a pipeline stage."""
        trace: list[Collective] = []
        for name in elements:
            if name == "token_embedding":
                trace.append(self._sum(name))
            elif name == "lm_head":
                trace += self._given(name, is_backward=False)
                sent = (self.size - 1) * 3 * self.num_tokens * self.loss_item_bytes
                trace.append(Collective("all_gather", "loss", sent, "tp"))
            elif name.startswith("blocks."):
                trace += self._forward(name)
        return trace

    def backward(self, elements: Sequence[str]) -> list[Collective]:
        """The collectives of a backward through neighbouring modules."""
        trace: list[Collective] = []
        for name in reversed(elements):
            if name == "lm_head":
                trace += self._given(name, is_backward=True)
            elif name == "final_norm":
                trace += self._norm(name)
            elif name.startswith("blocks."):
                trace += self._backward(name)
        if self.divides_sequence and "blocks.0" in elements:
            trace.append(self._move("all_gather", "blocks.0"))
        return trace

    @property
    def sent_bytes(self) -> int:
        """All bytes that this rank sends on ``tp``."""
        return sum(collective.sent_bytes for collective in self.trace())

    def _forward(self, block: str) -> Iterator[Collective]:
        yield from self._given(f"{block}.attention.qkv", is_backward=False)
        yield self._summed(f"{block}.attention.out")
        first, last = self._feed_forward(block)
        yield from self._given(first, is_backward=False)
        yield self._summed(last)

    def _backward(self, block: str) -> Iterator[Collective]:
        first, last = self._feed_forward(block)
        yield from self._spread(last)
        if self.is_recomputed:  # backward now needs a tensor of the block for the first time
            yield from list(self._forward(block))[:-1]
        if self.num_experts:  # of each token's weights
            yield self._sum(first, self.num_tokens * self.num_experts)
        yield from self._given(first, is_backward=True)
        yield from self._norm(f"{block}.mlp_norm")
        yield from self._spread(f"{block}.attention.out")
        yield from self._given(f"{block}.attention.qkv", is_backward=True)
        yield from self._norm(f"{block}.attention_norm")

    def _given(self, unit: str, *, is_backward: bool) -> Iterator[Collective]:
        """Collectives on the input of a column-parallel layer."""
        if self.divides_sequence:
            yield self._move("reduce_scatter" if is_backward else "all_gather", unit)
        elif is_backward:
            yield self._sum(unit)

    def _summed(self, unit: str) -> Collective:
        """The collective on the output of a row-parallel layer, in forward."""
        return self._move("reduce_scatter", unit) if self.divides_sequence else self._sum(unit)

    def _spread(self, unit: str) -> Iterator[Collective]:
        """Collectives on the gradient of a row-parallel layer's output, the bias's first."""
        if self.divides_sequence:
            if self.has_bias:
                yield self._sum(unit, self.hidden)
            yield self._move("all_gather", unit)

    def _norm(self, unit: str) -> Iterator[Collective]:
        if self.divides_sequence:
            for _ in range(1 + self.has_bias):
                yield self._sum(unit, self.hidden)

    def _feed_forward(self, block: str) -> tuple[str, str]:
        """The modules that the first and the last collective of a feed-forward serve."""
        return (f"{block}.mlp", f"{block}.mlp") if self.num_experts else (f"{block}.mlp.up", f"{block}.mlp.down")

    def _sum(self, unit: str, numel: int | None = None) -> Collective:
        numel = self.num_tokens * self.hidden if numel is None else numel
        return Collective("all_reduce", unit, all_reduced_numel(numel, self.size, self.rank) * self.item_bytes, "tp")

    def _move(self, kind: str, unit: str) -> Collective:
        """An all-gather or reduce-scatter of equal parts: each rank sends one part to every other."""
        part = self.num_tokens * self.hidden // self.size
        return Collective(kind, unit, part * (self.size - 1) * self.item_bytes, "tp")
