"""What one rank computes, sends and keeps in one unit of a model, for one microbatch.

``n`` is the number of tokens of the microbatch on this rank, ``b s / c``; ``h``, ``f``, ``t`` as everywhere.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.cost.part import Arithmetic, Part
from shardwise.cost.workload import Workload
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import Attention, Block, Experts, Mlp, ModelShape


@dataclass(frozen=True, slots=True)
class Product:
    """``count`` products ``(rows, inner) x (inner, columns)`` of one forward.

    Backward has one more for the gradient of the input, and one for that of the weight where it is trained.
    """

    rows: float
    inner: float
    columns: float
    count: int = 1
    is_trained: bool = True

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
    """

    queries: float
    keys: float
    width: float
    heads: float
    is_causal: bool

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
        return sum(product.count for product in self.products) + sum(part.num_kernels for part in self.parts)


def item_bytes(workload: Workload) -> int:
    """Bytes of an element of an activation; with fp8 products, too, activations are 16 bit."""
    return 4 if workload.precision == "fp32" else 2


def sequence_lengths(shape: ModelShape, workload: Workload) -> tuple[int, int]:
    """Positions of a sequence in the first stack, and in the second one of a model with encoder and decoder.

    A model of images has as many as it has patches, whatever the workload says.
    """
    first = shape.seq_len if shape.patch_numel else workload.seq_len
    return first, workload.decoder_seq_len or first


def model_work(shape: ModelShape, plan: ParallelPlan, workload: Workload) -> tuple[UnitWork, ...]:
    """The units of the whole model in order, runs of equal ones counted: embedding, blocks, head."""
    return _model_work(shape, _Degrees(plan.tp, plan.cp, plan.ep, plan.sequence_parallel and plan.tp > 1), workload)


@dataclass(frozen=True, slots=True)
class _Degrees:
    tp: int
    cp: int
    ep: int
    divides_sequence: bool


@functools.lru_cache(maxsize=1024)
def _model_work(shape: ModelShape, degrees: _Degrees, workload: Workload) -> tuple[UnitWork, ...]:
    first, second = sequence_lengths(shape, workload)
    model = _Model(shape, degrees, workload)
    blocks, place = [], 0
    for index, (count, block) in enumerate(shape.stacks):
        is_encoder = place < shape.num_encoder_blocks or not shape.num_encoder_blocks
        place += count
        own = model.rank(first if is_encoder else second)
        blocks.append(own.block(f"block{index}", count, block, first))
    last = second if shape.num_encoder_blocks else first
    return (model.rank(first).embedding(), *blocks, model.rank(last).head())


@dataclass(frozen=True, slots=True)
class _Model:
    shape: ModelShape
    degrees: _Degrees
    workload: Workload

    def rank(self, seq_len: int) -> _Rank:
        return _Rank(self.shape, self.degrees, self.workload, seq_len)


@dataclass(frozen=True, slots=True)
class _Rank:
    """Counts the work of one rank on sequences of one length."""

    shape: ModelShape
    degrees: _Degrees
    workload: Workload
    seq_len: int

    @property
    def tokens(self) -> float:
        return self.workload.micro_batch * self.seq_len / self.degrees.cp

    @property
    def stream(self) -> float:
        return self.tokens * self.shape.hidden

    @property
    def between(self) -> float:
        """Elements of the residual stream between the layers that ``tp`` divides."""
        return self.stream / (self.degrees.tp if self.degrees.divides_sequence else 1)

    @property
    def item(self) -> int:
        return item_bytes(self.workload)

    @property
    def trains(self) -> bool:
        return self.workload.lora_rank is None

    @property
    def arithmetic(self) -> Arithmetic:
        return Arithmetic(self.item, is_fused=self.workload.compile, trains=self.trains)

    def exchanges(self, num_pairs: int) -> list[Exchange]:
        """Those of ``num_pairs`` pairs of layers that ``tp`` divides by columns and then by rows."""
        if self.degrees.tp == 1:
            return []
        moved = self.item * self.stream
        if self.degrees.divides_sequence:
            pair = [Exchange(kind, "tp", moved, moved) for kind in ("all_gather", "reduce_scatter")]
        else:
            pair = [Exchange("all_reduce", "tp", moved, moved)]
        return pair * num_pairs

    # -- the units

    def embedding(self) -> UnitWork:
        shape, e, t = self.shape, self.item, self.degrees.tp
        products: tuple[Product, ...] = ()
        table = 0 if shape.patch_numel else shape.vocab * shape.hidden
        if shape.patch_numel:
            patches = self.tokens * (shape.seq_len - 1) / shape.seq_len
            products = (Product(patches, shape.patch_numel, shape.hidden, is_trained=self.trains),)
        held = shape.embedding if shape.is_pooled and not shape.patch_numel else shape.embedding - table
        if not shape.is_pooled:
            held += math.ceil(shape.vocab / t) * shape.hidden
        grads = (4 if e == 4 else 2) * table / t if self.trains else 0.0
        parts = [Part("lookup", 2 * e * self.stream, 2 * e * self.stream + grads, 0.0, 1)]
        if shape.has_norm_before:
            parts.append(self.arithmetic.norm("layer", self.between, shape.hidden))
        if shape.has_dropout:
            parts.append(self.arithmetic.dropout(self.between))
        exchanges = (Exchange("all_reduce", "tp", e * self.stream, 0.0),) if t > 1 and table else ()
        return UnitWork(
            name="embedding",
            count=1,
            num_parameters=held,
            num_trained=held if self.trains else 0,
            products=products,
            parts=tuple(parts),
            stream_bytes=e * self.between,
            selective_bytes=sum(part.saved_bytes for part in parts),
            input_bytes=sum(part.saved_bytes for part in parts),
            exchanges=exchanges,
        )

    def head(self) -> UnitWork:
        shape, e, t = self.shape, self.item, self.degrees.tp
        rows = self.workload.micro_batch if shape.is_pooled else self.tokens
        products = []
        parts = []
        if shape.norm:
            parts.append(self.arithmetic.norm(shape.norm, self.between, shape.hidden))
        if shape.head_dense:
            products.append(Product(rows, shape.hidden, shape.head_dense, is_trained=self.trains))
            parts.append(self.arithmetic.activation("gelu", rows * shape.head_dense))
        width = shape.head_dense or shape.hidden
        logits = rows * shape.vocab / t
        if shape.vocab:
            products.append(Product(rows, width, shape.vocab / t, is_trained=self.trains))
            parts.append(_loss(logits, e))
        divided = 0 if shape.is_tied or shape.is_pooled else shape.vocab * shape.hidden
        held = shape.head - divided + math.ceil(divided / t)
        saved = sum(part.saved_bytes for part in parts)
        return UnitWork(
            name="head",
            count=1,
            num_parameters=held,
            num_trained=held if self.trains else 0,
            products=tuple(products),
            parts=tuple(parts),
            stream_bytes=e * self.between,
            inner_bytes=e * logits,
            selective_bytes=saved,
            input_bytes=saved,
            exchanges=(Exchange("all_reduce", "tp", 0.0, e * self.stream),) if t > 1 and shape.vocab else (),
        )

    def block(self, name: str, count: int, block: Block, first_len: int) -> UnitWork:
        hidden, t, e = self.shape.hidden, self.degrees.tp, self.item
        arithmetic = self.arithmetic
        products: list[Product] = []
        parts: list[Part] = []
        attention: list[AttentionWork] = []
        exchanges: list[Exchange] = self.exchanges(2 + (block.cross is not None))
        scores = 0.0
        for layer, key_len in ((block.attention, self.seq_len), (block.cross, first_len)):
            if layer is None:
                continue
            key_tokens = self.tokens * key_len / self.seq_len
            products += self._projections(layer, key_tokens)
            work = _attention_work(layer, self.tokens, key_len, t)
            attention.append(work)
            kv_numel = key_tokens * self._kv_width(layer)
            rows = self.tokens * work.heads
            if layer.norm_numel:
                per_token = work.width + self._kv_width(layer)
                width = layer.head_dim if layer.norm_numel == 2 * layer.head_dim else layer.q_width
                parts.append(arithmetic.norm("rms", self.tokens * per_token, width))
            if layer.has_rotary:
                parts.append(arithmetic.rotary(self.tokens * (work.width + self._kv_width(layer))))
            parts.append(arithmetic.attention(self.tokens * work.width, kv_numel, rows))
            pairs = rows * (min(key_len, layer.window) if layer.window else key_len)
            scores += arithmetic.scores(pairs, drops=layer.has_dropout)
            if self.degrees.cp > 1:
                sent = 2 * e * kv_numel
                exchanges.append(Exchange("ring", "cp", sent, 2 * sent))
        parts += [arithmetic.norm(block.norm, self.between, hidden) for _ in range(block.num_norms)]
        added = 2 + (block.cross is not None)
        parts += [arithmetic.residual(self.between)] * added
        if block.has_dropout:
            parts += [arithmetic.dropout(self.between)] * added
        made, inside, inner = self._feed_forward(block)
        products += made
        parts += inside
        experts = 0
        if isinstance(block.feed_forward, Experts):
            experts = block.feed_forward.expert_parameters(hidden) // (t * self.degrees.ep)
            if self.degrees.ep > 1:
                moved = e * self.stream * block.feed_forward.per_token
                exchanges += [Exchange("all_to_all", "ep", moved, moved)] * 2
        base = self._parameters(block) + experts
        adapted = self._adapters(products) if self.workload.lora_rank else []
        adapters = int(sum(p.inner * p.columns * p.count for p in adapted))
        regathered = e * added * (self.stream - self.between)
        if regathered:
            parts.append(Part("gathered inputs", 0.0, 0.0, regathered, 0))
        outputs = sum(e * p.rows * p.columns * p.count for p in products)
        attended = sum(e * work.queries * work.width + 4 * work.queries * work.heads for work in attention)
        return UnitWork(
            name=name,
            count=count,
            num_parameters=base + adapters,
            num_expert_parameters=experts,
            num_trained=base if self.trains else adapters,
            products=(*products, *adapted),
            attention=tuple(attention),
            parts=tuple(parts),
            stream_bytes=e * self.between,
            inner_bytes=inner,
            selective_bytes=e * self.between + outputs + attended,
            input_bytes=e * self.between,
            scores_bytes=scores,
            regathered_bytes=regathered,
            exchanges=tuple(exchanges),
        )

    # -- what blocks are made of

    def _kv_width(self, attention: Attention) -> float:
        """Width of this rank's keys; with fewer heads than ranks, several ranks hold each."""
        return max(attention.kv_heads / self.degrees.tp, 1) * attention.head_dim

    def _projections(self, attention: Attention, key_tokens: float) -> Iterator[Product]:
        hidden, q, kv = self.shape.hidden, attention.q_width / self.degrees.tp, self._kv_width(attention)
        if attention.is_fused:
            yield Product(self.tokens, hidden, q + 2 * kv, is_trained=self.trains)
        else:
            yield Product(self.tokens, hidden, q, is_trained=self.trains)
            yield Product(key_tokens, hidden, kv, 2, is_trained=self.trains)
        yield Product(self.tokens, q, hidden, is_trained=self.trains)

    def _feed_forward(self, block: Block) -> tuple[list[Product], list[Part], float]:
        """Products, parts and inner bytes of the feed-forward."""
        forward, hidden, t, e = block.feed_forward, self.shape.hidden, self.degrees.tp, self.item
        if isinstance(forward, Mlp):
            products, part = self._mlp(forward, self.tokens, 1)
            return products, [part], e * self.tokens * forward.up_width / t
        held = max(1, forward.count // self.degrees.ep)
        routed = self.tokens * forward.per_token
        products, part = self._mlp(forward.mlp, routed / held, held)
        parts = [part, *_routing(self.tokens, routed, forward, hidden, e)]
        inner = e * routed * forward.mlp.up_width / t
        if forward.shared is not None:
            more, shared = self._mlp(forward.shared, self.tokens, 1)
            products, parts = [*products, *more], [*parts, shared, self.arithmetic.residual(self.stream)]
            inner += e * self.tokens * forward.shared.up_width / t
        return [Product(self.tokens, hidden, forward.count, is_trained=self.trains), *products], parts, inner

    def _mlp(self, mlp: Mlp, rows: float, count: int) -> tuple[list[Product], Part]:
        hidden, inner = self.shape.hidden, mlp.ffn / self.degrees.tp
        if mlp.is_gated and not mlp.is_fused:
            up = Product(rows, hidden, inner, 2 * count, is_trained=self.trains)
        else:
            up = Product(rows, hidden, inner * (1 + mlp.is_gated), count, is_trained=self.trains)
        down = Product(rows, inner, hidden, count, is_trained=self.trains)
        between = self.arithmetic.gated if mlp.is_gated else self.arithmetic.activation
        return [up, down], between(mlp.activation, rows * count * inner)

    def _adapters(self, products: list[Product]) -> list[Product]:
        """Two thin products beside each linear layer; routers and routed experts have none."""
        rank = self.workload.lora_rank
        assert rank is not None
        found = []
        for product in products:
            is_linear = product.rows >= self.tokens and product.columns not in self._router_widths
            if is_linear:
                found += [
                    Product(product.rows, product.inner, rank, product.count),
                    Product(product.rows, rank, product.columns, product.count),
                ]
        return found

    @property
    def _router_widths(self) -> set[float]:
        mixtures = (block.feed_forward for _, block in self.shape.stacks)
        return {mixture.count for mixture in mixtures if isinstance(mixture, Experts)}

    def _parameters(self, block: Block) -> int:
        """Parameters of a block on this rank without routed experts: what ``tp`` divides, and the rest whole."""
        hidden, t = self.shape.hidden, self.degrees.tp
        total = block.num_parameters(hidden)
        forward = block.feed_forward
        divided = 0.0
        for attention in (block.attention, block.cross):
            if attention is None:
                continue
            q, kv = attention.q_width, attention.kv_width
            total -= 2 * hidden * (q + kv) + attention.has_qkv_bias * (q + 2 * kv)
            q, kv = q / t, self._kv_width(attention)
            divided += 2 * hidden * (q + kv) + attention.has_qkv_bias * (q + 2 * kv)
        if isinstance(forward, Experts):
            total -= forward.expert_parameters(hidden)
        mlp = forward.shared if isinstance(forward, Experts) else forward
        if mlp is not None:
            part = hidden * (mlp.up_width + mlp.ffn) + mlp.has_bias * mlp.up_width
            total -= part
            divided += part / t
        total -= block.extra
        divided += block.extra / t
        return total + math.ceil(divided)


def _loss(logits: float, item: int) -> Part:
    """The cross entropy: logits in fp32, their logarithmic softmax, which is kept beside the logits themselves."""
    wide = 0 if item == 4 else 4 + item
    return Part("loss", (wide + 8) * logits, (wide + 12) * logits, (item + 4) * logits, 3)


def _routing(tokens: float, routed: float, experts: Experts, hidden: int, item: int) -> Iterator[Part]:
    """The choice of experts, their tokens side by side, and the weighted sum of their outputs."""
    choices = tokens * experts.count
    yield Part("router", (item + 12) * choices, 16 * choices, 4 * choices, 4)
    moved = routed * hidden
    yield Part("dispatch", 2 * item * moved, 3 * item * moved, item * moved, 2)
    yield Part("combine", 5 * item * moved, 6 * item * moved, item * moved, 3)


def _attention_work(attention: Attention, tokens: float, key_len: int, t: int) -> AttentionWork:
    is_windowed = attention.window is not None and attention.window < key_len
    return AttentionWork(
        queries=tokens,
        keys=attention.window if is_windowed and attention.window is not None else key_len,
        width=attention.q_width / t,
        heads=attention.heads / t,
        is_causal=attention.is_causal and not is_windowed,
    )
