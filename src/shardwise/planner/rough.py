"""Seconds of a step in closed form, by which the search decides which plans to estimate in full.

Times of units and collectives are those of the full estimate; their overlap is not simulated but computed from sums. No
kind of plan is dropped because of its rough time: the best of every kind by rough time are estimated in full.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from shardwise.cost.hardware import Cluster
from shardwise.cost.software import find_software
from shardwise.cost.unit import UnitWork
from shardwise.cost.workload import Workload
from shardwise.planner.candidate import Candidate
from shardwise.planner.timing import Timing
from shardwise.sim.step import StepUnit
from shardwise.spec.placement import PRESETS
from shardwise.spec.shape import ModelShape

#: Remaining share of the bubble ``(pp - 1) / m``, by schedule; interleaving divides it by the stages of a rank.
_BUBBLE = {"zb-h1": 0.5, "zb-v": 0.5}

#: Collectives over the network may take ``_SLOWER`` times as long as predicted: ZeRO-3 on Azure reached 36 to 79 of
#: 200 GB/s a node (planner.md). ``_SLOWER_SHARE`` of the time that a step would lose counts as its risk.
_SLOWER, _SLOWER_SHARE = 2.0, 0.5


class _Once(NamedTuple):
    """Seconds of one microbatch on all stages together."""

    computed: float
    waited: float
    gathered: float
    reduced: float
    updated: float
    head: float  # of ``computed``, in blocks


class RoughTime:
    """Seconds of a candidate's step; 0 on a calibrated machine, because only the full estimate reads its tables."""

    def __init__(self, shape: ModelShape, cluster: Cluster, workload: Workload, fixed: Mapping[str, Any]) -> None:
        self._shape, self._cluster, self._workload, self._fixed = shape, cluster, workload, fixed
        self._software = find_software("pytorch", cluster.device)  # the default of an estimate
        self._made: dict[Candidate, _Once] = {}

    def __call__(self, candidate: Candidate, slower: float = 1.0) -> float:
        """The seconds, if collectives between nodes or through the host take ``slower`` times as long as predicted."""
        if self._cluster.device.measured is not None:
            return 0.0
        spent, pp, m = self._once(candidate), candidate.layout.pp, candidate.accumulation
        placements, slows = PRESETS[candidate.strategy], self._software.slowdown - 1
        is_single_stage = pp == 1
        gathers = 0
        if placements.shards_parameters and (is_single_stage or candidate.releases_units):
            is_kept = placements.keeps_gathered or self._fixed.get("reshard_after_forward", "auto") is False
            gathers = m * (1 if is_kept else 2)
        elif placements.shards_optimizer:
            gathers = 1
        reduces = m if placements.pools_gradients and is_single_stage else 1
        layout, node = candidate.layout, self._cluster.gpus_per_node * bool(self._cluster.device.link_bandwidth)
        gathered = spent.gathered * (slower if layout.dp_shard * layout.cp * layout.tp > node else 1.0)
        reduced = spent.reduced * (slower if self._cluster.num_gpus > node else 1.0)
        sent = (gathers * gathered + reduces * reduced) / pp
        waited = spent.waited * (slower if layout.ep * layout.tp > node else 1.0)
        work = m * (spent.computed + waited)
        if not is_single_stage:
            stages = pp * candidate.virtual_stages
            blocks = self._shape.num_layers + spent.head
            fullest = math.ceil(blocks / stages) * stages / blocks  # other stages wait for those with most blocks
            turns = m + (pp - 1) * _BUBBLE.get(candidate.schedule, 1.0) / candidate.virtual_stages
            work = turns * fullest * (spent.computed + waited) / pp
            ahead = gathered / stages - (spent.computed + spent.waited) / stages / 3
            work += (pp - 1) * max(0.0, ahead) * (gathers > 0)
        hidden = min(work - m * waited / pp, sent)
        return max(work, sent) + slows * max(hidden, 0.0) + spent.updated / pp

    def network_risk(self, candidate: Candidate) -> float:
        """The share of the step at risk if collectives over the network are slower than predicted."""
        seconds = self(candidate)
        return _SLOWER_SHARE * (self(candidate, _SLOWER) / seconds - 1) if seconds else 0.0

    def _once(self, candidate: Candidate) -> _Once:
        layout, strategy = candidate.layout, candidate.strategy
        if layout.pp > 1:  # units stay gathered for the step, and full gradients are added up
            layout = dataclasses.replace(layout, pp=1)
            is_zero1 = PRESETS[strategy].shards_optimizer and not candidate.releases_units
            strategy = "zero1" if is_zero1 else strategy
        count = min(candidate.accumulation, 2)
        key = Candidate(layout, strategy, "", 1, candidate.micro_batch, count, candidate.offload, candidate.recompute)
        if key not in self._made:
            self._made[key] = self._counted(key)
        return self._made[key]

    def _counted(self, candidate: Candidate) -> _Once:
        workload = candidate.workload(self._workload)
        ranks = candidate.layout.data_parallel_size
        workload = dataclasses.replace(workload, global_batch=ranks * workload.micro_batch * candidate.accumulation)
        fixed = {name: value for name, value in self._fixed.items() if name != "pipeline"}
        plan = candidate.plan(workload, fixed)
        timing = Timing(self._shape, plan, self._cluster, workload, self._software)
        computed = waited = gathered = reduced = updated = alone = block = 0.0
        last = len(timing.works) - 1
        made: dict[UnitWork, StepUnit] = {}
        for place, work in enumerate(timing.works):
            is_block = place not in {0, last}
            recompute = str(workload.recompute) if is_block else "none"
            alike = dataclasses.replace(work, name="block") if is_block else work
            if alike not in made:
                made[alike] = timing.step_unit(work, recomputes=recompute)
            unit = made[alike]
            exchanges = [*unit.forward_exchanges, *unit.backward_exchanges]
            alone = unit.forward_s + unit.backward_s
            ring = sum(each.seconds for each in exchanges if each.is_beside)
            alone = max(alone, ring) + (self._software.slowdown - 1) * min(alone, ring)
            host = unit.host_forward_s + unit.host_backward_s
            computed += work.count * max(alone, host)
            waited += work.count * sum(each.seconds for each in exchanges if not each.is_beside)
            gathered += work.count * sum(each.seconds for each in unit.gather)
            reduced += work.count * sum(each.seconds for each in (*unit.reduce, *unit.replicate))
            updated += work.count * (timing.optimizer_s(work) + unit.up_s)
            block = max(block, alone) if is_block else block
        return _Once(computed, waited, gathered, reduced, updated, alone / block if block else 0.0)
