"""The simulated step behind an estimate of time, for drawings: streams over time, or a pipeline's ranks."""

from __future__ import annotations

from shardwise.cost.software import find_software
from shardwise.planner.calibrated import calibrated_step
from shardwise.planner.estimate import Estimate
from shardwise.planner.time import Timing
from shardwise.sim.pipeline import SimulatedPipeline
from shardwise.sim.step import SimulatedStep

#: Microbatches of a pipeline that are simulated for a drawing.
MOST_MICROBATCHES = 32


def simulated(made: Estimate) -> SimulatedStep | SimulatedPipeline:
    """The step of an estimate; of a pipeline with many microbatches the first :data:`MOST_MICROBATCHES`."""
    shape, plan, cluster, workload = made.shape, made.plan, made.cluster, made.workload
    if cluster.device.measured is not None:
        return calibrated_step(shape, plan, cluster, workload)
    timing = Timing(shape, plan, cluster, workload, find_software(made.software))
    return timing.step() if plan.pp == 1 else timing.pipeline(MOST_MICROBATCHES)
