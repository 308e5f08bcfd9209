"""The moments of a data-parallel step, in the engine's order: the single source of that order for all predictions.

``spec.traffic.data`` turns them into collectives, ``sim.step`` into a timeline. Under zero3, with root 0 and blocks 1
to 3::

    forward    gather 0, gather 1, wait 0, forward 0, gather 2, wait 1, forward 1, gather 3, wait 2, forward 2, wait 3,
               forward 3, end of forward
    backward   wait 0, backward 0, gather 2, wait 3, backward 3, reduce 3, gather 1, wait 2, backward 2, advance 3,
               reduce 2, wait 1, backward 1, end of backward, advance 2, reduce 1, advance 1, reduce 0, advance 0

The gather of the next unit is issued before the engine waits for the current unit's gather (the prefetch, here one unit
ahead). A unit is reduced when backward enters a unit that neither encloses the first nor is inside it; at the same time
the engine waits for earlier reductions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from shardwise.spec.order import Ahead, units_ahead
from shardwise.spec.unit_facts import UnitFacts


class Event(Enum):
    """The kinds of events at a moment."""

    GATHER = "the gather of a unit is issued, where one is due"
    WAIT = "computation waits for the unit's gather"
    FORWARD = "the unit computes forward"
    FORWARD_END = "all units have computed forward; those that enclose others compute what is left"
    BACKWARD = "the unit computes backward"
    BACKWARD_END = "all units have computed backward; those that enclose others compute what is left"
    REDUCE = "the reduction of the unit's gradients is issued"
    ADVANCE = "a phase of the unit's reduction is waited for, and the next one issued, where there is one"


class Moment(NamedTuple):
    """One moment of a step.

    Attributes:
        what: The event.
        unit: The number of the unit; -1 for the ends of forward and backward.
        is_kept: The gather of a unit that was gathered before, since the parameters changed; an inner group of ranks
            may have kept it.
        is_last: The phase of the reduction is the last one.
    """

    event: Event
    unit: int
    is_kept: bool = False
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class UnitTraits:
    """The properties of a unit that determine its moments, for callers without ``UnitFacts``, which has them too.

    Attributes:
        name: The unit's name.
        family: Numbers of this unit, the units that enclose it and the units that it encloses.
        recomputed_in: Name of a module around the unit that is recomputed in backward.
        ahead: Units that are gathered ahead while this one computes, in forward and in backward.
        is_released: Parameters are released between forward and backward.
        is_freed: Parameters are released after backward.
        is_trained: Gradients are reduced.
    """

    name: str
    family: Collection[int]
    recomputed_in: str | None = None
    ahead: tuple[Ahead, Ahead] = (1, 1)
    is_released: bool = True
    is_freed: bool = True
    is_trained: bool = True


class Walk:
    """Lists the moments of one forward and backward, or of a pipeline's step.

    Args:
        units: Facts or moves of each unit, by number.
        num_phases: Phases of a reduction: 2 if a sum continues over ``dp_replicate``, or needs two collectives.
        num_left: Units whose reductions may still run when another reduction is issued: the number of gradient buffers
            less 2.
        reduces: Backward reduces gradients.
        is_first_of_window: The parameters have changed since the previous forward.

    Attributes:
        moments: The moments so far.
    """

    def __init__(
        self,
        units: Mapping[int, UnitTraits] | Mapping[int, UnitFacts],
        *,
        num_phases: int = 1,
        num_left: int = 0,
        reduces: bool = True,
        is_first_of_window: bool = True,
    ) -> None:
        self.moments: list[Moment] = []
        self._units = units
        self._num_phases = num_phases
        self._num_left = num_left
        self._reduces = reduces
        self._is_first_of_window = is_first_of_window
        self._resident: set[int] = set()
        self._kept: set[int] = set()
        self._entered: list[int] = []
        self._recomputed: set[str] = set()
        self._forward_order: Sequence[int] = ()
        self._reducing: dict[int, int] = {}  # the current phase of unfinished reductions, by unit, oldest first

    def forward(self, order: Sequence[int]) -> None:
        """Add a forward through the units in this order."""
        self._forward_order = order
        if not self._is_first_of_window:  # inner groups have kept these units since the previous microbatch
            self._kept = {unit for unit in order[:-1] if self._units[unit].is_released}
        previous: int | None = None
        for index, unit in enumerate(order):
            if previous is not None and previous != unit and self._units[previous].is_released:
                self._resident.discard(previous)
                self._kept.add(previous)
            self._gather(unit)
            self._prefetch(units_ahead(order[index + 1 :], self._units[unit].ahead[0]))
            self._add(Event.WAIT, unit)
            self._add(Event.FORWARD, unit)
            previous = unit
        self._add(Event.FORWARD_END, -1)

    def backward(self, order: Sequence[int]) -> None:
        """Add a backward that enters the units in this order."""
        for index, unit in enumerate(order):
            later = order[index + 1 :]
            for other in [other for other in self._entered if other not in self._units[unit].family]:
                if other not in later:
                    self._leave_unit(other)
            self._gather(unit)
            if unit not in self._entered:
                self._entered.append(unit)
            self._prefetch(units_ahead(later, self._units[unit].ahead[1]))
            self._add(Event.WAIT, unit)
            self._recompute(unit)
            self._add(Event.BACKWARD, unit)
        self._add(Event.BACKWARD_END, -1)
        for unit in reversed(self._entered.copy()):
            self._leave_unit(unit)
        self.finish()

    def reduce(self, order: Sequence[int]) -> None:
        """Add the reductions of units in this order, when all gradients are computed."""
        for unit in order:
            self._entered.append(unit)
            self._leave_unit(unit)
        self.finish()

    def finish(self) -> None:
        """Add the waits for every reduction."""
        while self._reducing:
            self._advance(0)

    def _add(self, event: Event, unit: int) -> None:
        self.moments.append(Moment(event, unit))

    def _recompute(self, entered: int) -> None:
        """Gather the units of the module that is recomputed when backward enters a unit: the unit, or one around it."""
        for module in (self._units[entered].name, self._units[entered].recomputed_in):
            if module is not None and module not in self._recomputed:
                self._recomputed.add(module)
                for unit in self._forward_order:
                    if self._units[unit].recomputed_in == module:
                        self._gather(unit)
                        self._add(Event.WAIT, unit)

    def _prefetch(self, units: Sequence[int]) -> None:
        for unit in units:
            self._gather(unit)

    def _gather(self, unit: int) -> None:
        if unit not in self._resident:
            self._resident.add(unit)
            self.moments.append(Moment(Event.GATHER, unit, unit in self._kept))

    def _leave_unit(self, unit: int) -> None:
        self._entered.remove(unit)
        if self._units[unit].is_trained and self._reduces:
            self._advance(self._num_left)
            self._add(Event.REDUCE, unit)
            self._reducing[unit] = 0
        if self._units[unit].is_freed:
            self._resident.discard(unit)

    def _advance(self, num_left: int) -> None:
        """Wait for the current phases of all reductions except those of the ``num_left`` newest units."""
        for unit in list(self._reducing)[: len(self._reducing) - num_left]:
            phase = self._reducing[unit] = self._reducing[unit] + 1
            is_last = phase == self._num_phases
            self.moments.append(Moment(Event.ADVANCE, unit, is_last=is_last))
            if is_last:
                del self._reducing[unit]
