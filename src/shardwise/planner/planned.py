"""A plan on a cluster with its memory and time, as plain data that can be estimated again with changes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from shardwise.cost.hardware import GIB, Cluster
from shardwise.cost.workload import Workload
from shardwise.planner.memory import MemoryEstimate, estimate_memory
from shardwise.planner.time import TimeEstimate, estimate_time
from shardwise.spec.errors import ConfigError, PlanError
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import ModelShape

#: Share of a device's memory that a recommended plan leaves free. For 8 of 10 published runs that were not used for
#: fitting, the predicted peak is wrong by no more (6.9%, `make validate`). A plan that leaves less is tight and may run
#: out of memory; a plan that exceeds the memory by no more than this share may still run.
MARGIN = 0.07

#: Memory of a node's host that offloading may use: nodes of eight GPUs have 1 to 2 TiB.
HOST_BYTES = 2 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The data of :class:`planner.estimate.Estimate`, which adds its display."""

    shape: ModelShape
    plan: ParallelPlan
    cluster: Cluster
    workload: Workload
    memory: MemoryEstimate
    time: TimeEstimate
    software: str = "pytorch"

    @classmethod
    def of(
        cls, shape: ModelShape, plan: ParallelPlan, cluster: Cluster, workload: Workload, software: str = "pytorch"
    ) -> Self:
        """See :func:`planner.estimate.estimate`."""
        if isinstance(workload.recompute, int) and workload.recompute > shape.num_layers:
            raise ConfigError(
                f"recompute={workload.recompute}: {shape.name} has {shape.num_layers} blocks.\n"
                f"  Set recompute={shape.num_layers} or less."
            )
        if workload.precision == "fp8" and "fp8" not in cluster.device.peaks:
            raise ConfigError(f"precision='fp8': {cluster.device.name} has no units for it.\n  Use bf16 or fp16.")
        mesh = plan.mesh(cluster.num_gpus, min(cluster.gpus_per_node, cluster.num_gpus))
        _check_batch(plan, workload, mesh.data_parallel_size)
        recompute = _recompute(shape, plan, workload)
        compiles = workload.compile or plan.compile
        if (recompute, compiles) != (workload.recompute, workload.compile):
            workload = dataclasses.replace(workload, recompute=recompute, compile=compiles)
        if (mesh.dp_replicate, mesh.dp_shard) != (plan.dp_replicate, plan.dp_shard):
            plan = dataclasses.replace(plan, dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard)
        return cls(
            shape=shape,
            plan=plan,
            cluster=cluster,
            workload=workload,
            memory=estimate_memory(shape, plan, cluster, workload),
            time=estimate_time(shape, plan, cluster, workload, software),
            software=software,
        )

    def again(self, **changes: Any) -> Self:
        """Estimate again, with some fields replaced."""
        new = dataclasses.replace(self, **changes)
        return self.of(new.shape, new.plan, new.cluster, new.workload, new.software)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank fits in its device's memory, and offloading in :data:`HOST_BYTES` of each node."""
        return needed_bytes(self.memory, self.cluster) <= self.cluster.device.memory_bytes

    @property
    def is_tight(self) -> bool:
        """Whether the plan fits, but leaves less than :data:`MARGIN` of the device's memory free."""
        return self.fits and self.memory.device_bytes > usable_bytes(self.cluster)

    @property
    def reason(self) -> str:
        """Why the plan does not fit, or the largest parts of its step time, as a sentence without a full stop."""
        if self.fits:
            parts = sorted(self.time.by_category.items(), key=lambda item: -item[1])
            shown = [f"{name} {spent / self.step_time_s:.0%}" for name, spent in parts if spent > 0][:3]
            return f"a step spends its time on {', '.join(shown)}"
        capacity = self.cluster.device.memory_bytes
        parts = sorted(self.memory.by_category.items(), key=lambda item: -item[1])
        shown = [f"{name} {size / GIB:.1f} GiB" for name, size in parts if size > 0][:3]
        needed = f"{self.memory.device_bytes / GIB:.1f} GiB of a device's {capacity / GIB:.1f} GiB"
        if self.memory.device_bytes <= capacity:
            return f"needs {self.memory.host_bytes / GIB:,.0f} GiB of its host's memory for each rank"
        near = f", within {MARGIN:.0%}, by which predicted peaks may be wrong" if self._is_near else ""
        return f"needs {needed}{near}: {', '.join(shown)}"

    @property
    def _is_near(self) -> bool:
        """Whether the plan would fit if its peak were :data:`MARGIN` lower than predicted."""
        return self.memory.device_bytes * (1 - MARGIN) <= self.cluster.device.memory_bytes

    @property
    def step_time_s(self) -> float:
        """Seconds of one step, except the first."""
        return self.time.step_time_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens per second on each GPU."""
        return self.workload.global_batch * self.workload.seq_len / self.step_time_s / self.cluster.num_gpus

    @property
    def tflops_per_gpu(self) -> float:
        """Model TFLOP/s of a GPU: FLOPs that the model needs, full attention and head included, over time."""
        return self.time.model_flops / self.step_time_s / self.cluster.num_gpus / 1e12

    @property
    def mfu(self) -> float | None:
        """Share of the dense peak of the products' dtype; ``None`` if that is unknown, or exceeded by use of TF32."""
        peak = self.cluster.device.peaks.get(self.workload.precision)
        share = self.tflops_per_gpu * 1e12 / peak if peak else None
        return None if share is None or share > 1 else share


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that makes the model fit, and a plan that fits with it."""

    change: str
    plan: Planned


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest model of a family that fits under a strategy."""

    strategy: str
    saving: str
    plan: Planned | None


Made = TypeVar("Made", bound=Planned)


def fastest_of(plans: Sequence[Made]) -> Made:
    """The fastest plan of a search among those that fit as well as the recommended one."""
    alike = [made for made in plans if (made.fits, made.is_tight) == (plans[0].fits, plans[0].is_tight)]
    return min(alike, key=lambda made: made.step_time_s)


def needed_bytes(memory: MemoryEstimate, cluster: Cluster) -> float:
    """Bytes of a device that a plan needs; infinite if the node's host has too little memory for offloading."""
    on_host = memory.host_bytes * min(cluster.gpus_per_node, cluster.num_gpus)
    return memory.device_bytes if on_host <= HOST_BYTES else math.inf


def usable_bytes(cluster: Cluster) -> float:
    """Bytes of a device that a recommended plan may use."""
    return (1 - MARGIN) * cluster.device.memory_bytes


def _check_batch(plan: ParallelPlan, workload: Workload, num_replicas: int) -> None:
    at_once = workload.micro_batch * num_replicas
    if workload.global_batch % at_once:
        below = workload.global_batch // at_once * at_once
        raise PlanError(
            f"global_batch={workload.global_batch} is not a multiple of micro_batch={workload.micro_batch} *"
            f" {num_replicas} data-parallel ranks = {at_once}.\n  Set global_batch={below or at_once}"
            + (f" or {below + at_once}." if below else ".")
        )
    policy, steps = plan.pipeline_policy, workload.global_batch // at_once
    if policy is not None and policy.num_microbatches not in {None, steps}:
        raise PlanError(
            f"num_microbatches={policy.num_microbatches}, but the batch makes {steps} microbatches of"
            f" {workload.micro_batch}.\n  Leave num_microbatches out, or change micro_batch or global_batch."
        )


def _recompute(shape: ModelShape, plan: ParallelPlan, workload: Workload) -> str | int:
    """The recomputation of the workload or, if that has none, of the plan."""
    policy = plan.recompute
    if workload.recompute != "none" or policy is None:
        return workload.recompute
    if policy.save:
        return "selective"
    return "full" if policy.every == 1 else -(-shape.num_layers // policy.every)
