"""The step of a built model: the units that an engine has, their agreed orders, and seconds for each collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from shardwise.sim.step import StepUnit, Transfer, lower
from shardwise.sim.streams import NO_SLOWDOWN, Slowdown, Timeline, run
from shardwise.spec.facts import UnitFacts
from shardwise.spec.memory.footprint import Replicas
from shardwise.spec.traffic.data import Collective, step_walk, unit_collectives
from shardwise.spec.traffic.moments import Moment, What


class UnitSeconds(NamedTuple):
    """Computation of one unit in seconds, and the exchanges inside it; fields as in ``StepUnit``."""

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
    """One forward and backward on ``rank``.

    Args:
        units: By number, as an engine has them.
        rank: Coordinate on ``dp_shard``.
        forward_order: Unit numbers in the order of their forward calls.
        backward_order: Unit numbers as backward enters them.
        is_synchronising: As of ``step_trace``.
        is_first_of_window: As of ``step_trace``.
        replicas: As of ``step_trace``.
        num_gradient_buffers: As in ``EngineOptions``.
        seconds: How long a collective takes alone.
        computation: What a unit computes.
        slowdown: How much longer work takes where computation and communication overlap.
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

    def transfers(what: What, number: int, *, is_kept: bool = False, is_last: bool = True) -> tuple[Transfer, ...]:
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
            gather=transfers(What.GATHER, number),
            kept_gather=transfers(What.GATHER, number, is_kept=True),
            reduce=transfers(What.REDUCE, number),
            replicate=transfers(What.ADVANCE, number, is_last=False),
            is_trained=unit.is_trained,
        )
        for number, unit in units.items()
    }
    return run(lower(lowered, walk.moments), slowdown)
