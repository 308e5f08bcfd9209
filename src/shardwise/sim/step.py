"""Simulation of a data-parallel step as tasks on streams, in the order in which the engine issues them.

The order comes from ``spec.traffic.moments``, which ``spec.traffic.data`` uses too. Tasks wait for each other as on
CUDA streams. A collective begins when all computation that was issued before it has ended. Computation waits for the
gather of the unit that it enters and, when a unit is reduced, for earlier reductions. Streams are ``compute``,
``gather``, ``reduce``, ``replicate``, ``up`` and ``down`` (copies from and to the host), ``host`` (launches), and
``tp``, ``cp``, ``ep`` for exchanges inside a unit.

Example, with seconds on one rank for one microbatch::

    block = StepUnit("block", forward_s=0.010, backward_s=0.020, gather=(Transfer(0.004),), reduce=(Transfer(0.005),))
    root = StepUnit("root", forward_s=0.001, forward_end_s=0.003, backward_s=0.006, backward_end_s=0.001,
                    gather=(Transfer(0.001),), reduce=(Transfer(0.001),))
    step = simulate_step([root, *[block] * 32], PRESETS["zero3"], num_microbatches=4, optimizer_s=0.012)
    step.seconds
    step.by_category    # {"compute": .., "gather": .., "reduce": .., "optimizer": ..}; the sum is ``seconds``

``units[0]`` is the root, which encloses the others. At most three microbatches are simulated: the first, a middle one,
and the last. They do not overlap, because a backward waits for its reductions and a forward for its gathers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwise.sim.streams import COMPUTE, NO_SLOWDOWN, Slowdown, Task, Timeline, add_up, run
from shardwise.spec.memory.footprint import Replicas
from shardwise.spec.placement import Placements
from shardwise.spec.traffic.data import Collective, step_walk, unit_collectives
from shardwise.spec.traffic.moments import Event, Moment, UnitTraits, Walk
from shardwise.spec.unit_facts import UnitFacts


class Transfer(NamedTuple):
    """A collective or copy of a unit.

    Attributes:
        seconds: Duration without other work at the same time.
        collective: The predicted collective, for comparison with recorded ones; ``None``: not given.
        stream: Stream and category; "": those of the field of :class:`StepUnit`.
        is_beside: The transfer overlaps the unit's computation (blocks of keys and values on ``cp``); else the unit
            waits for it.
    """

    seconds: float
    collective: Collective | None = None
    stream: str = ""
    is_beside: bool = False


@dataclass(frozen=True, slots=True)
class StepUnit:
    """Seconds and transfers of one unit on one rank, for one microbatch.

    Attributes:
        name: Name in the timeline.
        forward_s: Computation of forward; for a unit that encloses others, before the first of them.
        backward_s: Computation of backward, recomputation included; for a unit that encloses others, before backward
            reaches the first of them.
        forward_end_s: For a unit that encloses others, forward after the last of them (final norm, head, loss).
        backward_end_s: The same for backward (the embedding).
        gather: All-gathers of the unit's groups.
        kept_gather: All-gathers from an inner group of ranks (``reshard_after_forward=n``).
        reduce: Reductions of the unit's groups on ``dp_shard``.
        replicate: Sums on ``dp_replicate`` that follow the reductions.
        forward_exchanges: Collectives inside forward; ``stream`` must be given: ``tp``, ``cp``, ``ep``.
        backward_exchanges: Collectives inside backward.
        forward_end_exchanges: Collectives inside ``forward_end_s``.
        backward_end_exchanges: Collectives inside ``backward_end_s``.
        up_s: Copy of the master from the host, before a gather.
        down_s: Copy of the reduced gradients to the host.
        away_s: Copy of activations to the host, and equally back; 0: activations stay on the device.
        update_s: The optimizer's step inside backward, after the reduction.
        updates_on_host: The host runs this step while backward continues.
        host_forward_s: Time that the host needs to launch forward's operations; 0: the device never waits for the host.
        host_backward_s: The same for backward.
        is_trained: Gradients are reduced.
    """

    name: str
    forward_s: float
    backward_s: float
    forward_end_s: float = 0.0
    backward_end_s: float = 0.0
    gather: tuple[Transfer, ...] = ()
    kept_gather: tuple[Transfer, ...] = ()
    reduce: tuple[Transfer, ...] = ()
    replicate: tuple[Transfer, ...] = ()
    forward_exchanges: tuple[Transfer, ...] = ()
    backward_exchanges: tuple[Transfer, ...] = ()
    forward_end_exchanges: tuple[Transfer, ...] = ()
    backward_end_exchanges: tuple[Transfer, ...] = ()
    up_s: float = 0.0
    down_s: float = 0.0
    away_s: float = 0.0
    update_s: float = 0.0
    updates_on_host: bool = False
    host_forward_s: float = 0.0
    host_backward_s: float = 0.0
    is_trained: bool = True


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step of several microbatches.

    Attributes:
        microbatches: Timeline of each kind of microbatch and the number of such microbatches, in order.
        optimizer_s: Seconds of the optimizer's step at the end.
    """

    microbatches: tuple[tuple[Timeline, int], ...]
    optimizer_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Length of the step."""
        return sum(timeline.end_s * count for timeline, count in self.microbatches) + self.optimizer_s

    @property
    def by_category(self) -> dict[str, float]:
        """Seconds of computation, and of waiting by category; their sum is :attr:`seconds`."""
        parts = [(COMPUTE, timeline.busy.get(COMPUTE, 0.0) * count) for timeline, count in self.microbatches]
        parts += [
            (name, spent * count) for timeline, count in self.microbatches for name, spent in timeline.exposed.items()
        ]
        return add_up([(COMPUTE, 0.0), *parts, *([("optimizer", self.optimizer_s)] if self.optimizer_s else [])])

    @property
    def collectives(self) -> list[Collective]:
        """All collectives, sorted by start."""
        return [
            collective
            for timeline, count in self.microbatches
            for _ in range(count)
            for _, collective in timeline.collectives
        ]


def simulate_step(
    units: Sequence[StepUnit],
    placements: Placements,
    *,
    reshards_after_forward: bool | None = None,
    num_microbatches: int = 1,
    accumulation: str = "sharded",
    prefetch: tuple[int, int] = (1, 1),
    num_gradient_buffers: int = 2,
    optimizer_s: float = 0.0,
    slowdown: Slowdown = NO_SLOWDOWN,
) -> SimulatedStep:
    """Simulate a step of a chain of units inside a root.

    Args:
        units: The root, then the units that it encloses, in the order of forward.
        placements: Placements of the strategy.
        reshards_after_forward: Units except the root are released between forward and backward; ``None``: the
            placements decide.
        num_microbatches: Forwards and backwards before the optimizer's step.
        accumulation: ``"sharded"``: every backward reduces; ``"unsharded"``: only the last one; ``"defer_replicate"``:
            every backward reduces on ``dp_shard``, and only the last one on ``dp_replicate``.
        prefetch: As in ``EngineOptions``.
        num_gradient_buffers: As in ``EngineOptions``.
        optimizer_s: Seconds of the optimizer's step and everything else after the last backward.
        slowdown: The slowdown of work while computation and communication overlap.
    """
    releases = not placements.keeps_gathered if reshards_after_forward is None else reshards_after_forward
    trained = frozenset(index for index, unit in enumerate(units) if unit.is_trained)
    has_replicas = any(unit.replicate for unit in units)
    kinds: dict[tuple[bool, bool], int] = {}
    for microbatch in range(num_microbatches):
        kind = microbatch == 0, microbatch == num_microbatches - 1
        kinds[kind] = kinds.get(kind, 0) + 1
    timelines = []
    for (is_first, is_last), count in kinds.items():
        moments = chain_moments(
            len(units),
            shards_parameters=placements.shards_parameters,
            releases=releases and placements.shards_parameters,
            trained=trained,
            num_phases=2 if has_replicas and (is_last or accumulation != "defer_replicate") else 1,
            num_left=0 if has_replicas else num_gradient_buffers - 2,
            reduces=is_last or accumulation != "unsharded",
            is_first_of_window=is_first,
            ahead=prefetch,
        )
        is_gathered = placements.shards_optimizer and (placements.shards_parameters or is_first)
        timelines.append(
            (run(lower(dict(enumerate(units)), moments, is_gathered=is_gathered, updates=is_last), slowdown), count)
        )
    return SimulatedStep(tuple(timelines), optimizer_s)


@functools.lru_cache(maxsize=256)
def chain_moments(
    num_units: int,
    *,
    shards_parameters: bool,
    releases: bool,
    trained: frozenset[int],
    num_phases: int,
    num_left: int,
    reduces: bool,
    is_first_of_window: bool,
    ahead: tuple[int, int],
) -> tuple[Moment, ...]:
    """The moments of one microbatch for a root (unit 0) that encloses a chain of units."""
    units = {
        unit: UnitTraits(
            str(unit),
            frozenset({0, unit}) if unit else range(num_units),
            ahead=ahead,
            is_released=releases and unit > 0,
            is_freed=shards_parameters,
            is_trained=unit in trained,
        )
        for unit in range(num_units)
    }
    walk = Walk(units, num_phases=num_phases, num_left=num_left, reduces=reduces, is_first_of_window=is_first_of_window)
    walk.forward(range(num_units))
    walk.backward([0, *range(num_units - 1, 0, -1)])
    return tuple(walk.moments)


def lower(
    units: Mapping[int, StepUnit], moments: Iterable[Moment], *, is_gathered: bool = True, updates: bool = True
) -> list[Task]:
    """The tasks of a forward and backward.

    Args:
        units: Seconds and transfers of each unit, by number.
        moments: The moments in order (``spec.traffic.moments``).
        is_gathered: This microbatch gathers parameters; ``False`` if gathered parameters are still up to date.
        updates: The microbatch is the last one of its step.
    """
    lowering = _Lowering(units, is_gathered=is_gathered, updates=updates)
    for moment in moments:
        lowering.add(moment)
    return lowering.finish()


@dataclass
class _Lowering:
    """Collects the tasks of a microbatch. Tasks are indices in ``tasks``.

    Attributes:
        units: As in :func:`lower`.
        is_gathered: As in :func:`lower`.
        updates: As in :func:`lower`.
        tasks: The tasks so far.
        computed: The newest task of the compute stream.
        waits: Tasks for which the next computation waits.
        gathering: Unfinished gathers, by unit.
        reducing: Unfinished reductions, by unit.
        leaving: Copies of activations to the host, by unit.
        returning: Copies of activations back from the host, by unit.
        updating: The newest update on the host.
    """

    units: Mapping[int, StepUnit]
    is_gathered: bool
    updates: bool
    tasks: list[Task] = field(default_factory=list)
    computed: tuple[int, ...] = ()
    waits: tuple[int, ...] = ()
    gathering: dict[int, tuple[int, ...]] = field(default_factory=dict)
    reducing: dict[int, tuple[int, ...]] = field(default_factory=dict)
    leaving: dict[int, int] = field(default_factory=dict)
    returning: dict[int, int] = field(default_factory=dict)
    updating: tuple[int, ...] = ()

    def add(self, moment: Moment) -> None:
        what, number = moment.event, moment.unit
        if what is Event.WAIT:
            self.waits += self.gathering.pop(number, ())
        elif what is Event.GATHER:
            self._gather(number, is_kept=moment.is_kept)
        elif what is Event.REDUCE:
            self._reduce(self.units[number], number)
        elif what is Event.ADVANCE:
            self._advance(self.units[number], number, is_last=moment.is_last)
        elif number < 0:
            self._end(is_forward=what is Event.FORWARD_END)
        else:
            self._enter(self.units[number], number, is_forward=what is Event.FORWARD)

    def finish(self) -> list[Task]:
        last = self.waits + self.updating
        if last:  # the end of backward waits for the last reductions and updates
            self._put(Task(COMPUTE, 0.0, self.computed + last, "end"))
        return self.tasks

    def _put(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def _enter(self, unit: StepUnit, number: int, *, is_forward: bool) -> None:
        """Add a unit's computation, and copies of activations, as ``engine.extensions.activation_offload`` does."""
        if is_forward:
            if number - 2 in self.leaving:  # the device has memory for activations of two units that leave it
                self.waits += (self.leaving[number - 2],)
            if unit.away_s:
                self.leaving[number] = self._put(Task("down", unit.away_s, self.computed, unit.name, "offload"))
            self._compute(unit, unit.forward_s, unit.forward_exchanges, unit.host_forward_s)
            return
        is_last = number + 1 not in self.leaving  # the last unit's activations are still on the device
        for source in (() if is_last else (number,)) + (number - 1,):
            if source in self.leaving and source not in self.returning:
                after = (*self.computed, self.leaving[source])
                self.returning[source] = self._put(Task("up", unit.away_s, after, unit.name, "offload"))
        if number in self.returning:
            self.waits += (self.returning[number],)
        self._compute(unit, unit.backward_s, unit.backward_exchanges, unit.host_backward_s)

    def _end(self, *, is_forward: bool) -> None:
        for unit in reversed(tuple(self.units.values())):
            if is_forward:
                self._compute(unit, unit.forward_end_s, unit.forward_end_exchanges)
            else:
                self._compute(unit, unit.backward_end_s, unit.backward_end_exchanges)

    def _compute(
        self, unit: StepUnit, seconds: float, exchanges: tuple[Transfer, ...] = (), host_s: float = 0.0
    ) -> None:
        if not (seconds or exchanges or host_s):
            return
        before = self.waits + self.computed
        parallel: tuple[int, ...] = ()
        for each in exchanges:
            if each.is_beside:
                parallel += self._send(each.stream, each.stream, (each,), before, unit)
        done = self._put(Task(COMPUTE, seconds, before, unit.name))
        if host_s:  # the host launches while the device computes, and the device cannot end before the host
            launched = self._put(Task("host", host_s, (), unit.name, "host"))
            done = self._put(Task(COMPUTE, 0.0, (done, launched), unit.name))
        self.computed = (done,)
        for each in exchanges:
            if not each.is_beside:
                self.computed = self._send(each.stream, each.stream, (each,), self.computed, unit)
        self.waits = parallel

    def _send(
        self, stream: str, category: str, transfers: Iterable[Transfer], after: tuple[int, ...], unit: StepUnit
    ) -> tuple[int, ...]:
        """Put transfers on a stream, and return the last task."""
        placed: tuple[int, ...] = ()
        for each in transfers:
            placed = (self._put(Task(stream, each.seconds, after, unit.name, category, each.collective)),)
        return placed

    def _gather(self, number: int, *, is_kept: bool) -> None:
        unit = self.units[number]
        is_kept = is_kept and bool(unit.kept_gather)
        if not (self.is_gathered or is_kept):
            return
        after = self.waits + self.computed
        if unit.up_s:
            after = (self._put(Task("up", unit.up_s, after, unit.name, "offload")),)
        sent = self._send("gather", "gather", unit.kept_gather if is_kept else unit.gather, after, unit)
        self.gathering[number] = sent or (after if unit.up_s else ())

    def _reduce(self, unit: StepUnit, number: int) -> None:
        self.reducing[number] = self._send("reduce", "reduce", unit.reduce, self.waits + self.computed, unit)

    def _advance(self, unit: StepUnit, number: int, *, is_last: bool) -> None:
        self.waits += self.reducing.pop(number)
        if not is_last:
            after = self.waits + self.computed
            self.reducing[number] = self._send("replicate", "reduce", unit.replicate, after, unit)
            return
        if unit.down_s:
            self.waits += (self._put(Task("down", unit.down_s, self.waits, unit.name, "offload")),)
        if not (self.updates and unit.update_s):
            return
        if unit.updates_on_host:
            self.updating = (self._put(Task("update", unit.update_s, self.waits, unit.name, "optimizer")),)
        else:
            self._compute(unit, unit.update_s)


# -- a built model: its units, their agreed orders, and seconds of each collective


class UnitSeconds(NamedTuple):
    """Computation of one unit in seconds, and exchanges inside it; fields as in ``StepUnit``."""

    forward_s: float = 1.0
    backward_s: float = 2.0
    forward_end_s: float = 0.0
    backward_end_s: float = 0.0
    forward_exchanges: tuple[Transfer, ...] = ()
    backward_exchanges: tuple[Transfer, ...] = ()
    forward_end_exchanges: tuple[Transfer, ...] = ()
    backward_end_exchanges: tuple[Transfer, ...] = ()


def simulate_facts(
    units: Mapping[int, UnitFacts],
    *,
    rank: int,
    forward_order: Sequence[int],
    backward_order: Sequence[int],
    is_synchronising: bool = True,
    is_first_of_window: bool = True,
    replicas: Replicas | None = None,
    num_gradient_buffers: int = 2,
    seconds: Callable[[Collective], float] = lambda _collective: 1.0,
    computation: Callable[[int], UnitSeconds] = lambda _unit: UnitSeconds(),
    slowdown: Slowdown = NO_SLOWDOWN,
) -> Timeline:
    """Simulate one forward and backward of a built model on ``rank``; see ``spec.traffic.data.step_trace``.

    ``seconds`` is the duration of a collective without other work at the same time, ``computation`` that of a unit's
    computation. For ``num_gradient_buffers`` see ``EngineOptions``.
    """
    walk = step_walk(
        units,
        is_synchronising=is_synchronising,
        is_first_of_window=is_first_of_window,
        replicas=replicas,
        num_left=num_gradient_buffers - 2,
    )
    walk.forward(forward_order)
    walk.backward(backward_order)

    def transfers(what: Event, number: int, *, is_kept: bool = False, is_last: bool = True) -> tuple[Transfer, ...]:
        found = unit_collectives(
            units,
            Moment(what, number, is_kept, is_last),
            rank=rank,
            is_synchronising=is_synchronising,
            is_first_of_window=is_first_of_window,
            replicas=replicas,
        )
        return tuple(Transfer(seconds(collective), collective) for collective in found)

    lowered = {
        number: StepUnit(
            unit.name,
            **computation(number)._asdict(),
            gather=transfers(Event.GATHER, number),
            kept_gather=transfers(Event.GATHER, number, is_kept=True),
            reduce=transfers(Event.REDUCE, number),
            replicate=transfers(Event.ADVANCE, number, is_last=False),
            is_trained=unit.is_trained,
        )
        for number, unit in units.items()
    }
    return run(lower(lowered, walk.moments), slowdown)
