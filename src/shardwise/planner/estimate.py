"""One plan's memory and time on one cluster."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from shardwise.cost.hardware import Cluster
from shardwise.cost.workload import Workload
from shardwise.planner.memory import MemoryEstimate, estimate_memory
from shardwise.planner.time import TimeEstimate, estimate_time
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import ModelShape
from shardwise.spec.text import size


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a step of one plan needs, and how long it takes.

    Attributes:
        shape: The model.
        plan: The plan, with every degree filled in.
        cluster: Where it runs.
        workload: What it trains.
        memory: Bytes of the fullest rank.
        time: Seconds of a step.
    """

    shape: ModelShape
    plan: ParallelPlan
    cluster: Cluster
    workload: Workload
    memory: MemoryEstimate
    time: TimeEstimate

    @property
    def fits(self) -> bool:
        """Whether the fullest rank's device memory suffices."""
        return self.memory.device_bytes <= self.cluster.device.memory_bytes

    @property
    def reason(self) -> str:
        """Why it does not fit, or what bounds the step's time, in one sentence."""
        if self.fits:
            name, seconds = max(self.time.by_category.items(), key=lambda item: item[1])
            return f"{name} takes {seconds / self.step_time_s:.0%} of the step"
        name, held = max(self.memory.by_category.items(), key=lambda item: item[1])
        over = self.memory.device_bytes - self.cluster.device.memory_bytes
        return f"{size(over)} too much; the largest part is {name} with {size(held)}"

    @property
    def step_time_s(self) -> float:
        """Seconds of one step, from the second one on."""
        return self.time.step_time_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens that a GPU trains in a second."""
        return self.workload.global_batch * self.workload.seq_len / self.step_time_s / self.cluster.num_gpus

    @property
    def tflops_per_gpu(self) -> float:
        """Model TFLOP/s of a GPU: operations that the model needs, full attention and head included, over time."""
        return self.time.model_flops / self.step_time_s / self.cluster.num_gpus / 1e12

    @property
    def mfu(self) -> float | None:
        """Share of the dense peak of the products' dtype; ``None`` where the peak is not known."""
        peak = self.cluster.device.peaks.get(self.workload.precision)
        return self.tflops_per_gpu * 1e12 / peak if peak else None


def estimate(shape: ModelShape, plan: ParallelPlan, cluster: Cluster, workload: Workload) -> Estimate:
    """Memory and time of a step.

    Args:
        shape: The model.
        plan: How it is distributed over the cluster's GPUs.
        cluster: The GPUs and their links.
        workload: What a step trains.

    Raises:
        PlanError: The plan cannot run on so many GPUs, or with such a batch.
    """
    mesh = plan.mesh(cluster.num_gpus, min(cluster.gpus_per_node, cluster.num_gpus))
    plan = dataclasses.replace(plan, dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard)
    return Estimate(
        shape=shape,
        plan=plan,
        cluster=cluster,
        workload=workload,
        memory=estimate_memory(shape, plan, cluster, workload),
        time=estimate_time(shape, plan, cluster, workload),
    )
