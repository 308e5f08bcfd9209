"""The order in which units are gathered and reduced: recorded from the run, followed, and extended. No torch here.

Ranks must issue the same collectives in the same order even where one of them takes another path through the model.
Each rank therefore follows one agreed order: the first step records it (every rank issued it, so it is agreed), later
steps follow it. A rank that skips units is told to visit them all the same, so that its peers do not wait; a unit that
the order does not expect is inserted where it came. Nothing is taken out by one rank alone, because only this rank
might have skipped it. A model whose paths keep changing makes the order long, and every rank visits all of it: from
twice the length of the recorded path on the ranks tell each other what they have used, and keep that.

Already in the first step a rank may leave out members of a list of layers (:class:`LayerList`): peers are expected to
run all of them in order. So a model that drops layers at random (stochastic depth, LayerDrop) has one order from the
start.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerList:
    """Units that follow one another, of which a rank may leave out some.

    Attributes:
        members: By member, its number and the numbers of the units inside it, in the order in which they are reached.
        scope: All units inside the module that calls the members.
    """

    members: tuple[tuple[int, ...], ...]
    scope: frozenset[int]

    def reversed(self) -> LayerList:
        """The same, as backward goes through it: each member before the units inside it, as in forward."""
        members = tuple((head, *reversed(inner)) for head, *inner in reversed(self.members))
        return LayerList(members, self.scope)

    def place_of(self, unit: int | None) -> int | None:
        """Of the member that ``unit`` is, or is inside of."""
        return next((place for place, member in enumerate(self.members) if unit in member), None)

    def places(self, reached: Collection[int]) -> list[int]:
        """Of the members that were reached."""
        return [place for place, (head, *_) in enumerate(self.members) if head in reached]

    def missing(self, unit: int | None, reached: Collection[int], first_place: int | None) -> Sequence[tuple[int, ...]]:
        """The members behind those that were reached that a peer may run before ``unit`` (``None``: before the end).

        All of them where the list has been left. Another list of the same module comes after this one where it begins
        while this one is further on (``first_place``: where it begins); else the two take turns.
        """
        places = self.places(reached)
        last = places[-1] if places else -1
        place = self.place_of(unit)
        if place is not None:
            return self.members[last + 1 : place]
        is_left = unit not in self.scope or (first_place is not None and first_place < last)
        return self.members[last + 1 :] if places and is_left else ()


#: Places that an order may have beyond twice the length of the path that was recorded.
_SLACK = 8


class AgreedOrder:
    """A sequence of unit numbers and a cursor in it. Calls of one unit that follow one another are one place in it.

    Example: the order ``[0, 1, 2]`` is recorded; ``reach(2)`` right after ``start()`` answers ``[0, 1]``, the units to
    visit before 2; ``rest()`` answers what is left at the end of the pass. The cursor moves as the answers are taken:
    while a unit is visited it stands behind that unit, as on a rank that runs it.

    Args:
        lists: Lists of layers, of which any may be left out, those of inner modules first.
        has_run: Tells the units that are not left out, though this pass may never reach them: backward does not come to
            every unit that has run.
    """

    def __init__(self, lists: Sequence[LayerList] = (), has_run: Callable[[int], bool] | None = None) -> None:
        self._lists = lists
        self._has_run = has_run or (lambda _unit: False)
        self._order: list[int] = []
        self._used_in: list[int] = []  # by place: the pass in which this rank last ran the unit there
        self._pass = 0
        self._kept_since = 0  # the pass in which the ranks last agreed on what to keep
        self._most = 0  # the length from which on they agree anew
        self._cursor = 0
        self._recorded = False
        self._newcomers: set[int] = set()
        self.num_changes = 0

    @property
    def units(self) -> tuple[int, ...]:
        """The order as known so far."""
        return tuple(self._order)

    @property
    def is_recorded(self) -> bool:
        """A whole pass has been recorded."""
        return self._recorded

    def take(self, units: Sequence[int]) -> None:
        """Take over the order that another rank has recorded."""
        self._order = list(units)
        self._used_in = [self._pass] * len(self._order)
        self._kept_since = self._pass - 1
        self._recorded = False
        self.end()

    def start(self) -> None:
        """Begin a pass."""
        self._cursor = 0
        self._pass += 1
        self._newcomers.clear()

    def reach(self, unit: int) -> Iterable[int]:
        """Move to the next place of ``unit`` by way of the units that were skipped, in order; the caller visits them.

        A unit that the rest of the order does not hold is inserted here; skipped are then the members of its list that
        this rank has left out.
        """
        order, cursor = self._order, self._cursor
        if cursor and order[cursor - 1] == unit:
            return ()
        if cursor < len(order) and order[cursor] == unit:
            self._used_in[cursor] = self._pass
            self._cursor = cursor + 1
            return ()
        try:
            place = order.index(unit, cursor)
        except ValueError:
            if self._recorded:
                self.num_changes += 1
            place = self._insert(unit)
        else:
            self.num_changes += 1
        self._used_in[place] = self._pass
        return self._walk(place)

    def _walk(self, place: int) -> Iterator[int]:
        while self._cursor < place:
            self._cursor += 1
            yield self._order[self._cursor - 1]
        self._cursor += 1

    def _insert(self, unit: int) -> int:
        """Put ``unit`` at the cursor, and before it what peers may issue; returns its place."""
        cursor = self._cursor
        missing = self._missing(unit, self._order[:cursor])
        self._order[cursor:cursor] = [*missing, unit]
        self._used_in[cursor:cursor] = [self._pass] * (len(missing) + 1)
        self._newcomers.update((*missing, unit))
        return cursor + len(missing)

    def _missing(self, unit: int | None, reached: Collection[int]) -> list[int]:
        """Units that the order does not hold and that peers may issue after those ``reached`` and before ``unit``."""
        own = [layers for layers in self._lists if layers.place_of(unit) is not None]
        begun = [layers.place_of(unit) for layers in own if not layers.places(reached)]
        known, missing = set(self._order), []
        for layers in [*(layers for layers in self._lists if layers not in own), *own]:
            for member in layers.missing(unit, reached, begun[0] if begun else None):
                if not (member[0] in known or self._has_run(member[0])):
                    missing += member
                    known.update(member)
        return missing

    def is_new(self, unit: int) -> bool:
        """Whether ``unit`` came into the order in this pass."""
        return unit in self._newcomers

    def rest(self) -> Iterator[int]:
        """End the pass by way of the units that were not reached, in order."""
        if self._cursor < len(self._order):
            self.num_changes += 1
        if self._newcomers:
            missing = self._missing(None, self._order)
            self._order += missing
            self._used_in += [self._pass] * len(missing)
            self._newcomers.update(missing)
        while self._cursor < len(self._order):
            self._cursor += 1
            yield self._order[self._cursor - 1]
        self.end()

    def end(self) -> None:
        """End the pass, whatever was not reached."""
        if not self._recorded:
            self._recorded = True
            self._most = 2 * len(self._order) + _SLACK

    @property
    def is_overgrown(self) -> bool:
        """At the end of a pass: the ranks should agree on what to keep. The same on every rank."""
        return len(self._order) > self._most

    def marks(self) -> list[int]:
        """What this rank would keep: by place 1 or 0 for this pass, then the same since the ranks last agreed."""
        return [int(used == self._pass) for used in self._used_in] + [
            int(used > self._kept_since) for used in self._used_in
        ]

    def keep(self, marks: Sequence[int]) -> None:
        """Keep what some rank has used since the last time; where that is too much, what one has used in this pass.

        Args:
            marks: Of all ranks, added up.
        """
        count = len(self._order)
        now, lately = ([place for place in range(count) if chosen[place]] for chosen in (marks[:count], marks[count:]))
        kept = lately if 4 * len(lately) <= 3 * self._most else now
        path = [(self._order[place], self._used_in[place]) for place in kept]
        path = [entry for place, entry in enumerate(path) if not place or path[place - 1][0] != entry[0]]
        self._order, self._used_in = [unit for unit, _ in path], [used for _, used in path]
        self._kept_since = self._pass
        self._most = max(self._most, 2 * len(now) + _SLACK)
        self._cursor = len(self._order)
        self.num_changes += 1

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
