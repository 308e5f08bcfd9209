"""What one rank computes and sends in one unit of a model, for one microbatch: products, attention, element-wise work.

``n`` is the number of tokens of the microbatch on this rank, ``b s / c``; ``h``, ``f``, ``t`` as everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.workload import Workload
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import Attention, Block, Experts, Mlp, ModelShape


@dataclass(frozen=True, slots=True)
class Product:
    """``count`` products ``(rows, inner) x (inner, columns)`` of one forward; backward has two more for each."""

    rows: float
    inner: float
    columns: float
    count: int = 1

    @property
    def flops(self) -> float:
        """Operations of the forward."""
        return 2.0 * self.rows * self.inner * self.columns * self.count


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
    """A collective inside a unit's forward, on ``axis``: an all-reduce, all-to-all, or ring, of ``num_bytes``."""

    kind: str
    axis: str
    num_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitWork:
    """One unit of the model on one rank, one microbatch, forward; backward follows from it.

    Attributes:
        name: ``embedding``, ``block`` with its stack's number, or ``head``.
        count: Equal units of this kind in the whole model.
        num_parameters: Parameters of one on this rank before data-parallel sharding: after ``tp`` and ``ep``.
        num_expert_parameters: Those of them that are routed experts'.
        products: Matrix products.
        attention: Attention.
        stream_bytes: Bytes of one copy of the residual stream on this rank, ``2 n h`` in 16 bit.
        inner_bytes: Bytes of the feed-forward's inner activations, ``2 n f / t``, gated twice.
        exchanges: Collectives inside forward.
    """

    name: str
    count: int
    num_parameters: int
    num_expert_parameters: int = 0
    products: tuple[Product, ...] = ()
    attention: tuple[AttentionWork, ...] = ()
    stream_bytes: float = 0.0
    inner_bytes: float = 0.0
    exchanges: tuple[Exchange, ...] = ()

    @property
    def flops(self) -> float:
        """Operations of the forward: products and attention, masked pairs included."""
        return sum(product.flops for product in self.products) + sum(work.flops for work in self.attention)


def item_bytes(workload: Workload) -> int:
    """Bytes of an element of an activation."""
    return 4 if workload.precision == "fp32" else 2


def model_work(shape: ModelShape, plan: ParallelPlan, workload: Workload) -> tuple[UnitWork, ...]:
    """The units of the whole model in order, runs of equal ones counted: embedding, blocks, head."""
    t, item = plan.tp, item_bytes(workload)
    tokens = workload.micro_batch * workload.seq_len / plan.cp
    stream = item * tokens * shape.hidden
    units = [
        UnitWork(name="embedding", count=1, num_parameters=shape.embedding // t, stream_bytes=stream),
        *(_block_work(f"block{place}", run, shape.hidden, plan, workload) for place, run in enumerate(shape.stacks)),
        UnitWork(
            name="head",
            count=1,
            num_parameters=shape.head // t,
            products=(Product(tokens, shape.hidden, shape.vocab / t),) if shape.vocab else (),
            stream_bytes=stream,
            inner_bytes=item * tokens * shape.vocab / t,
        ),
    ]
    return tuple(units)


def _block_work(name: str, run: tuple[int, Block], hidden: int, plan: ParallelPlan, workload: Workload) -> UnitWork:
    count, block = run
    t, item = plan.tp, item_bytes(workload)
    tokens = workload.micro_batch * workload.seq_len / plan.cp
    attentions = [block.attention] + ([block.cross] if block.cross is not None else [])
    products: list[Product] = []
    for attention in attentions:
        products.append(Product(tokens, hidden, (attention.q_width + 2 * attention.kv_width) / t))
        products.append(Product(tokens, attention.q_width / t, hidden))
    forward = block.feed_forward
    experts = 0
    if isinstance(forward, Experts):
        products.append(Product(tokens, hidden, forward.count))
        held = max(1, forward.count // plan.ep)
        rows = tokens * forward.per_token / held
        products += _mlp_products(forward.mlp, rows, hidden, t, held)
        inner = item * tokens * forward.per_token * forward.mlp.up_width / t
        if forward.shared is not None:
            products += _mlp_products(forward.shared, tokens, hidden, t, 1)
            inner += item * tokens * forward.shared.up_width / t
        experts = forward.expert_parameters(hidden) // (t * plan.ep)
        whole = block.num_parameters(hidden) - forward.expert_parameters(hidden)
    else:
        products += _mlp_products(forward, tokens, hidden, t, 1)
        inner = item * tokens * forward.up_width / t
        whole = block.num_parameters(hidden)
    stream = item * tokens * hidden
    exchanges = [Exchange("all_reduce", "tp", stream)] * (2 if t > 1 else 0)
    if plan.cp > 1:
        exchanges.append(Exchange("ring", "cp", item * tokens * 2 * block.attention.kv_width / t))
    if plan.ep > 1 and isinstance(forward, Experts):
        exchanges += [Exchange("all_to_all", "ep", stream * forward.per_token)] * 2
    return UnitWork(
        name=name,
        count=count,
        num_parameters=whole // t + experts,
        num_expert_parameters=experts,
        products=tuple(products),
        attention=tuple(_attention_work(attention, tokens, workload.seq_len, t) for attention in attentions),
        stream_bytes=stream,
        inner_bytes=inner,
        exchanges=tuple(exchanges),
    )


def _mlp_products(mlp: Mlp, rows: float, hidden: int, t: int, count: int) -> list[Product]:
    return [Product(rows, hidden, mlp.up_width / t, count), Product(rows, mlp.ffn / t, hidden, count)]


def _attention_work(attention: Attention, tokens: float, seq_len: int, t: int) -> AttentionWork:
    is_windowed = attention.window is not None and attention.window < seq_len
    return AttentionWork(
        queries=tokens,
        keys=attention.window if is_windowed and attention.window is not None else seq_len,
        width=attention.q_width / t,
        heads=attention.heads / t,
        is_causal=attention.is_causal and not is_windowed,
    )
