"""One plan's memory and time on one cluster."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from shardwise.cost.hardware import GIB, Cluster
from shardwise.cost.workload import Workload
from shardwise.planner.memory import MemoryEstimate, estimate_memory
from shardwise.planner.time import TimeEstimate, estimate_time
from shardwise.spec.errors import ConfigError, PlanError
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import ModelShape
from shardwise.spec.shown import Page, Shown

#: Share of a device's memory that a recommended plan leaves free: 8 of 10 predicted peaks of published runs that
#: nothing was fitted on are wrong by no more (6.9%, `make validate`). A plan with less to spare is tight and may run
#: out; one that needs no more than this share too much may run.
MARGIN = 0.07

#: Families whose positions are learned, one vector each.
_LEARNED = frozenset({"gpt", "gpt2", "opt", "bert", "vit"})

#: Memory of a node's host that offloading may take: today's nodes of eight GPUs have 1 to 2 TiB.
HOST_BYTES = 2 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(Shown):
    """What a step of one plan needs, and how long it takes.

    Attributes:
        shape: The model.
        plan: The plan, with every degree filled in.
        cluster: Where it runs.
        workload: What it trains.
        memory: Bytes of the fullest rank.
        time: Seconds of a step.
        software: Whose speed of kernels and overlap is assumed (``cost.software``).
    """

    shape: ModelShape
    plan: ParallelPlan
    cluster: Cluster
    workload: Workload
    memory: MemoryEstimate
    time: TimeEstimate
    software: str = "pytorch"

    @property
    def fits(self) -> bool:
        """Whether the fullest rank's device memory suffices, and :data:`HOST_BYTES` of each node."""
        return needed_bytes(self.memory, self.cluster) <= self.cluster.device.memory_bytes

    @property
    def is_tight(self) -> bool:
        """Whether the plan fits, but leaves less than :data:`MARGIN` of the device's memory free."""
        return self.fits and self.memory.device_bytes > usable_bytes(self.cluster)

    @property
    def reason(self) -> str:
        """Why the plan does not fit, or what a step of it spends its time on, in one sentence without a full stop."""
        if self.fits:
            parts = sorted(self.time.by_category.items(), key=lambda item: -item[1])
            shown = [f"{name} {spent / self.step_time_s:.0%}" for name, spent in parts if spent > 0][:3]
            return f"a step spends its time on {', '.join(shown)}"
        capacity = self.cluster.device.memory_bytes
        parts = sorted(self.memory.by_category.items(), key=lambda item: -item[1])
        shown = [f"{name} {held / GIB:.1f} GiB" for name, held in parts if held > 0][:3]
        needed = f"{self.memory.device_bytes / GIB:.1f} GiB of a device's {capacity / GIB:.1f} GiB"
        if self.memory.device_bytes <= capacity:
            return f"needs {self.memory.host_bytes / GIB:,.0f} GiB of its host's memory for each rank"
        near = f", within {MARGIN:.0%}, by which predicted peaks may be wrong" if self._is_near else ""
        return f"needs {needed}{near}: {', '.join(shown)}"

    @property
    def _is_near(self) -> bool:
        """Whether the plan would fit if its peak were :data:`MARGIN` lower than predicted."""
        return self.memory.device_bytes * (1 - MARGIN) <= self.cluster.device.memory_bytes

    def page(self) -> Page:
        """The table of the plan, its memory, and what bounds its time."""
        return Plans([self]).page()

    def to_records(self) -> list[dict[str, Any]]:
        """One row: what the table has, in bytes and seconds."""
        plain = {key: value for key, value in self.to_dict().items() if not isinstance(value, dict)}
        return [plain | {"device_bytes": self.memory.device_bytes, "host_bytes": self.memory.host_bytes}]

    def to_dict(self) -> dict[str, Any]:
        """The plan's fields, memory and time, as ``shardwise plan --json`` has them."""
        return _screen().plan_as_json(self)

    def __repr__(self) -> str:
        return f"Estimate({_screen().brief(self)})"

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


class Plans(Shown, list[Estimate]):
    """What ``search`` returns: a list of at least one plan, whose text is the page of ``shardwise plan``."""

    def page(self) -> Page:
        """The page of ``shardwise plan``."""
        return _screen().page_of(self)

    def to_records(self) -> list[dict[str, Any]]:
        """A row for each plan."""
        return [row for made in self for row in made.to_records()]

    def to_dict(self) -> dict[str, Any]:
        """What ``shardwise plan --json`` prints."""
        return _screen().as_json(self[0].shape, self[0].cluster, self[0].workload, self, ())

    def __str__(self) -> str:
        return _screen().screen(self[0].shape, self[0].cluster, self[0].workload, self)

    def __repr__(self) -> str:
        return f"Plans({len(self)}, first: {self[0]!r})" if self else "Plans(0)"


def _screen() -> ModuleType:
    """What shows plans; it estimates again, for its reasons, and so imports this module."""
    from shardwise.planner import screen

    return screen


def needed_bytes(memory: MemoryEstimate, cluster: Cluster) -> float:
    """Bytes of a device that a plan needs: infinitely many where a node's host cannot hold what is offloaded."""
    on_host = memory.host_bytes * min(cluster.gpus_per_node, cluster.num_gpus)
    return memory.device_bytes if on_host <= HOST_BYTES else math.inf


def usable_bytes(cluster: Cluster) -> float:
    """Bytes of a device that a recommended plan may hold."""
    return (1 - MARGIN) * cluster.device.memory_bytes


def estimate(
    shape: ModelShape, plan: ParallelPlan, cluster: Cluster, workload: Workload, *, software: str = "pytorch"
) -> Estimate:
    """Memory and time of a step.

    Recomputation and compiling may be said by the plan or by the workload; the result has them in both.

    Args:
        shape: The model.
        plan: How it is distributed over the cluster's GPUs.
        cluster: The GPUs and their links.
        workload: What a step trains.
        software: Whose speed of kernels and overlap is assumed: a name of ``cost.software``; by default today's
            PyTorch with this library.

    Raises:
        PlanError: The plan cannot run on so many GPUs, or with such a batch.
        MeshError: Its degrees do not make the cluster's GPUs.
        ConfigError: The model has fewer blocks than are to be recomputed.
    """
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
    return Estimate(
        shape=shape,
        plan=plan,
        cluster=cluster,
        workload=workload,
        memory=estimate_memory(shape, plan, cluster, workload),
        time=estimate_time(shape, plan, cluster, workload, software),
        software=software,
    )


def check_positions(shape: ModelShape, tokens: int, given: str, option: str) -> None:
    """Refuse sequences that have no position; rotary and relative ones go on beyond what the model was trained with.

    Args:
        shape: The model.
        tokens: Tokens of a sequence.
        given: Their number as it was given.
        option: What it is set with.

    Raises:
        ConfigError: The model has fewer learned positions.
    """
    if getattr(shape, "family", "") in _LEARNED and tokens > shape.seq_len:
        raise ConfigError(
            f"{given}: {shape.name} has {shape.seq_len:,} learned positions.\n  Set {option}{shape.seq_len} or less."
        )


def _check_batch(plan: ParallelPlan, workload: Workload, num_replicas: int) -> None:
    at_once = workload.micro_batch * num_replicas
    if workload.global_batch % at_once:
        below = workload.global_batch // at_once * at_once
        raise PlanError(
            f"global_batch={workload.global_batch} is no multiple of micro_batch={workload.micro_batch} *"
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
    """What is recomputed: as the workload says, else as the plan does."""
    policy = plan.recompute
    if workload.recompute != "none" or policy is None:
        return workload.recompute
    if policy.save:
        return "selective"
    return "full" if policy.every == 1 else -(-shape.num_layers // policy.every)
