"""Bytes that a unit's forward leaves for backward, and what passes by while it computes, for one microbatch.

They follow from the tensors that autograd saves, as the engine's dry run finds them: inputs of norms and of products,
queries, keys, values and output of attention, inputs of activations. With ``n`` tokens on a rank, ``h``, ``f``, ``q``
and ``kv`` the widths of stream, feed-forward, queries and keys, a block of GPT keeps ``n (4 h + 2 q + 2 kv + 2 f)``
elements (Korthikanti et al., arXiv 2205.05198, has 34 bytes for ``h = q = kv``, ``f = 4 h``: these 32, and 2 of dropout
masks, which are left out here).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from shardwise.cost.work import UnitWork, item_bytes
from shardwise.cost.workload import Workload
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import Block, Experts, ModelShape

#: Families whose norms are layer norms, one operator that saves its input. Root-mean-square norms are written as
#: several operators (transformers, torch before 2.8): they save their input in fp32 and the normalized input besides.
FUSED_NORMS = ("gpt", "gpt2", "gpt_neox", "opt", "bert", "vit")

#: Families with one projection for queries, keys and values and rotary positions: values are a view of its whole
#: output, which stays beside the rotated queries and keys.
FUSED_ROTARY = ("gpt_neox", "phi3")

#: Families whose norms multiply in fp32, and keep that result besides.
WIDE_NORMS = ("gemma", "gemma2", "gemma3_text")

#: Families whose attention no fused kernel computes (scores are bounded by a tanh): tanh, softmax in fp32, and weights
#: of every pair are saved.
EAGER_ATTENTION = ("gemma2",)

#: Tensors of a feed-forward's width that are saved, where that is not two (input and output of the activation): ReLU
#: saves its output alone, GPT-2's tanh form, as transformers writes it, three results in between.
SAVED_WIDTHS = {"opt": 1, "t5": 1, "gpt2": 5}


@dataclass(frozen=True, slots=True)
class Saved:
    """Bytes of one unit and one microbatch.

    Attributes:
        kept: From its forward to its backward.
        whole: The same where nothing is recomputed; while a unit is recomputed it has these.
        passing: What its backward adds when it needs most.
        output: Its output.
    """

    kept: float
    whole: float
    passing: float
    output: float


@dataclass(frozen=True, slots=True)
class Around:
    """What besides the block decides about its activations.

    Attributes:
        family: The model's family.
        tokens: Tokens of a microbatch on a rank.
        seq_len: Tokens of a sequence.
        hidden: Width of the stream.
        item: Bytes of an element.
        tp: Tensor-parallel ranks.
        cp: Context-parallel ranks.
        divides_sequence: Norms and the stream are divided over ``tp``.
        routes_tokens: Mixtures send tokens to the ranks that have their experts.
        is_compiled: Element-wise operations are fused, and what they make is computed again in backward.
    """

    family: str
    tokens: float
    seq_len: int
    hidden: int
    item: int
    tp: int = 1
    cp: int = 1
    divides_sequence: bool = False
    routes_tokens: bool = False
    is_compiled: bool = False

    @classmethod
    def of(cls, shape: ModelShape, plan: ParallelPlan, workload: Workload) -> Around:
        """Those of a plan."""
        return cls(
            family=shape.family,
            tokens=workload.micro_batch * workload.seq_len / plan.cp,
            seq_len=workload.seq_len,
            hidden=shape.hidden,
            item=item_bytes(workload),
            tp=plan.tp,
            cp=plan.cp,
            divides_sequence=plan.sequence_parallel,
            routes_tokens=plan.routes_tokens,
            is_compiled=workload.compile or plan.compile,
        )


@functools.lru_cache(maxsize=4096)
def block_saved(block: Block, around: Around, recompute: str) -> Saved:
    """What a block saves.

    Args:
        block: The block.
        around: How it computes.
        recompute: ``"none"``, ``"selective"`` (outputs of products and attention are kept) or ``"full"``.
    """
    n, h, item, t = around.tokens, around.hidden, around.item, around.tp
    stream = item * n * h
    own = stream / t if around.divides_sequence else stream
    attentions = [block.attention] + ([block.cross] if block.cross is not None else [])
    widths = sum(2 * a.q_width + 2 * a.kv_width for a in attentions) / t
    numbers = 4 * n * sum(a.heads for a in attentions) / t  # log-sum-exp of every query
    attention = item * n * widths + numbers
    if around.family in FUSED_ROTARY:
        attention += item * n * (block.attention.q_width + block.attention.kv_width) / t
    is_grouped = block.attention.kv_heads < block.attention.heads
    is_eager = around.family in EAGER_ATTENTION
    if is_eager or (item == 4 and is_grouped):  # no fused kernel takes groups in fp32
        groups = 2 * n * (block.attention.q_width - block.attention.kv_width) / t
        pairs = n * around.seq_len * block.attention.heads / t
        attention += item * groups + ((4 + 2 * item) if is_eager else item) * pairs
    kept_feed, products_feed, inner = _feed_forward(block, around)
    norms = sum(_norm(around, h) for _ in range(min(block.num_norms, 2 * len(attentions) + 2)))
    qk_norm = _norm(around, block.attention.q_width / t) + _norm(around, block.attention.kv_width / t)
    norms += qk_norm if block.attention.norm_numel else 0.0
    inputs = (len(attentions) + 1) * stream  # of the products: outputs of norms
    whole = norms + inputs + attention + kept_feed
    results = (len(attentions) + 1) * stream  # of the projections back to the stream
    kept = {"none": whole, "selective": own + attention + products_feed + results, "full": own}[recompute]
    passing = 2 * stream + inner
    if around.cp > 1:
        passing = max(passing, _ring(block, around) - kept_feed)
    return Saved(kept=kept, whole=whole, passing=passing, output=own)


def _norm(around: Around, width: float) -> float:
    """What a norm of ``width`` saves besides its output, which is the next product's input."""
    n, item = around.tokens, around.item
    share = around.tp if around.divides_sequence else 1
    if around.family in FUSED_NORMS or around.is_compiled:
        return (item * n * width + 8 * n) / share
    results = 4 if around.family in WIDE_NORMS else item
    return ((4 + results if item == 2 else 2 * item) * n * width + 4 * n) / share


def _feed_forward(block: Block, around: Around) -> tuple[float, float, float]:
    """Bytes that a feed-forward saves, those of them that products give, and the width that passes by in backward."""
    n, h, item, t = around.tokens, around.hidden, around.item, around.tp
    feed = block.feed_forward
    if not isinstance(feed, Experts):
        inner = item * n * feed.up_width / t
        if feed.is_gated:
            return (1.5 if around.is_compiled else 2) * inner, inner, inner
        widths = SAVED_WIDTHS.get(around.family, 2)
        return (1 if around.is_compiled else widths) * inner, inner, inner
    is_dense = around.family == "gpt" and not around.routes_tokens
    chosen = feed.count if is_dense else feed.per_token
    inner = item * n * chosen * feed.mlp.up_width / t
    rows = item * n * chosen * h * (1 if is_dense else 2)  # what experts read and give
    scores = 4 * n * feed.count
    kept, products = 2 * inner + rows + scores, inner + rows / (1 if is_dense else 2)
    passing = inner / feed.count if is_dense else rows + item * n * h  # one expert after another
    if feed.shared is not None:
        shared = item * n * feed.shared.up_width / t
        kept, products, passing = kept + 2 * shared, products + shared, passing + shared
    return kept, products, passing


def _ring(block: Block, around: Around) -> float:
    """What attention around a ring holds in backward: blocks of keys and values that travel, and sums in fp32."""
    n, item, t = around.tokens, around.item, around.tp
    wide = 4 if item == 2 else item
    q, kv = n * block.attention.q_width / t, n * block.attention.kv_width / t
    travelling = 2 * item * (2 if around.cp > 2 else 1)
    return q * (6 * item + wide) + kv * (travelling + 4 * item + 6 * wide)


@dataclass(frozen=True, slots=True)
class HeadSaved:
    """Bytes of the head and the loss.

    Attributes:
        kept: Inputs of the last norm and of the head.
        forward: Logits while the loss is computed.
        backward: Logits and their gradients while the loss's backward runs.
    """

    kept: float
    forward: float
    backward: float


def head_saved(unit: UnitWork, around: Around) -> HeadSaved:
    """The head: logits in the products' dtype, then in fp32, and what the cross entropy keeps of them in fp32.

    Its backward has the log-softmax, its gradient and the gradient of the logits; over ``tp`` the softmax, its gradient
    and that in the products' dtype.
    """
    item = around.item
    logits = unit.inner_bytes / item
    share = around.tp if around.divides_sequence else 1
    kept = (_norm(around, around.hidden) + unit.stream_bytes) if share == 1 else unit.stream_bytes * (1 + 1 / share)
    if around.tp > 1:
        return HeadSaved(kept, (item + 4) * logits, (4 + 4 + (item if item == 2 else 0)) * logits)
    wide = 0 if item == 4 else 4
    return HeadSaved(kept, (item + wide + 4) * logits, 12 * logits)
