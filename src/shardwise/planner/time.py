"""Seconds of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.cost.hardware import Cluster
from shardwise.cost.work import model_work
from shardwise.cost.workload import Workload
from shardwise.planner.calibrated import calibrated_seconds
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """Where the time of a step goes, on the rank that takes longest.

    Attributes:
        step_time_s: Seconds of a step, from the second one on.
        by_category: Seconds by ``compute``, ``exposed gather``, ``exposed reduce``, ``tp``, ``pp bubble``, ``cp``,
            ``ep``, ``optimizer``, ``offload``, ``host``; they add up to ``step_time_s``.
        model_flops: Operations that the model needs for a step on all GPUs: three times the forward's, masked pairs of
            attention and the head included, recomputation not.
        sent_bytes: Bytes that a rank sends in a step, by axis.
    """

    step_time_s: float
    by_category: Mapping[str, float]
    model_flops: float
    sent_bytes: Mapping[str, float]


def estimate_time(shape: ModelShape, plan: ParallelPlan, cluster: Cluster, workload: Workload) -> TimeEstimate:
    """Seconds of a step of a resolved plan."""
    flops = model_flops(shape, workload)
    if cluster.device.measured is not None:
        seconds, by_category = calibrated_seconds(shape, plan, cluster, workload)
        return TimeEstimate(step_time_s=seconds, by_category=by_category, model_flops=flops, sent_bytes={})
    peak = cluster.device.peaks.get(workload.precision) or max(cluster.device.peaks.values())
    compute = flops / cluster.num_gpus / (0.5 * peak)
    return TimeEstimate(step_time_s=compute, by_category={"compute": compute}, model_flops=flops, sent_bytes={})


def model_flops(shape: ModelShape, workload: Workload) -> float:
    """Operations that the model needs for one step: three times the forward's, full attention, the head included."""
    units = model_work(shape, ParallelPlan(strategy="ddp"), workload)
    return 3.0 * sum(unit.count * unit.flops for unit in units) * workload.global_batch / workload.micro_batch
