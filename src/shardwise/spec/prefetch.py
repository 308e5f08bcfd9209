"""The order in which units are gathered and reduced: recorded from the run, followed, and extended. No torch here.

Ranks must issue the same collectives in the same order even where one of them takes another path through the model.
Each rank therefore follows one agreed order: the first step records it (every rank issued it, so it is agreed), later
steps follow it. A rank that skips units is told to visit them all the same, so that its peers do not wait; a unit that
the order does not expect is inserted where it came. Nothing is ever taken out, because only this rank might have
skipped it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class AgreedOrder:
    """A sequence of unit numbers and a cursor in it. Calls of one unit that follow one another are one place in it.

    Example: the order ``[0, 1, 2]`` is recorded; ``reach(2)`` right after ``start()`` answers ``[0, 1]``, the units to
    visit before 2; ``rest()`` answers what is left at the end of the pass. The cursor moves as the answers are taken:
    while a unit is visited it stands behind that unit, as on a rank that runs it.
    """

    def __init__(self) -> None:
        self._order: list[int] = []
        self._cursor = 0
        self._recorded = False
        self.num_changes = 0

    @property
    def units(self) -> tuple[int, ...]:
        """The order as known so far."""
        return tuple(self._order)

    @property
    def is_recorded(self) -> bool:
        """A whole pass has been recorded."""
        return self._recorded

    def start(self) -> None:
        """Begin a pass."""
        self._cursor = 0

    def reach(self, unit: int) -> Iterable[int]:
        """Move to the next place of ``unit`` by way of the units that were skipped, in order; the caller visits them.

        A unit that the rest of the order does not hold is inserted here, and nothing is skipped.
        """
        order, cursor = self._order, self._cursor
        if cursor and order[cursor - 1] == unit:
            return ()
        if cursor < len(order) and order[cursor] == unit:
            self._cursor = cursor + 1
            return ()
        try:
            place = order.index(unit, cursor)
        except ValueError:
            order.insert(cursor, unit)
            self._cursor = cursor + 1
            if self._recorded:
                self.num_changes += 1
            return ()
        self.num_changes += 1
        return self._walk(place)

    def _walk(self, place: int) -> Iterator[int]:
        while self._cursor < place:
            self._cursor += 1
            yield self._order[self._cursor - 1]
        self._cursor += 1

    def rest(self) -> Iterator[int]:
        """End the pass by way of the units that were not reached, in order."""
        if self._cursor < len(self._order):
            self.num_changes += 1
        while self._cursor < len(self._order):
            self._cursor += 1
            yield self._order[self._cursor - 1]
        self._recorded = True

    def __contains__(self, unit: int) -> bool:
        """Whether ``unit`` has a place in the order."""
        return unit in self._order

    def upcoming(self) -> int | None:
        """The unit expected next, or ``None`` at the end or while nothing is known."""
        return self._order[self._cursor] if self._cursor < len(self._order) else None

    def remaining(self, unit: int) -> int:
        """How often ``unit`` is still expected in this pass."""
        return self._order[self._cursor :].count(unit)

    def is_last(self, unit: int) -> bool:
        """The cursor stands at the end of a recorded pass, just behind ``unit``."""
        return self._recorded and self._cursor == len(self._order) > 0 and self._order[-1] == unit
