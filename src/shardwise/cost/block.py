"""The work of one rank in one block: computation, communication and saved activations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardwise.cost.part import Arithmetic, Part
from shardwise.cost.unit import AttentionWork, Exchange, Product, UnitWork
from shardwise.cost.workload import Workload
from shardwise.spec.policies import is_thin
from shardwise.spec.shape import Attention, Block, Experts, Latent, Mlp, ModelShape


def item_bytes(workload: Workload) -> int:
    """Bytes of an element of an activation; activations are 16 bit even with fp8 products."""
    return 4 if workload.precision == "fp32" else 2


@dataclass(frozen=True, slots=True)
class Degrees:
    """The degrees that divide a unit's work.

    Attributes:
        tp: Ranks that divide the layers.
        cp: Ranks that divide a sequence.
        ep: Ranks that divide the experts.
        divides_sequence: ``tp`` also divides norms, dropouts and the residual stream.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    divides_sequence: bool = False


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank and one microbatch, of sequences of one length.

    Attributes:
        shape: The model.
        degrees: The degrees that divide the work.
        workload: The batch and settings of a step.
        seq_len: Positions of a sequence.
    """

    shape: ModelShape
    degrees: Degrees
    workload: Workload
    seq_len: int

    @property
    def tokens(self) -> float:
        """Positions of the microbatch on this rank, ``n``."""
        return self.workload.micro_batch * self.seq_len / self.degrees.cp

    @property
    def stream_numel(self) -> float:
        """Elements of the residual stream, ``n h``."""
        return self.tokens * self.shape.hidden

    @property
    def local_stream_numel(self) -> float:
        """Elements of the residual stream between the layers that ``tp`` divides."""
        return self.stream_numel / (self.degrees.tp if self.degrees.divides_sequence else 1)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of an activation."""
        return item_bytes(self.workload)

    @property
    def trains(self) -> bool:
        """Whether the model's weights are trained, not adapters."""
        return self.workload.lora_rank is None

    @property
    def arithmetic(self) -> Arithmetic:
        """The form in which parts are computed."""
        return Arithmetic(self.itemsize, is_fused=self.workload.compile, trains=self.trains)

    def exchanges(self, num_pairs: int) -> list[Exchange]:
        """The exchanges of ``num_pairs`` pairs of layers that ``tp`` divides by columns and then by rows."""
        if self.degrees.tp == 1:
            return []
        moved = self.itemsize * self.stream_numel
        if self.degrees.divides_sequence:
            pair = [Exchange(kind, "tp", moved, moved) for kind in ("all_gather", "reduce_scatter")]
        else:
            pair = [Exchange("all_reduce", "tp", moved, moved)]
        return pair * num_pairs


def block_work(rank: Rank, block: Block, first_len: int) -> UnitWork:
    """The work of a block; ``first_len`` is the length of the sequences that the block's cross-attention reads."""
    return _Count(rank, block).unit(first_len)


@dataclass(slots=True)
class _Count:
    rank: Rank
    block: Block
    products: list[Product] = field(default_factory=list)
    attention: list[AttentionWork] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    scores: float = 0.0
    passing_scores: float = 0.0
    inner: float = 0.0

    def unit(self, first_len: int) -> UnitWork:
        rank, block, e = self.rank, self.block, self.rank.itemsize
        num_layers = 2 + (block.cross is not None)
        self.exchanges += rank.exchanges(num_layers)
        self._attend(block.attention, rank.seq_len)
        if block.cross is not None:
            self._attend(block.cross, first_len)
        self._add_stream(num_layers)
        num_parts, num_products = len(self.parts), len(self.products)
        self._feed_forward()
        saved = sum(part.saved_bytes for part in self.parts[num_parts:])
        weights = rank.trains * sum(product.num_weights for product in self.products[num_products:])
        adapted = list(self._adapters(num_products)) if rank.workload.lora_rank else []
        adapters = int(sum(p.inner * p.columns * p.count for p in adapted))
        regathered = e * num_layers * (rank.stream_numel - rank.local_stream_numel)
        if regathered:
            self.parts.append(Part("gathered inputs", 0.0, 0.0, regathered, 0))
        experts, base = self._expert_parameters(), self._shared_parameters()
        kept = (p for p in (*self.products, *adapted) if not is_thin(p.inner, p.columns))
        outputs = sum(e * p.rows * p.columns * p.count for p in kept)
        attended = rank.degrees.cp * sum(map(self._attended, self.attention))  # the ring attends for each rank's keys
        return UnitWork(
            name="block",
            count=1,
            num_parameters=base + experts + adapters,
            num_expert_parameters=experts,
            num_trained=base + experts if rank.trains else adapters,
            products=(*self.products, *adapted),
            attention=tuple(self.attention),
            parts=tuple(self.parts),
            stream_bytes=e * rank.local_stream_numel,
            inner_bytes=self.inner,
            selective_bytes=e * rank.local_stream_numel + outputs + attended,
            input_bytes=e * rank.local_stream_numel,
            scores_bytes=self.scores,
            regathered_bytes=regathered,
            late_bytes=self._late_bytes(e * weights - saved),
            exchanges=tuple(self.exchanges),
        )

    def _attended(self, work: AttentionWork) -> float:
        """Bytes of the outputs of attention that selective recomputation saves."""
        if not work.is_fused:
            thin = is_thin(self.block.attention.head_dim, work.keys)
            scores = 0.0 if thin else work.queries * work.heads * work.keys
            return self.rank.itemsize * (work.queries * work.width + scores)
        if self.block.attention.has_dropout:  # its random numbers are drawn again
            return 0.0
        return self.rank.itemsize * work.queries * work.width + 4 * work.queries * work.heads

    def _product(
        self, rows: float, inner: float, columns: float, count: int = 1, *, is_batched: bool = False, parts: int = 1
    ) -> None:
        trains = self.rank.trains
        self.products.append(Product(rows, inner, columns, count, trains, is_batched, parts))

    def _add_stream(self, num_layers: int) -> None:
        """Add the work on the residual stream: norms, dropouts, additions."""
        rank, block, arithmetic = self.rank, self.block, self.rank.arithmetic
        hidden, numel = rank.shape.hidden, rank.local_stream_numel
        last = arithmetic.norm(block.norm, numel, hidden, keeps_output=False)
        self.parts += [arithmetic.norm(block.norm, numel, hidden)] * (block.num_norms - block.num_last_norms)
        self.parts += [last] * block.num_last_norms
        if block.is_parallel:  # both norms save the same input
            self.parts.append(Part("one input", 0.0, 0.0, -rank.itemsize * numel, 0))
        self.parts += [arithmetic.residual(numel)] * num_layers
        if block.has_dropout:
            self.parts += [arithmetic.dropout(numel)] * num_layers

    def _late_bytes(self, more: float) -> float:
        """See ``UnitWork.late_bytes``; ``more``: gradients of the feed-forward's weights, less what it saved."""
        rank, block = self.rank, self.block
        numel = rank.local_stream_numel
        norm = rank.arithmetic.norm(block.norm, numel, rank.shape.hidden)
        last = rank.arithmetic.norm(block.norm, numel, rank.shape.hidden, keeps_output=False)
        of_scores = self.passing_scores + more - norm.saved_bytes - block.num_last_norms * last.saved_bytes
        of_norm = 0.0
        if norm.num_kernels > 1:  # an eager RMS norm: five tensors in fp32; the last norm's backward is the first
            of_norm = 20 * numel + (0.0 if block.num_last_norms else more + 4 * numel - norm.saved_bytes)
        return max(of_scores, of_norm)

    # -- attention

    def _kv_width(self, layer: Attention) -> float:
        """Width of this rank's keys; with fewer heads than ranks, several ranks have each head."""
        return max(layer.kv_heads / self.rank.degrees.tp, 1) * layer.head_dim

    def _attend(self, layer: Attention, key_len: int) -> None:
        """Attention to ``key_len`` positions of each sequence."""
        if layer.latent is not None:
            self._attend_latent(layer, layer.latent, key_len)
        else:
            self._attend_plain(layer, key_len)

    def _attend_plain(self, layer: Attention, key_len: int) -> None:
        rank, arithmetic, e = self.rank, self.rank.arithmetic, self.rank.itemsize
        hidden, q, kv = rank.shape.hidden, layer.q_width / rank.degrees.tp, self._kv_width(layer)
        tokens, key_tokens = rank.tokens, rank.tokens * key_len / rank.seq_len
        if layer.is_fused:
            self._product(tokens, hidden, q + 2 * kv, parts=3 if q == kv else 1)
        else:
            self._product(tokens, hidden, q)
            self._product(key_tokens, hidden, kv, 2)
        self._product(tokens, q, hidden)
        here = q, kv, layer.heads / rank.degrees.tp
        q, kv, heads = (layer.q_width, layer.kv_width, layer.heads) if layer.norms_all_heads else here
        keys, has_mask = layer.num_keys(key_len), layer.has_mask(key_len)
        self.attention.append(
            AttentionWork(tokens, keys, q, heads, layer.is_causal and keys == key_len, is_fused=not layer.plain)
        )
        if layer.norm_numel:
            for width, full_width in ((q, layer.q_width), (kv, layer.kv_width)):
                row = full_width if layer.norms_all_heads else layer.head_dim
                self.parts.append(arithmetic.norm(self.block.norm, tokens * width, row, keeps_output=False))
        if layer.has_rotary:
            self.parts.append(arithmetic.rotary(tokens * (q + kv), layer.rotary_share, joins=layer.joins_rotary))
            if layer.joins_rotary and not has_mask:  # flash attention's output then has its heads outermost
                copied = e * tokens * q
                self.parts.append(Part("output copy", 2 * copied, 2 * copied, copied, 1))
            if layer.is_fused and not (has_mask and kv < q):  # the values are a view, unless they are repeated
                self.parts.append(Part("fused input", 0.0, 0.0, e * tokens * (q + kv), 0))
        pairs = tokens * heads * keys
        if layer.plain:
            self.parts.append(arithmetic.plain_attention(layer.plain, tokens * q, key_tokens * kv, pairs))
            self.passing_scores = arithmetic.score_gradients(layer.plain, pairs)
        else:
            self.parts.append(arithmetic.attention(tokens * q, key_tokens * (q if has_mask else kv), tokens * heads))
            self.parts.append(Part("mask", 0.0, 0.0, has_mask * e * tokens * key_len, 0))
            self.scores += arithmetic.scores(pairs, drops=layer.has_dropout)
            saves_scores = layer.saves_scores(key_len, e, rank.degrees.cp)
            self.passing_scores = saves_scores * arithmetic.score_gradients("grouped", pairs)
        self.parts.append(self._input_gradients(layer, tokens * q + key_tokens * 2 * kv))
        if layer.has_position_bias:  # one table for all samples
            table = rank.seq_len / rank.degrees.cp * key_len * heads
            saved_item = e + layer.is_causal  # with a mask of bytes
            self.parts.append(Part("position bias", 2 * e * table, 2 * e * table, saved_item * table, 1))
        if rank.degrees.cp > 1:
            sent = 2 * e * key_tokens * kv
            self.exchanges.append(Exchange("ring", "cp", sent, 2 * sent))

    def _attend_latent(self, layer: Attention, latent: Latent, key_len: int) -> None:
        """Add latent attention: narrow products, their norms, and one kernel with values narrower than its keys."""
        rank, arithmetic, tokens = self.rank, self.rank.arithmetic, self.rank.tokens
        for inputs, outputs in latent.products(rank.shape.hidden, layer.heads, layer.head_dim):
            self._product(tokens, inputs, outputs)
        for width in filter(None, (latent.q_rank, latent.kv_rank)):
            self.parts.append(arithmetic.norm(self.block.norm, tokens * width, width))
        q, values = layer.q_width, layer.heads * latent.v_dim
        self.attention.append(AttentionWork(tokens, key_len, (q + values) / 2, layer.heads, layer.is_causal))
        self.parts.append(arithmetic.rotary(tokens * 2 * q, layer.rotary_share, joins=True))
        self.parts.append(arithmetic.attention(tokens * q, tokens * values, tokens * layer.heads))
        if q == values:  # flash attention, whose output has the layout of the joined queries
            copied = rank.itemsize * tokens * values
            self.parts.append(Part("output copy", 2 * copied, 2 * copied, copied, 1))
        narrow = layer.heads * (layer.head_dim - latent.rotary_dim)  # keys in the values' memory
        self.parts.append(Part("fused input", 0.0, 0.0, rank.itemsize * tokens * narrow, 0))

    def _input_gradients(self, layer: Attention, outputs: float) -> Part:
        """Element-wise work of the projections' backward: gradients of biases, and sums of input gradients."""
        rank, arithmetic = self.rank, self.rank.arithmetic
        separate = arithmetic.gradient_sums(rank.stream_numel, num_products=3)
        moved = arithmetic.split(outputs) if layer.is_fused else separate
        biases = arithmetic.biases(outputs * layer.has_qkv_bias + rank.stream_numel * layer.has_out_bias)
        return Part("gradients", 0.0, moved.backward_bytes + rank.trains * biases.backward_bytes, 0.0, 0)

    # -- feed-forward

    def _feed_forward(self) -> None:
        rank, forward = self.rank, self.block.feed_forward
        tokens, hidden, e = rank.tokens, rank.shape.hidden, rank.itemsize
        if isinstance(forward, Mlp):
            self._mlp(forward, tokens, 1)
            if self._has_idle_layers:
                self.parts.append(Part("frozen", 0.0, 0.0, -e * tokens * hidden, 0))
            return
        num_local = max(1, forward.count // rank.degrees.ep)
        routed = tokens * forward.per_token
        self._product(tokens, hidden, forward.count)
        self._mlp(forward.mlp, routed / num_local, num_local)
        self.parts += _routing(tokens, routed, forward, hidden, e, is_fused=rank.arithmetic.is_fused)
        if not rank.trains:  # neither is that of the experts, nor that of the router
            frozen = e * (routed + tokens) + 4 * tokens * forward.has_wide_router
            self.parts.append(Part("frozen", 0.0, 0.0, -frozen * hidden, 0))
        if forward.shared is not None:
            if forward.has_shared_gate:
                self._product(tokens, hidden, 1)
                gate_bytes = e * rank.stream_numel
                self.parts.append(Part("shared gate", 2 * gate_bytes, 4 * gate_bytes, gate_bytes, 2))
            self._mlp(forward.shared, tokens, 1)
            self.parts.append(rank.arithmetic.residual(rank.stream_numel))
        if rank.degrees.ep > 1:
            moved = e * rank.stream_numel * forward.per_token
            self.exchanges += [Exchange("all_to_all", "ep", moved, moved)] * 2

    def _mlp(self, mlp: Mlp, rows: float, count: int) -> None:
        rank, arithmetic, hidden = self.rank, self.rank.arithmetic, self.rank.shape.hidden
        inner, is_batched = mlp.ffn / (1 if mlp.is_replicated else rank.degrees.tp), count > 1
        if mlp.is_gated and not mlp.is_fused:
            self._product(rows, hidden, inner, 2 * count, is_batched=is_batched)
        else:
            parts = 1 + mlp.is_gated
            self._product(rows, hidden, inner * parts, count, is_batched=is_batched, parts=parts)
        self._product(rows, inner, hidden, count, is_batched=is_batched)
        numel = rows * count * inner
        self.inner += rank.itemsize * numel * (1 + mlp.is_gated)
        self.parts.append((arithmetic.gated if mlp.is_gated else arithmetic.activation)(mlp.activation, numel))
        if self._has_idle_layers:  # the input of a frozen product without an adapter is not saved
            self.parts.append(Part("frozen", 0.0, 0.0, -rank.itemsize * numel, 0))
        if mlp.has_dropout:
            self.parts.append(arithmetic.dropout(numel, keeps_output=not mlp.is_gated))
        if mlp.is_gated:
            fused = arithmetic.split(2 * numel)
            several = arithmetic.gradient_sums(rows * count * hidden, num_products=2)
            self.parts.append(fused if mlp.is_fused else several)
        if mlp.has_bias and rank.trains:
            self.parts.append(arithmetic.biases(numel * (1 + mlp.is_gated) + rows * count * hidden))

    def _adapters(self, num_attention: int) -> Iterator[Product]:
        """Two thin products for each linear layer, in a model with routed experts for those of attention alone."""
        adapter_rank = self.rank.workload.lora_rank
        assert adapter_rank is not None
        for product in self.products[: num_attention if self._has_idle_layers else None]:
            yield Product(product.rows, product.inner, adapter_rank, product.count)
            yield Product(product.rows, adapter_rank, product.columns, product.count)

    @property
    def _has_idle_layers(self) -> bool:
        """Whether feed-forward layers are frozen and have no adapters, as in a model with routed experts."""
        return not self.rank.trains and any(isinstance(b.feed_forward, Experts) for b in self.rank.shape.blocks)

    # -- parameters

    def _expert_parameters(self) -> int:
        forward, degrees = self.block.feed_forward, self.rank.degrees
        if not isinstance(forward, Experts):
            return 0
        return forward.expert_parameters(self.rank.shape.hidden) // (degrees.tp * degrees.ep)

    def _shared_parameters(self) -> int:
        """Parameters outside of routed experts on one rank: a part of those that ``tp`` divides, and all others."""
        block, hidden, t = self.block, self.rank.shape.hidden, self.rank.degrees.tp
        replicated, divided = block.num_parameters(hidden), 0.0
        for layer in (block.attention, block.cross):
            if layer is None or layer.latent is not None:
                continue
            q, kv = layer.q_width, layer.kv_width
            replicated -= 2 * hidden * (q + kv) + layer.has_qkv_bias * (q + 2 * kv)
            mine, ours = q / t, self._kv_width(layer)
            divided += 2 * hidden * (mine + ours) + layer.has_qkv_bias * (mine + 2 * ours)
        forward = block.feed_forward
        if isinstance(forward, Experts):
            replicated -= forward.expert_parameters(hidden)
        mlp = forward.shared if isinstance(forward, Experts) else forward
        if mlp is not None and not mlp.is_replicated:
            part = hidden * (mlp.up_width + mlp.ffn) + mlp.has_bias * mlp.up_width
            replicated, divided = replicated - part, divided + part / t
        return replicated - block.extra + math.ceil(divided + block.extra / t)


def _routing(
    tokens: float, routed: float, experts: Experts, hidden: int, item: int, *, is_fused: bool
) -> Iterator[Part]:
    """The parts of a mixture: router, dispatch of tokens to experts, and the weighted sum of the experts' outputs.

    Fused dispatch and sum access the residual stream once, and each of a token's copies once.
    """
    choices, moved = tokens * experts.count, routed * hidden
    yield Part("router", (item + 20) * choices + 8 * routed, 24 * choices, 4 * choices + 4 * tokens + 16 * routed, 6)
    if experts.has_wide_router:
        wide = 4 * tokens * hidden
        yield Part("wide router", 2 * wide, 2 * wide, wide, 1)
    if is_fused:
        passes = item * (tokens * hidden + moved)
        yield Part("dispatch", passes, passes, item * moved + 16 * routed, 1)
        yield Part("combine", passes, passes, item * moved + 12 * routed, 1)
        return
    yield Part("dispatch", 2 * item * moved + 60 * routed, (3 * item + 4) * moved, item * moved + 16 * routed, 7)
    summed = (4 + item) * tokens * hidden
    yield Part("combine", (item + 16) * moved + summed, (4 * item + 37) * moved, item * moved + 12 * routed, 6)
    yield Part("sums of gradients", 0.0, 3 * item * tokens * hidden, 0.0, 0)
