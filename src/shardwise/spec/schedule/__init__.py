"""Pipeline schedules as data: built and checked by arithmetic, run by ``parallel.pipeline``."""

from shardwise.spec.schedule.actions import Action, Kind, Schedule
from shardwise.spec.schedule.builders import SCHEDULES, PipelinePolicy, build, forward_only, pipeline_policy
from shardwise.spec.schedule.simulate import check

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
