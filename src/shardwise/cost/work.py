"""The work of one rank in each unit for one microbatch, computed from a model, a plan and a workload.

``n`` is the number of tokens of the microbatch on this rank, ``b s / c`` (batch, sequence, ``cp``); ``h`` is the width
of the residual stream, ``f`` that of a feed-forward, ``t`` the degree of ``tp``.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from shardwise.cost.block import Degrees, Rank, block_work, item_bytes
from shardwise.cost.part import Part
from shardwise.cost.traced import TracedModel
from shardwise.cost.unit import AttentionWork, Exchange, Product, UnitWork
from shardwise.cost.workload import Workload
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import Block, ModelShape

__all__ = [
    "AttentionWork",
    "Exchange",
    "Product",
    "UnitWork",
    "hidden_matrices",
    "item_bytes",
    "model_work",
    "sequence_lengths",
]


def model_work(shape: ModelShape | TracedModel, plan: ParallelPlan, workload: Workload) -> tuple[UnitWork, ...]:
    """The work of the model's units in order: embedding, blocks, head. A run of equal blocks is one entry.

    Raises:
        PlanError: The model was traced, and the trace has no data for the plan or the workload.
    """
    if isinstance(shape, TracedModel):
        return shape.work(plan, workload)
    return _model_work(shape, Degrees(plan.tp, plan.cp, plan.ep, plan.sequence_parallel and plan.tp > 1), workload)


#: Families of which ``tp`` divides embedding and head only.
_WHOLE_BLOCKS = frozenset({"gpt_oss"})

#: Families whose experts ``sw.muon_groups`` treats as matrices: separate modules, or stacks (``experts.layer``).
_EXPERT_MATRICES = frozenset({"gpt", "mixtral", "qwen3_moe"})


def hidden_matrices(shape: ModelShape | TracedModel, unit: UnitWork) -> tuple[Product, ...]:
    """The products of a block whose weights ``sw.Muon`` trains."""
    has_experts = shape.family in _EXPERT_MATRICES
    return tuple(each for each in unit.products if each.is_trained and (has_experts or not each.is_batched))


def sequence_lengths(shape: ModelShape, workload: Workload) -> tuple[int, int]:
    """Positions of a sequence in the first stack, and in the decoder of a model with encoder and decoder.

    For a model of images the number follows from its patches, not from the workload.
    """
    first = shape.seq_len if shape.patch_numel else workload.seq_len
    return first, workload.decoder_seq_len or first


@functools.lru_cache(maxsize=1024)
def _model_work(shape: ModelShape, degrees: Degrees, workload: Workload) -> tuple[UnitWork, ...]:
    first, second = sequence_lengths(shape, workload)
    has_two, blocks, num_before = shape.num_encoder_blocks > 0, [], 0
    works: dict[tuple[Block, int], UnitWork] = {}  # kinds of blocks may alternate, so equal blocks are computed once
    for index, (count, block) in enumerate(shape.stacks):
        length = second if has_two and num_before >= shape.num_encoder_blocks else first
        num_before += count
        if (block, length) not in works:
            inside = replace(degrees, tp=1) if shape.family in _WHOLE_BLOCKS else degrees
            works[block, length] = block_work(Rank(shape, inside, workload, length), block, first)
        unit = replace(works[block, length], name=f"block{index}", count=count)
        if has_two and num_before - count == shape.num_encoder_blocks:
            unit = replace(unit, encoder_bytes=_encoder_bytes(Rank(shape, degrees, workload, first), unit, length))
        blocks.append(unit)
    last = Rank(shape, degrees, workload, second if has_two else first)
    return (_embedding(Rank(shape, degrees, workload, first)), *blocks, _head(last))


def _encoder_bytes(rank: Rank, unit: UnitWork, length: int) -> float:
    """Saved bytes of an encoder's last norm, of its output, and of the tables of positions of encoder and decoder."""
    tables = unit.attention[0].heads * (rank.seq_len**2 + length * (length + rank.seq_len))
    output = rank.itemsize * ((1 + rank.shape.has_dropout) * rank.stream_numel + tables)
    return rank.arithmetic.norm(rank.shape.norm, rank.stream_numel, rank.shape.hidden).saved_bytes + output


def _embedding(rank: Rank) -> UnitWork:
    shape, e, t = rank.shape, rank.itemsize, rank.degrees.tp
    products: tuple[Product, ...] = ()
    table = 0 if shape.patch_numel else shape.vocab * shape.hidden
    if shape.patch_numel:
        patches = rank.tokens * (shape.seq_len - 1) / shape.seq_len
        products = (Product(patches, shape.patch_numel, shape.hidden, is_trained=rank.trains),)
    numel = shape.embedding if shape.is_pooled and not shape.patch_numel else shape.embedding - table
    if not shape.is_pooled:
        numel += math.ceil(shape.vocab / t) * shape.hidden
    grads = (4 if e == 4 else 2) * table / t if rank.trains else 0.0
    parts = [Part("lookup", 2 * e * rank.stream_numel, 2 * e * rank.stream_numel + grads, 0.0, 1)]
    if products and e == 2:  # the product reads a cast copy of the images
        parts.append(Part("images", 0.0, 0.0, e * products[0].rows * shape.patch_numel, 0))
    if shape.has_norm_before:
        parts.append(rank.arithmetic.norm("layer", rank.local_stream_numel, shape.hidden))
    if shape.has_dropout:
        parts.append(rank.arithmetic.dropout(rank.local_stream_numel))
    exchanges = (Exchange("all_reduce", "tp", e * rank.stream_numel, 0.0),) if t > 1 and table else ()
    return UnitWork(
        name="embedding",
        count=1,
        num_parameters=numel,
        num_trained=numel if rank.trains else 0,
        products=products,
        parts=tuple(parts),
        stream_bytes=e * rank.local_stream_numel,
        selective_bytes=sum(part.saved_bytes for part in parts),
        input_bytes=sum(part.saved_bytes for part in parts),
        exchanges=exchanges,
    )


def _head(rank: Rank) -> UnitWork:
    shape, e, t = rank.shape, rank.itemsize, rank.degrees.tp
    rows = rank.workload.micro_batch if shape.is_pooled else rank.tokens
    products = []
    parts = []
    if shape.norm:
        parts.append(rank.arithmetic.norm(shape.norm, rank.local_stream_numel, shape.hidden))
    if shape.head_dense:
        products.append(Product(rows, shape.hidden, shape.head_dense, is_trained=rank.trains))
        parts.append(rank.arithmetic.activation("gelu", rows * shape.head_dense))
    width = shape.head_dense or shape.hidden
    logits = rows * shape.vocab / t
    if shape.vocab:
        products.append(Product(rows, width, shape.vocab / t, is_trained=rank.trains))
        parts.append(_loss(logits, e))
    divided = 0 if shape.is_tied or shape.is_pooled else shape.vocab * shape.hidden
    numel = shape.head - divided + math.ceil(divided / t)
    saved = sum(part.saved_bytes for part in parts)
    return UnitWork(
        name="head",
        count=1,
        num_parameters=numel,
        num_trained=numel if rank.trains else 0,
        products=tuple(products),
        parts=tuple(parts),
        stream_bytes=e * rank.local_stream_numel,
        inner_bytes=e * logits,
        selective_bytes=saved,
        input_bytes=saved,
        exchanges=(Exchange("all_reduce", "tp", 0.0, e * rank.stream_numel),) if t > 1 and shape.vocab else (),
    )


def _loss(logits: float, item: int) -> Part:
    """The cross entropy: logits are cast to fp32, and their log-softmax is saved."""
    wide = 0 if item == 4 else 4 + item
    return Part("loss", (wide + 12) * logits, (wide + 12) * logits, 4 * logits, 3)
