"""Seconds of a step, by the tables of a calibrated machine where there are some, else by the hardware table."""

from __future__ import annotations

from shardwise.cost.hardware import Cluster
from shardwise.cost.software import find_software
from shardwise.cost.workload import Workload
from shardwise.planner.calibrated import CalibratedTiming
from shardwise.planner.timing import TimeEstimate, Timing, model_flops
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import ModelShape

__all__ = ["TimeEstimate", "Timing", "estimate_time", "model_flops", "timing"]


def timing(
    shape: ModelShape, plan: ParallelPlan, cluster: Cluster, workload: Workload, software: str = "pytorch"
) -> Timing:
    """The step of a resolved plan."""
    kind = Timing if cluster.device.measured is None else CalibratedTiming
    return kind(shape, plan, cluster, workload, find_software(software, cluster.device))


def estimate_time(
    shape: ModelShape, plan: ParallelPlan, cluster: Cluster, workload: Workload, software: str = "pytorch"
) -> TimeEstimate:
    """Seconds of a step of a resolved plan."""
    return timing(shape, plan, cluster, workload, software).estimate()
