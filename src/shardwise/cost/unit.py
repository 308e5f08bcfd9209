"""The work of one rank in one unit of a model, for one microbatch, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.part import Part


@dataclass(frozen=True, slots=True)
class Product:
    """``count`` products ``(rows, inner) x (inner, columns)`` of one forward.

    Backward has one more for the gradient of the input, and one for that of the weight where it is trained.

    Attributes:
        rows: Tokens, as a rule.
        inner: Inputs of the layer on this rank.
        columns: Outputs of the layer on this rank.
        count: Equal products one after another.
        is_trained: The weight is trained.
        is_batched: One kernel computes all ``count`` products.
        parts: Matrices of equal size side by side in the weight: queries, keys and values, or gate and up.
        is_convolution: ``inner`` is a field of a convolution, whose rows do not lie in memory as those of a matrix.
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
        """Operations of the forward."""
        return 2.0 * self.rows * self.inner * self.columns * self.count

    @property
    def backward_flops(self) -> float:
        """Operations of the backward."""
        return self.flops * (1 + self.is_trained)


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Scores and weighted sums of one forward: every query with the keys that it may see.

    Attributes:
        queries: Tokens of the microbatch on this rank.
        keys: Keys that a query is compared with where nothing is masked: the sequence, or the window.
        width: Heads of this rank times the width of a head.
        heads: Heads of this rank.
        is_causal: Half of the pairs are masked.
        is_fused: One kernel computes it; else the scores are kept in memory.
    """

    queries: float
    keys: float
    width: float
    heads: float
    is_causal: bool
    is_fused: bool = True

    @property
    def flops(self) -> float:
        """Operations of the forward, masked pairs included."""
        return 4.0 * self.queries * self.keys * self.width


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective inside a unit, on ``axis``.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all`` or ``ring``; that of forward.
        axis: ``tp``, ``cp`` or ``ep``.
        num_bytes: Bytes of the whole tensor on one rank in forward: of the sum, of what is gathered, of all tokens
            that a rank sends to experts wherever these are, of a rank's own keys and values.
        backward_bytes: The same of the collective that backward has in its place.
    """

    kind: str
    axis: str
    num_bytes: float
    backward_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitWork:
    """One unit of the model on one rank, one microbatch, forward; backward follows from it.

    Attributes:
        name: ``embedding``, ``block`` with its stack's number, or ``head``.
        count: Equal units of this kind in the whole model.
        num_parameters: Parameters of one on this rank before data-parallel sharding: after ``tp`` and ``ep``. Adapters
            are included.
        num_expert_parameters: Those of them that are routed experts'.
        num_trained: Those of them that are trained.
        products: Matrix products.
        attention: Attention.
        parts: Everything else that is computed, and what autograd keeps of all of it.
        largest_bytes: Bytes of the largest tensor that a traced unit keeps.
        stream_bytes: Bytes of one copy of the residual stream on this rank, ``2 n h`` in 16 bit.
        inner_bytes: Bytes of the feed-forward's inner activations, ``2 n f / t``, gated twice; of the head's logits.
        selective_bytes: Bytes kept where only the outputs of products and attention are, and the unit's input.
        input_bytes: Bytes of the unit's input, all that is kept where the unit is recomputed.
        scores_bytes: Bytes kept besides where attention is not one kernel.
        regathered_bytes: Of what is kept with ``sequence_parallel``, the part of inputs of products that other ranks
            have, too: our engine keeps it, Megatron gathers it again in backward.
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
    exchanges: tuple[Exchange, ...] = ()

    @property
    def flops(self) -> float:
        """Operations of the forward: products and attention, masked pairs included."""
        return sum(product.flops for product in self.products) + sum(work.flops for work in self.attention)

    @property
    def step_flops(self) -> float:
        """Operations of forward and backward, nothing recomputed."""
        return (
            self.flops + sum(each.backward_flops for each in self.products) + 2 * sum(a.flops for a in self.attention)
        )

    @property
    def saved_bytes(self) -> float:
        """Bytes that autograd keeps until backward where nothing is recomputed and attention is one kernel."""
        return sum(part.saved_bytes for part in self.parts)

    def kept_bytes(self, recompute: str) -> float:
        """The same where backward recomputes ``"none"``, ``"selective"`` or ``"full"``."""
        return {"none": self.saved_bytes, "selective": self.selective_bytes, "full": self.input_bytes}[recompute]

    @property
    def forward_bytes(self) -> float:
        """Bytes that forward reads and writes besides products and attention."""
        return sum(part.forward_bytes for part in self.parts)

    @property
    def backward_bytes(self) -> float:
        """Bytes that backward reads and writes besides products and attention."""
        return sum(part.backward_bytes for part in self.parts)

    @property
    def num_kernels(self) -> int:
        """Kernels that forward launches."""
        return sum(product.num_kernels for product in self.products) + sum(part.num_kernels for part in self.parts)
