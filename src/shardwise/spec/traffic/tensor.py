"""The collectives on ``tp`` of one training step of our GPT, predicted from its shape alone.

Of every block, forward adds up what attention and feed-forward give, and backward the gradients of what they were
given: four all-reduces of batch x sequence x hidden elements (Narayanan et al., SC'21, section 3.2). Around the blocks
there are two more, of the embedding's output and of the gradient before the output projection, and the loss gathers
three numbers for each position. A mixture of experts adds up once, as a feed-forward does, and in backward the
gradients of each token's weights besides.

Under sequence parallelism each of the four is a reduce-scatter on the one side and an all-gather on the other, which
send the same together, and gradients of norms and of biases that are added after a sum are added up by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.spec.errors import PlanError
from shardwise.spec.memory.footprint import own_part
from shardwise.spec.stages import gpt_elements
from shardwise.spec.traffic.data import Collective


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
        divides_sequence: Sequence parallelism, which is counted here for blocks without experts.
        has_bias: The model has biases.

    Raises:
        PlanError: Sequence parallelism with experts.
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

    def __post_init__(self) -> None:
        """Refuse what is not counted."""
        if self.divides_sequence and self.num_experts:
            raise PlanError(
                "TensorStep: sequence parallelism is counted for blocks without experts only.\n  Set num_experts=0."
            )

    def trace(self) -> list[Collective]:
        """In the order of issue."""
        elements = gpt_elements(self.num_layers)
        return [*self.forward(elements), *self.backward(elements)]

    def forward(self, elements: Sequence[str]) -> list[Collective]:
        """Of a forward of neighbouring elements of the model, such as a pipeline stage's."""
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
        """... and of the backward."""
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
        """What a column-parallel layer is given."""
        if self.divides_sequence:
            yield self._move("reduce_scatter" if is_backward else "all_gather", unit)
        elif is_backward:
            yield self._sum(unit)

    def _summed(self, unit: str) -> Collective:
        """What a row-parallel layer gives, in forward."""
        return self._move("reduce_scatter", unit) if self.divides_sequence else self._sum(unit)

    def _spread(self, unit: str) -> Iterator[Collective]:
        """The gradient of that, after the bias's."""
        if self.divides_sequence:
            if self.has_bias:
                yield self._sum(unit, self.hidden)
            yield self._move("all_gather", unit)

    def _norm(self, unit: str) -> Iterator[Collective]:
        if self.divides_sequence:
            for _ in range(1 + self.has_bias):
                yield self._sum(unit, self.hidden)

    def _feed_forward(self, block: str) -> tuple[str, str]:
        """The modules that its first and its last collective are for."""
        return (f"{block}.mlp", f"{block}.mlp") if self.num_experts else (f"{block}.mlp.up", f"{block}.mlp.down")

    def _sum(self, unit: str, numel: int | None = None) -> Collective:
        numel = self.num_tokens * self.hidden if numel is None else numel
        own = own_part(numel, self.size, self.rank)
        return Collective("all_reduce", unit, (numel - own + own * (self.size - 1)) * self.item_bytes, "tp")

    def _move(self, kind: str, unit: str) -> Collective:
        """Of equal parts each rank sends one to every other, its own or theirs."""
        part = self.num_tokens * self.hidden // self.size
        return Collective(kind, unit, part * (self.size - 1) * self.item_bytes, "tp")
