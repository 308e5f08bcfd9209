"""What a candidate needs at least: bounds below the estimates, in closed form, by which the search prunes.

A bound that is too low costs time; one that is too high loses plans. So each counts only what every estimate counts:
the states that a rank holds, and products at the device's best rate.
"""

from __future__ import annotations

import functools
import math

from shardwise.cost.hardware import Cluster
from shardwise.cost.work import model_work
from shardwise.cost.workload import Workload
from shardwise.planner.candidate import Candidate
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
    """Seconds that a step takes at least: its products at the device's peak, and the pipeline's fill."""

    def __init__(self, shape: ModelShape, cluster: Cluster, workload: Workload) -> None:
        device = cluster.device
        units = model_work(shape, ParallelPlan(strategy="ddp"), workload)
        peak = max(device.peaks.values()) if workload.precision == "fp32" else device.peaks.get(workload.precision, 0.0)
        peak = peak or max(device.peaks.values())
        sequences = workload.global_batch / workload.micro_batch
        products = [
            (
                unit.name,
                unit.count * sum(p.flops for p in unit.products),
                unit.count * sum(a.flops * (0.5 if a.is_causal else 1.0) for a in unit.attention),
            )
            for unit in units
        ]
        self._forward = sum(p + a for _, p, a in products) * sequences / (peak * cluster.num_gpus)
        self._blocks = (
            sum(p + a for n, p, a in products if n.startswith("block")) * sequences / (peak * cluster.num_gpus)
        )
        self._layers = shape.num_layers

    def __call__(self, candidate: Candidate) -> float:
        """The bound."""
        again = {"none": 0.0, "selective": 0.0, "full": self._blocks}
        recomputed = candidate.recompute
        extra = again[recomputed] if isinstance(recomputed, str) else self._blocks * min(1.0, recomputed / self._layers)
        compute = 3 * self._forward + extra
        p, m, v = candidate.layout.pp, candidate.accumulation, candidate.virtual_stages
        share = 1.0 / v if candidate.schedule == "interleaved-1f1b" else _BUBBLE[candidate.schedule]
        return compute * (1 + share * (p - 1) / m)


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
