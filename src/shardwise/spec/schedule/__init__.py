"""Pipeline schedules as data: built and checked by arithmetic, run by ``pipeline``."""

from shardwise.spec.schedule.action import Action, Kind, Schedule
from shardwise.spec.schedule.check import check
from shardwise.spec.schedule.forward_only import forward_only
from shardwise.spec.schedule.policy import SCHEDULES, PipelinePolicy, build, pipeline_policy

__all__ = [
    "SCHEDULES",
    "Action",
    "Kind",
    "PipelinePolicy",
    "Schedule",
    "build",
    "check",
    "forward_only",
    "pipeline_policy",
]
