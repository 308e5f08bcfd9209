"""Predicts memory and time of a training and recommends a plan, before any process is launched. No torch."""

from shardwise.cost.hardware import Cluster
from shardwise.cost.workload import Workload
from shardwise.planner.estimate import Estimate, Plans, estimate
from shardwise.planner.memory import MemoryEstimate
from shardwise.planner.rescale import rescale
from shardwise.planner.search import search
from shardwise.planner.timing import TimeEstimate

__all__ = [
    "Cluster",
    "Estimate",
    "MemoryEstimate",
    "Plans",
    "TimeEstimate",
    "Workload",
    "estimate",
    "rescale",
    "search",
]
