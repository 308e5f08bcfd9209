"""Bytes that the fullest rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.cost.hardware import Cluster
from shardwise.cost.work import model_work
from shardwise.cost.workload import Workload
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of the fullest rank at the peak of a step.

    Attributes:
        allocated_bytes: Tensors.
        reserved_bytes: What torch's allocator holds: tensors, rounding and fragments.
        device_bytes: What the device shows as used: reserved, the context, communicators, workspaces.
        by_category: Allocated bytes at the peak by what they are: ``parameters``, ``gradients``, ``optimizer``,
            ``gathered``, ``reduce``, ``activations``, ``logits``; they add up to ``allocated_bytes``.
        host_bytes: Bytes of host memory that offloading takes for this rank.
        timeline: Moments of a step in order, each with its bytes by category.
    """

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    by_category: Mapping[str, int]
    host_bytes: int = 0
    timeline: tuple[tuple[str, Mapping[str, int]], ...] = field(default=())


def estimate_memory(shape: ModelShape, plan: ParallelPlan, cluster: Cluster, workload: Workload) -> MemoryEstimate:
    """Bytes of the fullest rank of a resolved plan."""
    del cluster
    row, shard = plan.placements, plan.dp_shard * plan.cp
    units = model_work(shape, plan, workload)
    held = sum(unit.count * unit.num_parameters for unit in units) / plan.pp
    largest = max(unit.num_parameters for unit in units)
    compute = 4 if workload.precision == "fp32" else 2
    categories = {
        "parameters": 4 * held / (shard if row.shards_optimizer else 1)
        + (0 if row.shards_parameters else compute * held),
        "gradients": 4 * held / (shard if row.pools_gradients else 1),
        "optimizer": 8 * held / (shard if row.shards_optimizer else 1),
        "gathered": 2 * compute * largest if row.shards_parameters else 0,
        "reduce": 2 * 4 * largest if row.pools_gradients else 0,
        "activations": sum(unit.count * (17 * unit.stream_bytes) for unit in units) / plan.pp,
        "logits": 4 * units[-1].inner_bytes,
    }
    by_category = {name: int(count) for name, count in categories.items()}
    allocated = sum(by_category.values())
    return MemoryEstimate(
        allocated_bytes=allocated,
        reserved_bytes=int(1.05 * allocated),
        device_bytes=int(1.05 * allocated) + (1 << 30),
        by_category=by_category,
    )
