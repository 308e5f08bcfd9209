"""What a candidate needs at least: bounds below the estimates, in closed form, by which the search prunes.

A bound that is too low costs time; one that is too high loses plans. So each counts only what every estimate counts:
the states that a rank holds, and products at the device's best rate.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from shardwise.cost.hardware import Cluster
from shardwise.cost.work import Exchange, model_work
from shardwise.cost.workload import Workload
from shardwise.planner.candidate import Candidate
from shardwise.planner.legal import Layout
from shardwise.spec.placement import PRESETS
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import Experts, ModelShape


def least_state_bytes(shape: ModelShape, candidate: Candidate, workload: Workload) -> float:
    """Bytes on the device of what a rank holds of the model, of one that holds the average share of the stages.

    Masters, gradients, optimizer state, and parameters in the products' dtype where they are whole for some time. The
    fullest rank holds at least as much.
    """
    if workload.lora_rank is not None:
        return 0.0
    row, layout = PRESETS[candidate.strategy], candidate.layout
    experts = expert_parameters(shape)
    dense = (shape.num_parameters - experts) / (layout.tp * layout.pp)
    routed = experts / (layout.tp * layout.pp * layout.ep)
    shard = layout.dp_shard * layout.cp
    state = 4.0 if workload.optimizer == "sgd" else 12.0  # master, two moments
    gradient = 0.0 if candidate.in_backward else 4.0
    if candidate.offload != "none":
        state = gradient = 0.0
    is_whole = row.keeps_gathered or not row.shards_parameters or (layout.pp > 1 and not candidate.releases_units)
    has_copy = workload.precision != "fp32" or row.shards_parameters or candidate.offload != "none"
    whole = (4.0 if workload.precision == "fp32" else 2.0) if is_whole and has_copy else 0.0
    held = 0.0
    for count, ranks in ((dense, shard), (routed, shard / layout.ep)):
        own = ranks if row.shards_optimizer else 1.0
        held += count * (state / own + gradient / (ranks if row.pools_gradients else 1.0) + whole)
    return held


@functools.lru_cache(maxsize=64)
def expert_parameters(shape: ModelShape) -> int:
    """Parameters of all routed experts."""
    return sum(
        count * block.feed_forward.expert_parameters(shape.hidden)
        for count, block in shape.stacks
        if isinstance(block.feed_forward, Experts)
    )


#: Bubble of a schedule over ``(p - 1) / m``, at least.
_BUBBLE = {"": 0.0, "gpipe": 1.0, "1f1b": 1.0, "zb-h1": 0.0, "zb-v": 0.0}


class TimeBound:
    """Seconds that a step takes at least.

    Products at the device's peak, other operations at its memory's bandwidth, collectives of ``tp`` and ``ep``, for
    which computation waits, at the bandwidth of its links, and the pipeline's fill.
    """

    def __init__(self, shape: ModelShape, cluster: Cluster, workload: Workload) -> None:
        self._shape, self._cluster, self._workload = shape, cluster, workload
        self._device = cluster.device
        known = self._device.peaks
        self._peak = known.get(workload.precision, 0.0) if workload.precision != "fp32" else 0.0
        self._peak = self._peak or max(known.values())
        self._models: dict[tuple[object, ...], tuple[float, float, float]] = {}

    def __call__(self, candidate: Candidate) -> float:
        """The bound."""
        once, products, others = self._model(candidate)
        recompute = candidate.recompute
        part = {"none": 0.0, "selective": 0.0, "full": 1.0}.get(str(recompute))
        part = min(1.0, float(recompute) / self._shape.num_layers) if part is None else part
        again = part * products + (others if recompute == "selective" else part * others)
        p, m, v = candidate.layout.pp, candidate.accumulation, candidate.virtual_stages
        share = 1.0 / v if candidate.schedule == "interleaved-1f1b" else _BUBBLE[candidate.schedule]
        return (once + again) * m / p * (1 + share * (p - 1) / m)

    def _model(self, candidate: Candidate) -> tuple[float, float, float]:
        """Seconds of one microbatch: of the whole model; of its blocks' forward products, and the rest of it."""
        layout = candidate.layout
        key = layout.tp, layout.cp, layout.ep, layout.sequence_parallel, candidate.micro_batch
        if key not in self._models:
            self._models[key] = self._measure(candidate)
        return self._models[key]

    def _measure(self, candidate: Candidate) -> tuple[float, float, float]:
        layout = candidate.layout
        plan = ParallelPlan(
            strategy="ddp", tp=layout.tp, cp=layout.cp, ep=layout.ep, sequence_parallel=layout.sequence_parallel
        )
        units = model_work(self._shape, plan, dataclasses.replace(self._workload, micro_batch=candidate.micro_batch))
        once = products = others = 0.0
        for unit in units:
            forward = sum(product.flops for product in unit.products)
            backward = sum(product.backward_flops for product in unit.products)
            attention = sum(work.flops / (2 if work.is_causal else 1) for work in unit.attention)
            waits = sum(self._wait(exchange, layout) for exchange in unit.exchanges)
            beside = unit.forward_bytes / self._device.memory_bandwidth
            once += unit.count * (
                (forward + backward + 3 * attention) / self._peak
                + beside
                + unit.backward_bytes / self._device.memory_bandwidth
                + 2 * waits
            )
            if unit.name.startswith("block"):
                products += unit.count * (forward + attention) / self._peak
                others += unit.count * beside
        return once, products, others

    def _wait(self, exchange: Exchange, layout: Layout) -> float:
        """Seconds of a collective that computation waits for, in one direction of the pass."""
        size = {"tp": layout.tp, "ep": layout.ep}.get(exchange.axis, 1)
        if size == 1:
            return 0.0
        sent = min(exchange.num_bytes, exchange.backward_bytes) * (size - 1) / size
        return (
            sent
            * (2 if exchange.kind == "all_reduce" else 1)
            / max(self._device.link_bandwidth, self._device.host_bandwidth)
        )


def order(candidate: Candidate) -> tuple[object, ...]:
    """How plain a candidate is; of two that take equally long the plainer is proposed."""
    layout = candidate.layout
    return (
        sum(size > 1 for size in (layout.tp, layout.pp, layout.cp, layout.ep)),
        candidate.offload != "none",
        candidate.in_backward,
        str(candidate.recompute) != "none",
        layout.pp,
        layout.tp,
        layout.cp,
        -candidate.micro_batch if math.isfinite(candidate.micro_batch) else 0,
        layout.dp_replicate,
    )
