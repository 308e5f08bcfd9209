"""A lower bound of a candidate's memory, in closed form, by which the search drops candidates that cannot fit.

A bound that is too low costs time; a bound that is too high loses plans. So it counts only what every estimate counts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from shardwise.cost.hardware import Cluster
from shardwise.cost.work import item_bytes, model_work
from shardwise.cost.workload import Workload
from shardwise.planner.candidate import Candidate
from shardwise.planner.legal import Layout
from shardwise.planner.memory import COMMUNICATOR, CONTEXT, FRAGMENTS, WORKSPACE
from shardwise.spec.placement import PRESETS
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.policies import offload_policy
from shardwise.spec.shape import Experts, ModelShape


class MemoryBound:
    """A lower bound of the fullest rank's bytes: the bytes of a rank with the average share of the stages.

    It counts masters, gradients, optimizer state, parameters in the products' dtype (all if they are gathered at the
    same time, otherwise the live unit), and most of the activations of the microbatches that a pipeline's first rank
    stores.
    """

    def __init__(self, shape: ModelShape, cluster: Cluster, workload: Workload, fixed: Mapping[str, Any]) -> None:
        self._shape, self._workload = shape, workload
        self._item = item_bytes(workload)
        self._frozen_item = 1 if fixed.get("quantize_frozen") == "int8" else self._item
        self._gradient_item = 2.0 if "mp_policy" in fixed else 4.0  # it may reduce in 16 bit
        self._is_on_host = offload_policy(fixed.get("offload_policy") or "none") is not None
        self._is_gpu = cluster.device.device_type != "cpu"
        self._num_layers = max(shape.num_layers, 1)
        self._work: dict[tuple[object, ...], tuple[float, float]] = {}
        self._state_bytes: dict[tuple[object, ...], tuple[float, float, float]] = {}

    def __call__(self, candidate: Candidate) -> float:
        """The lower bound in bytes."""
        block, inputs = self._live(candidate)
        placements = PRESETS[candidate.strategy]
        unit = (
            (1 if candidate.gathers_late else 2) * self._item * block
            if placements.shards_parameters and not is_whole(candidate)
            else 0.0
        )
        key = (
            *(candidate.layout, candidate.strategy, candidate.accumulation == 1),
            *(candidate.offload, candidate.in_backward, candidate.releases_units),
        )
        if key not in self._state_bytes:
            is_lora = self._workload.lora_rank is not None
            self._state_bytes[key] = (self._frozen(candidate), 0.0, 0.0) if is_lora else self._states(candidate)
        state, gradient, whole = self._state_bytes[key]
        num_bytes = state + whole + unit + inputs
        if candidate.accumulation > (1 if candidate.layout.pp == 1 else candidate.layout.pp * candidate.virtual_stages):
            num_bytes += gradient
        else:  # no sums of earlier microbatches exist at the peak of activations
            num_bytes = max(num_bytes, state + gradient + whole * (not placements.shards_parameters))
        if not self._is_gpu:
            return num_bytes
        return (1 + FRAGMENTS) * num_bytes + WORKSPACE + CONTEXT + COMMUNICATOR

    def _offloads(self, candidate: Candidate) -> bool:
        return self._is_on_host or candidate.offload != "none"

    def _frozen(self, candidate: Candidate) -> float:
        """Bytes of the blocks' parameters if only adapters are trained."""
        layout, placements = candidate.layout, PRESETS[candidate.strategy]
        count = self._shape.num_parameters - self._shape.embedding - self._shape.head
        count /= layout.tp * layout.pp * layout.ep
        if is_whole(candidate):
            return count * self._frozen_item
        is_sharded = placements.shards_parameters and not self._offloads(candidate)
        return count * self._frozen_item / (layout.dp_shard * layout.cp) if is_sharded else 0.0

    def _states(self, candidate: Candidate) -> tuple[float, float, float]:
        """Bytes of masters and optimizer state, of gradients, and of parameters in the products' dtype."""
        placements, layout = PRESETS[candidate.strategy], candidate.layout
        experts = expert_parameters(self._shape)
        dense = (self._shape.num_parameters - experts) / (layout.tp * layout.pp)
        routed = experts / (layout.tp * layout.pp * layout.ep)
        shard = layout.dp_shard * layout.cp
        state = 4.0 * (1 + self._workload.matrix_tensors)  # master, moments
        gradient = 0.0 if candidate.in_backward else self._gradient_item
        offloads = self._offloads(candidate)
        if offloads:
            state = gradient = 0.0
        has_copy = self._item == 2 or placements.shards_parameters or offloads
        whole = float(self._item) if is_whole(candidate) and has_copy else 0.0
        is_once = candidate.accumulation == 1 and layout.pp == 1  # no sum of gradients outlives a unit's backward
        is_pooled = placements.pools_gradients or (is_once and placements.shards_optimizer)
        both = (dense, shard), (routed, shard / layout.ep)
        return (
            sum(count * state / (ranks if placements.shards_optimizer else 1.0) for count, ranks in both),
            sum(count * gradient / (ranks if is_pooled else 1.0) for count, ranks in both),
            (dense + routed) * whole,
        )

    def _live(self, candidate: Candidate) -> tuple[float, float]:
        """Parameters of the largest layer, which may be a unit, and bytes of activations that a rank's blocks store."""
        layout, recompute = candidate.layout, candidate.recompute
        kind = recompute if isinstance(recompute, str) else "full"
        key = layout.tp, layout.cp, layout.ep, layout.sequence_parallel, candidate.micro_batch, kind
        if key not in self._work:
            workload = dataclasses.replace(self._workload, micro_batch=candidate.micro_batch)
            blocks = model_work(self._shape, degrees_of(layout), workload)[1:-1]
            largest = max((each.num_weights / each.num_kernels for unit in blocks for each in unit.products), default=0)
            self._work[key] = largest, sum(unit.count * unit.kept_bytes(kind) for unit in blocks)
        block, kept = self._work[key]
        if candidate.offloads_activations:
            return block, 0.0
        stages = layout.pp * candidate.virtual_stages
        share = candidate.virtual_stages * (self._num_layers // stages) / self._num_layers
        flight = min(layout.pp, candidate.accumulation) if layout.pp > 1 else 1
        return block, _CERTAIN * kept * share * flight


#: Fraction of the saved bytes in ``cost.work`` that is saved in every case.
_CERTAIN = 0.75


def is_whole(candidate: Candidate) -> bool:
    """Whether all parameters of a rank's stages are gathered at the same time."""
    placements = PRESETS[candidate.strategy]
    stays = candidate.layout.pp > 1 and not candidate.releases_units
    return placements.keeps_gathered or not placements.shards_parameters or stays


def degrees_of(layout: Layout) -> ParallelPlan:
    """A plan with the degrees that determine the computation of a unit on one rank."""
    return ParallelPlan(
        strategy="ddp",
        dp_shard=max(1, layout.ep // layout.cp),
        tp=layout.tp,
        cp=layout.cp,
        ep=layout.ep,
        sequence_parallel=layout.sequence_parallel,
    )


@functools.lru_cache(maxsize=64)
def expert_parameters(shape: ModelShape) -> int:
    """Parameters of all routed experts."""
    return sum(
        count * block.feed_forward.expert_parameters(shape.hidden)
        for count, block in shape.stacks
        if isinstance(block.feed_forward, Experts)
    )
