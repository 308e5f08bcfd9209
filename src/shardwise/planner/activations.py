"""Bytes that a unit saves for backward, and bytes that it needs while backward computes, for one microbatch.

``cost.part`` counts what autograd saves. This module adds the effects of our engine and of torch's choice of kernels:
attention without a fused kernel, the exchange of keys and values in a ring, and temporary tensors of backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardwise.cost.work import UnitWork, item_bytes
from shardwise.cost.workload import Workload
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.policies import is_thin
from shardwise.spec.shape import Block, Experts, ModelShape


@dataclass(frozen=True, slots=True)
class Saved:
    """Bytes of one unit and one microbatch.

    Attributes:
        kept: Bytes stored from forward to backward, on the host if activations are offloaded.
        whole: The same without recomputation; a unit also stores these while it is recomputed.
        passing: Temporary bytes at the peak of backward.
        output: Bytes of the output.
        terms: Bytes stored from the input pass of a split backward to its weight pass.
        stays: Bytes between this unit and the one before it, which are never on the host.
    """

    kept: float
    whole: float
    passing: float
    output: float
    terms: float = 0.0
    stays: float = 0.0


class Around(NamedTuple):
    """The model, plan and workload around a unit, on which its activations depend."""

    shape: ModelShape
    plan: ParallelPlan
    workload: Workload

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return item_bytes(self.workload)

    def stream(self, unit: UnitWork) -> float:
        """Bytes of the residual stream at all positions of a microbatch."""
        return unit.stream_bytes * (self.plan.tp if self.plan.sequence_parallel else 1)

    def tokens(self, unit: UnitWork) -> float:
        """Tokens of a microbatch on a rank."""
        return self.stream(unit) / (self.item * self.shape.hidden)


def block_saved(unit: UnitWork, block: Block | None, around: Around, recompute: str) -> Saved:
    """The tensors that a block saves.

    Args:
        unit: The block's work.
        block: The block; ``None``: the unit was traced, so everything that it saves is known.
        around: The model, plan and workload.
        recompute: ``"none"``, ``"selective"`` (outputs of products and attention are kept) or ``"full"``.
    """
    if block is None:
        passing = max(2 * unit.stream_bytes + unit.inner_bytes, unit.largest_bytes)  # a gradient of each kind
        return Saved(unit.kept_bytes(recompute), unit.saved_bytes, passing, unit.stream_bytes)
    scores, products_of_scores = _unfused(unit, block, around)
    products, saved, passing = _mixture(unit, block, around)
    whole = unit.saved_bytes + scores + saved
    casts = block.norm in {"rms", "wide"} and around.item == 2 and block.num_norms > block.num_last_norms
    if recompute != "none" and casts and not around.workload.compile:
        whole += unit.input_bytes  # the first norm saves a copy in fp32 of the input
    outputs = unit.selective_bytes + products_of_scores + products
    kept = {"none": whole, "selective": outputs, "full": unit.input_bytes}[recompute]
    passing += (1 + block.has_dropout) * around.stream(unit)
    if around.plan.cp > 1:
        passing = max(passing, _ring(unit, block, around) - 2 * unit.inner_bytes)
    more = unit.encoder_bytes
    return Saved(kept, whole + more, passing, output=unit.stream_bytes, stays=more)


def weight_terms(unit: UnitWork, around: Around) -> float:
    """Bytes that a split backward stores for its weight pass: inputs of linear layers and gradients of their outputs.

    Equal products side by side (keys and values, gate and up) share one input. Stacked experts are not linear layers.
    In the dense form of our GPT's mixture every expert processes every token.
    """
    numel, is_dense = 0.0, not around.plan.routes_tokens
    for each in unit.products:
        if each.is_trained and not each.is_convolution and (around.shape.family == "gpt" or not each.is_batched):
            rows = around.tokens(unit) if each.is_batched and is_dense else each.rows
            has_several = each.is_batched and not (is_dense and each.inner == around.shape.hidden)
            numel += rows * ((each.count if has_several else 1) * each.inner + each.count * each.columns)
    return around.item * numel


def _unfused(unit: UnitWork, block: Block, around: Around) -> tuple[float, float]:
    """Bytes saved in addition if no kernel fuses attention, and the part that selective recomputation saves too.

    Scores are saved, and keys and values are repeated. For families without any fused kernel in transformers, ``unit``
    already counts the scores.
    """
    attention = block.attention
    if not attention.saves_scores(around.workload.seq_len, around.item, around.plan.cp):
        return 0.0, 0.0
    repeated = 2 * around.item * around.tokens(unit) * (attention.q_width - attention.kv_width) / around.plan.tp
    pairs = sum(work.queries * work.keys * work.heads for work in unit.attention)
    is_computed_again = all(is_thin(attention.head_dim, work.keys) for work in unit.attention)
    return repeated + pairs * around.item, 0.0 if is_computed_again else pairs * around.item


def _mixture(unit: UnitWork, block: Block, around: Around) -> tuple[float, float, float]:
    """Bytes that a feed-forward adds to outputs of products, to saved tensors, and to the peak of backward.

    The last projection and its adapter each compute a gradient of their input, before the two are added. Experts run
    one after another. In the dense form of our GPT's mixture every expert processes every token.
    """
    feed = block.feed_forward
    if not isinstance(feed, Experts):
        return 0.0, 0.0, unit.inner_bytes * (1 + (around.workload.lora_rank is not None and not feed.is_gated))
    if around.shape.family != "gpt":  # the weighted outputs and two gradients, or the inner activations' gradients
        weighted = 3 * feed.per_token * (4 if feed.has_wide_weights else around.item) / around.item
        return 0.0, 0.0, max(weighted * around.stream(unit), unit.inner_bytes)
    if around.plan.routes_tokens:
        return 0.0, 0.0, (2 * feed.per_token + 1) * around.stream(unit)
    others = feed.count - feed.per_token
    inner = others / feed.per_token * unit.inner_bytes
    rows = (feed.count - 2 * feed.per_token) * around.stream(unit)
    return inner + others * around.stream(unit), 2 * inner + rows, unit.inner_bytes / feed.per_token


def _ring(unit: UnitWork, block: Block, around: Around) -> float:
    """Bytes of ring attention in backward: blocks of keys and values that are sent and received, and sums in fp32."""
    item, wide, tokens = around.item, 4, around.tokens(unit)
    q = tokens * unit.attention[0].width
    kv = tokens * max(block.attention.kv_heads / around.plan.tp, 1) * block.attention.head_dim
    travelling = 2 * item * (2 if around.plan.cp > 2 else 1)
    return q * (6 * item + wide) + kv * (travelling + 4 * item + 6 * wide)


@dataclass(frozen=True, slots=True)
class HeadSaved:
    """Bytes of the head and the loss.

    Attributes:
        kept: Tensors that the last norm saves, and the head's input.
        waits: Tensors that the loss saves.
        most: Logits while the loss is computed, or with gradients in its backward, or tensors of the norm's backward.
    """

    kept: float
    waits: float
    most: float


def head_saved(unit: UnitWork, around: Around) -> HeadSaved:
    """Bytes of the head: logits in the products' dtype and in fp32, and the log-softmax of the cross entropy in fp32.

    Backward has the log-softmax, its gradient and the gradient of the logits; over ``tp`` the softmax, its gradient,
    and that gradient in the products' dtype.
    """
    item = around.item
    logits = unit.inner_bytes / item
    eager = [part.saved_bytes for part in unit.parts if part.name == "norm" and part.num_kernels > 1]
    of_norm = sum(24 * unit.stream_bytes / item - saved for saved in eager)  # as in ``cost.block``
    kept = sum(part.saved_bytes for part in unit.parts if part.name != "loss")
    kept += around.stream(unit) - unit.stream_bytes  # gathered over tp
    if unit.largest_bytes:  # traced: ``kept`` includes what the loss saves; two gradients of the largest tensor come
        return HeadSaved(kept, 0.0, 2 * unit.largest_bytes)
    if around.workload.chunked_loss:
        # The logits of a chunk are about as large as the hidden states. Gradients of hidden states and of the weight
        # are computed in forward and stored until backward.
        hidden = around.stream(unit) / item
        logit_bytes = item * (hidden + logits / around.tokens(unit) * around.shape.hidden)
        return HeadSaved(kept, logit_bytes, max((item + 8) * hidden + logit_bytes, of_norm))
    each = 8 + item * (item == 2) if around.plan.tp > 1 else 12
    capped = any(block.attention.plain == "capped" for _, block in around.shape.stacks) * item  # Gemma 2 caps both
    return HeadSaved(kept, (4 + capped) * logits, max((each + capped) * logits, of_norm))
