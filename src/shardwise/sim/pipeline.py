"""Simulation of a pipeline's step: the schedules of ``spec.schedule`` with the durations of each stage.

Example::

    stages = [stage_seconds(units, PRESETS["zero3"]) for units in units_of_each_stage]
    step = simulate_pipeline("1f1b", 8, 32, stages)
    step.seconds
    step.by_category    # of the rank that computes longest; the sum is ``seconds``; "pp bubble" is its idle time

A rank gathers its stages' parameters from the beginning of the step, one unit after another, while it waits for earlier
stages. It reduces a stage's gradients during the last backward. :func:`stage_seconds` simulates both like a
data-parallel step. Messages are sent while ranks compute.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from shardwise.sim.step import StepUnit, chain_moments, lower
from shardwise.sim.streams import COMPUTE, NO_SLOWDOWN, Slowdown, add_up, run
from shardwise.spec.placement import Placements
from shardwise.spec.schedule.actions import Kind, Schedule
from shardwise.spec.schedule.builders import computations
from shardwise.spec.schedule.simulate import Durations, Key, Timing, simulate
from shardwise.spec.traffic.moments import Event

#: Durations are rounded to multiples of this many seconds, so that the simulation's whole numbers stay small.
_TICK_S = Fraction(1, 10**10)


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of one stage and one microbatch.

    Attributes:
        forward_s: A forward.
        backward_input_s: The gradient of the stage's input.
        backward_weight_s: The gradients of the stage's weights. A full backward takes this plus ``backward_input_s``.
        message_s: From the end of a forward until its result arrives at the next stage; the same for the gradient back.
        gather_s: The gathers of the stage's parameters.
        first_wait_s: From the start of these gathers until the first forward can run without waiting for one.
        last_backward_s: Additional time of the last backward, for reductions that are not hidden.
        tail_s: From the end of the last backward until its last reduction has ended.
        exposed: The part of ``forward_s`` and the full backward in which computation waits, by category (``tp``, ...).
        exposed_once: ``last_backward_s`` and ``tail_s`` by category. Negative if a reduction hides a wait that other
            microbatches have.
    """

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    message_s: float = 0.0
    gather_s: float = 0.0
    first_wait_s: float = 0.0
    last_backward_s: float = 0.0
    tail_s: float = 0.0
    exposed: Mapping[str, float] = field(default_factory=dict)
    exposed_once: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SimulatedPipeline:
    """A simulated pipeline step.

    Attributes:
        schedule: The schedule, without messages.
        stages: Seconds of each stage.
        timing: Start and end of every computation.
        optimizer_s: Seconds of the optimizer's step at the end.
    """

    schedule: Schedule
    stages: tuple[StageSeconds, ...]
    timing: Timing
    optimizer_s: float = 0.0

    @functools.cached_property
    def seconds(self) -> float:
        """Length of the step."""
        unit = float(self.timing.unit)
        ends = [spans[-1].end * unit + self.stages[spans[-1].action.stage].tail_s for spans in self.timing.spans]
        return max(ends) + self.optimizer_s

    @property
    def bubble_s(self) -> float:
        """Seconds in which the busiest rank waits for other ranks."""
        return self.seconds - self.optimizer_s - self._busy(self.fullest_rank)

    @functools.cached_property
    def fullest_rank(self) -> int:
        """The busiest rank."""
        return max(range(self.schedule.num_ranks), key=self._busy)

    @functools.cached_property
    def by_category(self) -> dict[str, float]:
        """Seconds of :attr:`fullest_rank` by category; their sum is :attr:`seconds`."""
        own = [self.stages[stage] for stage in self.schedule.stages(self.fullest_rank)]
        parts = [
            (name, seconds * self.schedule.num_microbatches) for each in own for name, seconds in each.exposed.items()
        ]
        parts += [item for each in own for item in each.exposed_once.items()]
        if waited := self._gather_wait_s(self.fullest_rank):
            parts.append(("gather", waited))
        found = add_up(parts)
        compute = self._busy(self.fullest_rank) - sum(found.values())
        found = {COMPUTE: compute, **found, "pp bubble": self.bubble_s}
        if self.optimizer_s:
            found["optimizer"] = self.optimizer_s
        return found

    def _busy(self, rank: int) -> float:
        """Seconds in which a rank computes, or waits for its gathers and reductions."""
        m, total = self.schedule.num_microbatches, 0.0
        for stage in self.schedule.stages(rank):
            times = self.stages[stage]
            total += m * (times.forward_s + times.backward_input_s + times.backward_weight_s)
            total += times.last_backward_s
        return total + self._gather_wait_s(rank) + self.stages[self.timing.spans[rank][-1].action.stage].tail_s

    def _gather_wait_s(self, rank: int) -> float:
        """Seconds in which the first forwards of a rank's stages wait only for its gathers."""
        waits = (self.timing.held_up.get((Kind.FORWARD, stage, 0), 0) for stage in self.schedule.stages(rank))
        return sum(waits) * float(self.timing.unit)


def simulate_pipeline(
    schedule: str,
    pp: int,
    num_microbatches: int,
    stages: Sequence[StageSeconds],
    *,
    num_virtual_stages: int | None = None,
) -> SimulatedPipeline:
    """Simulate a pipeline's step.

    Args:
        schedule: One of ``spec.schedule.SCHEDULES``.
        pp: Ranks of the pipeline.
        num_microbatches: Microbatches of the step.
        stages: One for each (virtual) stage, in the order of the model's forward.
        num_virtual_stages: Stages of each rank; ``None``: the schedule's default.

    Raises:
        PlanError: The numbers do not fit the schedule.
    """
    plain = computations(schedule, pp, num_microbatches, num_virtual_stages)
    last = num_microbatches - 1
    exceptions: dict[Key, Fraction] = {}
    durations = []
    for number, stage in enumerate(stages):
        durations.append(
            Durations(
                max(_round_to_tick(stage.forward_s), _TICK_S),
                max(_round_to_tick(stage.backward_input_s), _TICK_S),
                max(_round_to_tick(stage.backward_weight_s), _TICK_S),
                _round_to_tick(stage.message_s),
            )
        )
        if stage.last_backward_s:
            backward_s = stage.backward_weight_s + (0.0 if plain.is_split else stage.backward_input_s)
            kind = Kind.BACKWARD_WEIGHT if plain.is_split else Kind.BACKWARD
            exceptions[kind, number, last] = _round_to_tick(backward_s + stage.last_backward_s)
    timing = simulate(plain, durations, exceptions=exceptions, earliest=_gathered_at(plain, stages))
    return SimulatedPipeline(plain, tuple(stages), timing)


def _gathered_at(schedule: Schedule, stages: Sequence[StageSeconds]) -> dict[Key, Fraction]:
    """The earliest start of each stage's first forward, by its gathers; each rank gathers one stage after another."""
    found = {}
    for rank in range(schedule.num_ranks):
        before = 0.0
        for number in schedule.stages(rank):
            stage = stages[number]
            if stage.first_wait_s:
                found[Kind.FORWARD, number, 0] = _round_to_tick(before + stage.first_wait_s)
            before += stage.gather_s
    return found


def _round_to_tick(seconds: float) -> Fraction:
    return round(seconds / _TICK_S) * _TICK_S


def stage_seconds(
    units: Sequence[StepUnit],
    placements: Placements,
    *,
    releases: bool = False,
    slowdown: Slowdown = NO_SLOWDOWN,
) -> StageSeconds:
    """Simulate a stage, without messages. Half of a backward computes the gradients of weights.

    Args:
        units: The units of the stage in the order of forward.
        placements: Placements of the strategy.
        releases: Units are released after each forward and backward, and gathered again for the next one; else gathered
            units stay until the stage's last backward.
        slowdown: The slowdown of work while computation and communication overlap.
    """
    releases = releases and placements.shards_parameters
    chain = {0: StepUnit("stage", 0.0, 0.0, is_trained=False)} | dict(enumerate(units, start=1))
    has_replicas = any(unit.replicate for unit in units)
    moments = chain_moments(
        len(chain),
        shards_parameters=placements.shards_parameters,
        releases=releases,
        trained=frozenset(number for number, unit in chain.items() if number and unit.is_trained),
        num_phases=2 if has_replicas else 1,
        num_left=0,
        reduces=True,
        is_first_of_window=True,
        ahead=(1 if releases else len(chain), 1),
    )
    half = next(index for index, moment in enumerate(moments) if moment.event is Event.FORWARD_END) + 1
    forward, backward = moments[:half], moments[half:]
    silent = [moment for moment in backward if moment.event not in {Event.REDUCE, Event.ADVANCE}]
    ways = {
        "forward": run(lower(chain, forward, is_gathered=releases), slowdown),
        "first": run(lower(chain, forward, is_gathered=placements.shards_optimizer), slowdown),
        "backward": run(lower(chain, silent, is_gathered=releases), slowdown),
        "last": run(lower(chain, backward, is_gathered=releases), slowdown),
    }
    computed = max(
        (span.end_s for span in ways["last"].spans if span.task.stream == COMPUTE and span.task.seconds), default=0.0
    )
    gathers = ways["first"].streams.get("gather", ())
    exposed = add_up(item for way in ("forward", "backward") for item in ways[way].exposed.items())
    once = {
        category: more
        for category, seconds in ways["last"].exposed.items()
        if (more := seconds - ways["backward"].exposed.get(category, 0.0))
    }
    return StageSeconds(
        forward_s=ways["forward"].end_s,
        backward_input_s=ways["backward"].end_s / 2,
        backward_weight_s=ways["backward"].end_s / 2,
        gather_s=0.0 if releases else max((span.end_s for span in gathers), default=0.0),
        first_wait_s=ways["first"].end_s - ways["forward"].end_s,
        last_backward_s=max(computed - ways["backward"].end_s, 0.0),
        tail_s=ways["last"].end_s - max(computed, ways["backward"].end_s),
        exposed=exposed,
        exposed_once=once,
    )
