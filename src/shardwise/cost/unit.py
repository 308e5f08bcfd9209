"""The work of one rank in one unit of a model, for one microbatch, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.part import Part


@dataclass(frozen=True, slots=True)
class Product:
    """``count`` products ``(rows, inner) x (inner, columns)`` of one forward.

    Backward has one more product for the gradient of the input, and one for the weight's gradient if it is trained.

    Attributes:
        rows: Usually tokens.
        inner: Inputs of the layer on this rank.
        columns: Outputs of the layer on this rank.
        count: Number of equal products.
        is_trained: The weight is trained.
        is_batched: One kernel computes all ``count`` products.
        parts: Matrices of equal size side by side in the weight: queries, keys and values, or gate and up.
        is_convolution: ``inner`` is the receptive field of a convolution, so rows are not contiguous in memory.
    """

    rows: float
    inner: float
    columns: float
    count: int = 1
    is_trained: bool = True
    is_batched: bool = False
    parts: int = 1
    is_convolution: bool = False

    @property
    def num_weights(self) -> float:
        """Elements of all ``count`` weights."""
        return self.inner * self.columns * self.count

    @property
    def num_kernels(self) -> int:
        """Kernels that the forward launches."""
        return 1 if self.is_batched else self.count

    @property
    def flops(self) -> float:
        """FLOPs of the forward."""
        return 2.0 * self.rows * self.inner * self.columns * self.count

    @property
    def backward_flops(self) -> float:
        """FLOPs of the backward."""
        return self.flops * (1 + self.is_trained)


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Scores and weighted sums of one forward.

    Attributes:
        queries: Tokens of the microbatch on this rank.
        keys: Keys for each query, masked ones included: the sequence, or the window.
        width: Heads of this rank times the width of a head.
        heads: Heads of this rank.
        is_causal: Half of the pairs are masked.
        is_fused: One kernel computes attention; else the scores are stored in memory.
    """

    queries: float
    keys: float
    width: float
    heads: float
    is_causal: bool
    is_fused: bool = True

    @property
    def flops(self) -> float:
        """FLOPs of the forward, masked pairs included."""
        return 4.0 * self.queries * self.keys * self.width


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective inside a unit, on ``axis``.

    Attributes:
        kind: Collective of forward: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all`` or ``ring``.
        axis: ``tp``, ``cp`` or ``ep``.
        num_bytes: Bytes of the full tensor on one rank in forward: the sum, the gathered tensor, all tokens that a rank
            sends to experts (also to its own), or a rank's keys and values.
        backward_bytes: The same for the corresponding collective of backward.
    """

    kind: str
    axis: str
    num_bytes: float
    backward_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitWork:
    """The forward work of one unit on one rank for one microbatch; backward's work follows from it.

    Attributes:
        name: ``embedding``, ``block`` with its stack's number, or ``head``.
        count: Number of equal units in the model.
        num_parameters: Parameters of one unit on this rank, divided by ``tp`` and ``ep`` but not by data parallelism,
            adapters included.
        num_expert_parameters: The part of ``num_parameters`` in routed experts.
        num_trained: The part of ``num_parameters`` that is trained.
        products: Matrix products.
        attention: Attention.
        parts: All other computation, and the bytes that autograd saves.
        largest_bytes: Bytes of the largest tensor that autograd saves in a traced unit.
        stream_bytes: Bytes of one copy of the residual stream on this rank, ``2 n h`` in 16 bit.
        inner_bytes: Bytes of the feed-forward's inner activations, ``2 n f / t`` (twice that if gated), or of the
            head's logits.
        selective_bytes: Saved bytes if only outputs of products and attention and the unit's input are saved.
        input_bytes: Bytes of the unit's input, the only saved tensor if the unit is recomputed.
        scores_bytes: Additional saved bytes if attention is not one kernel.
        regathered_bytes: With ``sequence_parallel``, the part of saved inputs of products that other ranks also have.
            Our engine saves it; Megatron gathers it again in backward.
        late_bytes: Bytes in backward beyond ``saved_bytes``, after that of the feed-forward: temporary tensors of an
            eager RMS norm or of scores, and gradients of the feed-forward's weights, less what the feed-forward saved.
        encoder_bytes: For a decoder's first block: saved bytes of modules between encoder and decoder.
        exchanges: Collectives inside the unit.
    """

    name: str
    count: int
    num_parameters: int
    num_expert_parameters: int = 0
    num_trained: int = 0
    products: tuple[Product, ...] = ()
    attention: tuple[AttentionWork, ...] = ()
    parts: tuple[Part, ...] = ()
    largest_bytes: float = 0.0
    stream_bytes: float = 0.0
    inner_bytes: float = 0.0
    selective_bytes: float = 0.0
    input_bytes: float = 0.0
    scores_bytes: float = 0.0
    regathered_bytes: float = 0.0
    late_bytes: float = 0.0
    encoder_bytes: float = 0.0
    exchanges: tuple[Exchange, ...] = ()

    @property
    def flops(self) -> float:
        """FLOPs of the forward: products and attention, masked pairs included."""
        return sum(product.flops for product in self.products) + sum(work.flops for work in self.attention)

    @property
    def step_flops(self) -> float:
        """FLOPs of forward and backward, without recomputation."""
        return (
            self.flops + sum(each.backward_flops for each in self.products) + 2 * sum(a.flops for a in self.attention)
        )

    @property
    def saved_bytes(self) -> float:
        """Bytes that autograd saves until backward, without recomputation and with fused attention."""
        return sum(part.saved_bytes for part in self.parts)

    def kept_bytes(self, recompute: str) -> float:
        """Bytes saved until backward with recomputation ``"none"``, ``"selective"`` or ``"full"``."""
        return {"none": self.saved_bytes, "selective": self.selective_bytes, "full": self.input_bytes}[recompute]

    @property
    def forward_bytes(self) -> float:
        """Bytes that forward reads and writes outside of products and attention."""
        return sum(part.forward_bytes for part in self.parts)

    @property
    def backward_bytes(self) -> float:
        """Bytes that backward reads and writes outside of products and attention."""
        return sum(part.backward_bytes for part in self.parts)

    @property
    def num_kernels(self) -> int:
        """Kernels that forward launches."""
        return sum(product.num_kernels for product in self.products) + sum(part.num_kernels for part in self.parts)
