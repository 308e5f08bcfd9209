"""The order in which units are gathered and reduced: recorded from the run, followed, and extended. No torch here.

Ranks must issue the same collectives in the same order, even where one of them takes another path through the model. So
every rank follows one agreed order: the first step records it (all ranks issue the same, so it is agreed), later steps
follow it. A rank that skips units visits them all the same, so that its peers do not wait; a unit that the order does
not expect is inserted where it came. No rank removes a unit by itself, since its peers may still use it. Where paths
keep changing, the order grows and every rank visits all of it: from twice the recorded length on, the ranks exchange
which places they have used, and keep those.

Each way into the model (:class:`Paths`) has an order of its own.

Even in the first step a rank may skip members of a list of layers (:class:`LayerList`): peers are expected to run all
of them in order. So a model that drops layers at random (stochastic depth, LayerDrop) has one order from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayerList:
    """Units that one module calls one after another, of which a rank may skip some.

    Attributes:
        members: For each member its number and the numbers of the units inside it, in the order of forward.
        scope: All units inside the module that calls the members.
    """

    members: tuple[tuple[int, ...], ...]
    scope: frozenset[int]

    def reversed(self) -> LayerList:
        """The list in the order of backward: members reversed, each before the units inside it."""
        members = tuple((head, *reversed(inner)) for head, *inner in reversed(self.members))
        return LayerList(members, self.scope)

    def place_of(self, unit: int | None) -> int | None:
        """Place of the member that ``unit`` is, or lies in; ``None``: it is in no member."""
        return next((place for place, member in enumerate(self.members) if unit in member), None)

    def places(self, reached: Collection[int]) -> list[int]:
        """Places of the members that were reached."""
        return [place for place, (head, *_) in enumerate(self.members) if head in reached]

    def missing(self, unit: int | None, reached: Collection[int], first_place: int | None) -> Sequence[tuple[int, ...]]:
        """Members after the reached ones that a peer may run before ``unit`` (``None``: before the end of the pass).

        That is every one of them once the list has been left. Another list of the same module begins at
        ``first_place``: if this list is further on by then, the other one comes after it; else the two alternate.
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
        lists: Lists of layers that a rank may skip, those of inner modules first.
        has_run: Tells which units have run although this pass may not reach them: backward does not enter every unit
            that forward ran.
        changed: Called when the path differs from the order.
    """

    def __init__(
        self,
        lists: Sequence[LayerList] = (),
        has_run: Callable[[int], bool] | None = None,
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        self._lists = lists
        self._has_run = has_run or (lambda _unit: False)
        self._order: list[int] = []
        self._used_in: list[int] = []  # by place: the last pass in which this rank ran the unit there
        self._pass = 0
        self._kept_since = 0  # the pass in which the ranks last agreed on what to keep
        self._most = 0  # the length from which on they agree anew
        self._cursor = 0
        self._recorded = False
        self._newcomers: set[int] = set()
        self.num_changes = 0
        self._changed = changed

    @property
    def units(self) -> tuple[int, ...]:
        """The order as known so far."""
        return tuple(self._order)

    @property
    def is_recorded(self) -> bool:
        """A whole pass has been recorded."""
        return self._recorded

    def take(self, units: Sequence[int]) -> None:
        """Adopt the order that another rank has recorded."""
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
        """Move to the next place of ``unit``; returns the units that were skipped, in order, which the caller visits.

        A unit that is not in the rest of the order is inserted here, after the members of its list that this rank has
        skipped.
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
                self._change()
            place = self._insert(unit)
        else:
            self._change()
        self._used_in[place] = self._pass
        return self._walk(place)

    def _change(self) -> None:
        self.num_changes += 1
        self._changed()

    def _walk(self, place: int) -> Iterator[int]:
        while self._cursor < place:
            self._cursor += 1
            yield self._order[self._cursor - 1]
        self._cursor += 1

    def _insert(self, unit: int) -> int:
        """Insert ``unit`` at the cursor, after the units that peers may run before it; returns its place."""
        cursor = self._cursor
        missing = self._missing(unit, self._order[:cursor])
        self._order[cursor:cursor] = [*missing, unit]
        self._used_in[cursor:cursor] = [self._pass] * (len(missing) + 1)
        self._newcomers.update((*missing, unit))
        return cursor + len(missing)

    def _missing(self, unit: int | None, reached: Collection[int]) -> list[int]:
        """Units that are not in the order and that peers may run after those ``reached`` and before ``unit``."""
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
        """End the pass; returns the units that were not reached, in order, which the caller visits."""
        if self._cursor < len(self._order):
            self._change()
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
        """End the pass without visiting what was not reached."""
        if not self._recorded:
            self._recorded = True
            self._most = 2 * len(self._order) + _SLACK

    @property
    def is_overgrown(self) -> bool:
        """At the end of a pass: whether the ranks should agree on what to keep. The same on every rank."""
        return len(self._order) > self._most

    def marks(self) -> list[int]:
        """Which places this rank has used, 1 or 0: for each place in this pass, then since the ranks last agreed."""
        return [int(used == self._pass) for used in self._used_in] + [
            int(used > self._kept_since) for used in self._used_in
        ]

    def keep(self, marks: Sequence[int]) -> None:
        """Keep the places that any rank has used since the last agreement, or if too many, in this pass.

        Args:
            marks: :meth:`marks` of all ranks, added up.
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
        self._change()

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


#: Where a forward comes in: a unit's number, and the path of the module in it that was called ("": the unit's own).
Entry = tuple[int, str]
ROOT_ENTRY: Entry = (0, "")
#: Of the passes through one pipeline stage of a model: ``(_STAGES, "2")``, no unit's.
_STAGES = -1


def stage_entry(stage: int) -> Entry:
    """Of the passes through a pipeline stage: they all take one path, in which no layer is left out."""
    return _STAGES, str(stage)


class Orders(dict[Entry, AgreedOrder]):
    """One order for each entry: the module through which a forward comes in, or came in that is now run backward.

    Args:
        make: Makes the order of an entry that comes for the first time.
    """

    def __init__(self, make: Callable[[Entry], AgreedOrder]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, entry: Entry) -> AgreedOrder:
        """A new order."""
        self[entry] = order = self._make(entry)
        return order

    def known(self) -> list[list[Any]]:
        """Entry and recorded order of each, as JSON holds them."""
        return [[*entry, list(order.units)] for entry, order in self.items() if order.is_recorded]

    def take(self, known: Sequence[list[Any]]) -> None:
        """Take over what :meth:`known` gave on another rank."""
        for index, path, units in known:
            self[index, path].take(units)


class Paths:
    """All agreed orders of a model, and those in force.

    Args:
        lists: The lists of layers of which a forward through an entry may skip some, those of inner modules first.
        has_run: Tells which units have run in a forward whose backward is to come.
        changed: Called when a backward takes another path than the ones before.

    Attributes:
        forward: Of gathers in forwards that train.
        evaluation: Of gathers in others; only to prefetch.
        backward: Of the units that backward enters.
        entry: The way in of the newest outermost forward.
        gathers: In force in it.
        entries: In force in the newest backward.
    """

    def __init__(
        self,
        lists: Callable[[Entry], Sequence[LayerList]],
        has_run: Callable[[int], bool],
        changed: Callable[[], object],
    ) -> None:
        def lists_of(entry: Entry) -> Sequence[LayerList]:
            return () if entry[0] == _STAGES else lists(entry)

        self.forward = Orders(lambda entry: AgreedOrder(lists_of(entry)))
        self.evaluation = Orders(lambda _entry: AgreedOrder())
        self.backward = Orders(
            lambda entry: AgreedOrder([layers.reversed() for layers in lists_of(entry)], has_run, changed)
        )
        self.entry = ROOT_ENTRY
        self.gathers = self.forward[ROOT_ENTRY]
        self.entries = self.backward[ROOT_ENTRY]

    @property
    def all(self) -> tuple[Orders, ...]:
        """Those of forwards, evaluations and backwards."""
        return self.forward, self.evaluation, self.backward

    def enter(self, entry: Entry, *, trains: bool) -> None:
        """An outermost forward begins."""
        self.entry = entry
        self.gathers = (self.forward if trains else self.evaluation)[entry]

    def enter_backward(self, entry: Entry) -> None:
        """The backward of such a forward begins."""
        self.entries = self.backward[entry]
        self.entries.start()

    def has_backward(self, index: int) -> bool:
        """Whether backward has entered the unit of this number in some step."""
        return any(index in order for order in self.backward.values())


def units_in(orders: Orders) -> tuple[int, ...]:
    """The units of an order through the whole model, or one stage after the other; empty before the first step."""
    stages = [order.units for (index, _), order in orders.items() if index == _STAGES]
    return tuple(dict.fromkeys(unit for units in stages for unit in units)) or orders[ROOT_ENTRY].units
