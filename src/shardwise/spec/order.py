"""The order in which units are gathered and reduced: agreed on in the first pass, followed, and extended. No torch.

Ranks must issue the same collectives in the same order, even where one of them takes another path through the model. So
every rank follows one agreed order. A rank that skips units visits them all the same, so that its peers do not wait.

A pass that the ranks *negotiate* makes the order: before each unit they exchange which one each of them wants next
(``Peers``), all issue one of those, and so on until all are through. What is recorded is the union of their paths. The
first pass through each entry of the model (:class:`Paths`) is negotiated. In later ones ranks exchange nothing while
every unit is in the order and some rank has run through all of it. Until then one word at the end of a forward tells
whether a rank has come to a unit that the order does not hold there: such a rank visits the rest of the order first,
then the ranks negotiate what it still needs. After that a rank that leaves the order waits for its peers to do so as
well, and the stall watch tells all of them if they do not: foreign data is never exchanged.

No rank removes a unit by itself, since its peers may still use it. Where paths keep changing, the order grows and
every rank visits all of it: from twice the recorded length on, the ranks exchange which places they have used, and keep
those.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple, Protocol

#: What a rank says instead of the number of a unit: it has run its path to the end; an exception ended its pass.
THROUGH, FAILED = -1, -2


class Word(NamedTuple):
    """A rank's message while ranks negotiate.

    Attributes:
        wants: Number of the unit that it wants next, ``THROUGH`` or ``FAILED``.
        place: Where in the order its path has left the order; the end, where it has not.
        is_whole: It has run all units before that place in this pass.
    """

    wants: int
    place: int = 0
    is_whole: bool = False


class Peers(Protocol):
    """The ranks that follow an order together with this one."""

    @property
    def are_there(self) -> bool:
        """There are any, and they can answer."""
        ...

    @property
    def under_way(self) -> frozenset[int]:
        """Units that this rank gathers ahead of their turn."""
        ...

    def highest(self, *numbers: int, wants: int = THROUGH) -> Sequence[int]:
        """The highest of each number over the ranks. ``wants``: the unit for which this rank asks."""
        ...

    def exchange(self, word: Word) -> Sequence[Word]:
        """Every rank's word, in rank order. Raises where one has failed."""
        ...


#: Places that an order may have beyond twice the length of the path that was recorded.
_SLACK = 8


class AgreedOrder:
    """A sequence of unit numbers and a cursor in it. Calls of one unit that follow one another are one place in it.

    Example: the order ``[0, 1, 2]`` is recorded; ``reach(2)`` right after ``start()`` answers ``[0, 1]``, the units to
    visit before 2; ``rest()`` answers what is left at the end of the pass. The cursor moves as the answers are taken:
    while a unit is visited it stands behind that unit, as on a rank that runs it.

    Args:
        peers: The ranks to agree with; ``None``: this rank records its own path.
        expected: Units that a pass may come to. Until the order holds them all, ranks exchange a word at the end of
            each forward.
        is_backward: Of two units that no rank has run in one pass, the one with the higher number comes first; and
            ranks exchange nothing at the end of a pass.
        changed: Called when the path differs from the order.

    Attributes:
        is_open: This pass is negotiated, and peers wait for this rank's next word.
        was_open: A pass since this was last set to ``False`` has been negotiated.
        is_backward: As given.
        is_recorded: A whole pass has been recorded.
        is_settled: Some rank has run all units of the order in one pass, so that nothing in it is a guess.
    """

    def __init__(
        self,
        peers: Peers | None = None,
        expected: Collection[int] = (),
        changed: Callable[[], object] = lambda: None,
        *,
        is_backward: bool = False,
    ) -> None:
        self._peers = peers
        self._expected = frozenset(expected)
        self.is_backward = is_backward
        self._order: list[int] = []
        self._used_in: list[int] = []  # by place: the last pass in which this rank ran the unit there
        self._pass = 0
        self._kept_since = 0  # the pass in which the ranks last agreed on what to keep
        self._most = 0  # the length from which on they agree anew
        self._cursor = 0
        self.is_recorded = False
        self._newcomers: set[int] = set()
        self.num_changes = 0
        self._changed = changed
        self.is_open = self.was_open = False
        self.is_settled = True
        self._before: list[tuple[int, int]] = []  # order and use, as they were when the pass was opened
        self._left_at = Word(THROUGH)  # where and how this rank's path has left the order
        self._tails: list[tuple[Word, list[int]]] = []  # by rank: where its path has left it, and the units since then

    @property
    def units(self) -> tuple[int, ...]:
        """The order as known so far."""
        return tuple(self._order)

    def start(self, *, anew: bool = False) -> None:
        """Begin a pass; with ``anew``, which is the same on all ranks, they negotiate it from its beginning."""
        self._restore()
        self._cursor = 0
        self._pass += 1
        self._newcomers.clear()
        if not self.is_recorded:
            self._order, self._used_in = [], []
        if (anew or not self.is_recorded) and self._may_ask:
            if self.is_recorded:
                self._change()
            self._open(self._here)

    @property
    def _may_ask(self) -> bool:
        return self._peers is not None and self._peers.are_there

    @property
    def _ends_with_word(self) -> bool:
        """Ranks exchange a word at the end of this pass. The same on every rank."""
        return not self.is_backward and bool(not self.is_settled or self.missing) and self._may_ask

    @property
    def missing(self) -> frozenset[int]:
        """Units that a pass may come to and that have no place in the order."""
        return self._expected.difference(self._order)

    def advance_to(self, unit: int) -> Iterable[int]:
        """Move to the next place of ``unit``; returns the units that were skipped, in order, which the caller visits.

        A unit that is not in the rest of the order is negotiated, or without peers inserted here.
        """
        cursor = self._cursor
        if cursor and self._order[cursor - 1] == unit:
            return ()
        try:
            place = self._order.index(unit, cursor)
        except ValueError:
            return self._leave(unit)
        self._used_in[place] = self._pass
        if place > cursor:
            self._change()
            return self._until(place, num_own=1)
        self._cursor = cursor + 1
        return ()

    def _leave(self, unit: int) -> Iterable[int]:
        """The rest of the order does not hold ``unit``."""
        if self.is_open:
            return self._negotiate(unit)
        if self.is_recorded:
            self._change()
        if self._may_ask:
            return self._ask(unit)
        self._add(unit)
        return ()

    def _add(self, unit: int) -> None:
        self._order.insert(self._cursor, unit)
        self._used_in.insert(self._cursor, self._pass)
        self._newcomers.add(unit)
        self._cursor += 1

    def _change(self) -> None:
        self.num_changes += 1
        self._changed()

    def _until(self, place: int, *, num_own: int = 0) -> Iterator[int]:
        """The units up to ``place``, which the caller visits; then so many more are passed, which it runs."""
        while self._cursor < place:
            self._cursor += 1
            yield self._order[self._cursor - 1]
        self._cursor += num_own

    # -- negotiating

    def _ask(self, unit: int) -> Iterator[int]:
        """Go where all ranks have issued the same, and negotiate from there on, beginning with ``unit``.

        Where the ranks ask each other at the end of the pass, that is the end of the order. Else the peers leave the
        order as well, and it is the farthest place up to which one of them has issued what the order holds.
        """
        assert self._peers is not None
        left_at = self._here
        if self._ends_with_word:
            yield from self._until(len(self._order))
            self._is_wanted(by_this_rank=True, unit=unit)
        else:
            num_ahead = len(units_ahead(self._order[self._cursor :], self._peers.under_way))
            yield from self._until(*self._peers.highest(self._cursor + num_ahead, wants=unit))
        self._open(left_at)
        yield from self._negotiate(unit)

    @property
    def _here(self) -> Word:
        """The path leaves the order at the cursor."""
        return Word(THROUGH, self._cursor, is_whole=self._has_run_all)

    def _open(self, left_at: Word) -> None:
        """From the cursor on, the ranks negotiate the pass."""
        self.is_open = True
        self._before = list(zip(self._order, self._used_in, strict=True))
        self._left_at = left_at
        self._tails = []
        del self._order[self._cursor :], self._used_in[self._cursor :]

    def _restore(self) -> None:
        """A pass that was negotiated has ended by an exception: the order is what it was before."""
        if self.is_open:
            self.is_open = False
            self._order, self._used_in = [unit for unit, _ in self._before], [used for _, used in self._before]

    def _negotiate(self, wants: int) -> Iterator[int]:
        """Exchange words with the peers until it is the turn of what this rank wants; returns what others want."""
        assert self._peers is not None
        turn = None
        while turn != wants:
            try:
                words = self._peers.exchange(self._left_at._replace(wants=wants))
            except BaseException:
                self._restore()  # nobody waits for this rank
                raise
            self._tails = self._tails or [(word, []) for word in words]
            wanted = {word.wants for word in words} - {THROUGH}
            if not wanted:
                return
            self.was_open = True
            turn = max(wanted) if self.is_backward else min(wanted)
            for (_, tail), word in zip(self._tails, words, strict=True):
                if word.wants == turn:
                    tail.append(turn)
            self._add(turn)
            if turn != wants:
                yield turn

    @property
    def _has_run_all(self) -> bool:
        """This rank has run, in the newest pass, all that the order holds before the cursor.

        Where that pass was negotiated, its end has told whether some rank has.
        """
        return not self._newcomers and all(used == self._pass for used in self._used_in[: self._cursor])

    def fail(self) -> None:
        """An exception has ended the pass on this rank: tell the peers that wait for its next word."""
        if self.is_open and self._peers is not None:
            self._restore()
            self._peers.exchange(Word(FAILED))

    def _is_wanted(self, *, by_this_rank: bool, unit: int = THROUGH) -> bool:
        """Whether some rank wants to negotiate; ranks also learn whether one has run all that the order holds."""
        assert self._peers is not None
        wanted, whole = self._peers.highest(by_this_rank, self._has_run_all, wants=unit)
        self.is_settled |= bool(whole)
        return bool(wanted)

    def is_asked_for(self, *, is_wanted: bool, is_asked: bool) -> bool:
        """Before the start of a pass: whether some rank wants it to be negotiated. ``is_asked`` is alike on all."""
        if not (self.is_recorded and self._may_ask and is_asked):
            return False
        self._cursor = len(self._order)
        return self._is_wanted(by_this_rank=is_wanted)

    def holds(self, path: Iterable[int]) -> bool:
        """Whether a rank stays in the order that runs some units of ``path``, in its order."""
        rest = iter(self._order)
        return all(unit in rest for unit, _ in itertools.groupby(path))

    def _unite(self) -> None:
        """Record the union of what the order was and of the paths of all ranks."""
        united, before = self._before, [unit for unit, _ in self._before]
        for left_at, tail in sorted(self._tails, key=lambda entry: -entry[0].place):
            united = united[: left_at.place] + self._merged(united[left_at.place :], tail)
        self._order, self._used_in = [unit for unit, _ in united], [used for _, used in united]
        self._cursor = len(self._order)
        self.is_settled = (self.is_settled and self._order == before) or any(
            left_at.is_whole and before[: left_at.place] + tail == self._order for left_at, tail in self._tails
        )

    def _merged(self, known: Sequence[tuple[int, int]], path: Sequence[int]) -> list[tuple[int, int]]:
        """A sequence that holds both, and units that they share once where their order allows it."""
        merged: list[tuple[int, int]] = []
        new = [(unit, self._pass) for unit in path]
        matcher = SequenceMatcher(None, [unit for unit, _ in known], path, autojunk=False)
        for kind, start, stop, new_start, new_stop in matcher.get_opcodes():
            ours, theirs = list(known[start:stop]), new[new_start:new_stop]
            while kind != "equal" and ours and theirs:
                is_first = (ours[0][0] > theirs[0][0]) is self.is_backward
                merged.append((ours if is_first else theirs).pop(0))
            merged += theirs or ours
        return [entry for place, entry in enumerate(merged) if not place or merged[place - 1][0] != entry[0]]

    def is_new(self, unit: int) -> bool:
        """Whether ``unit`` came into the order in this pass."""
        return unit in self._newcomers

    def finish(self) -> Iterator[int]:
        """End the pass; returns the units that were not reached, in order, which the caller visits."""
        if self._cursor < len(self._order):
            self._change()
        yield from self._until(len(self._order))
        if not self.is_open and self._ends_with_word and self._is_wanted(by_this_rank=False):
            self._open(self._here)
        if self.is_open:
            yield from self._negotiate(THROUGH)
        self.end()

    def end(self) -> None:
        """End the pass without visiting what was not reached."""
        if self.is_open:
            self.is_open = False
            self._unite()
        if not self.is_recorded:
            self.is_recorded = True
            self._most = 2 * len(self._order) + _SLACK

    @property
    def is_overgrown(self) -> bool:
        """At the end of a pass: whether the ranks should agree on what to keep. The same on every rank."""
        return len(self._order) > self._most

    def marks(self) -> list[int]:
        """Places that this rank (where ranks negotiated: any) has used, 1 or 0: in this pass, then since `keep`."""
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

    def upcoming(self, ahead: Ahead = 1) -> Sequence[int]:
        """The units expected next (:func:`units_ahead`); none at the end or while nothing is known."""
        if isinstance(ahead, int):
            return self._order[self._cursor : self._cursor + ahead]
        return units_ahead(self._order[self._cursor :], ahead)

    def remaining(self, unit: int) -> int:
        """The number of times that ``unit`` is still expected in this pass."""
        return self._order[self._cursor :].count(unit)

    def is_last(self, unit: int) -> bool:
        """The cursor stands at the end of a recorded pass, just behind ``unit``."""
        return self.is_recorded and self._cursor == len(self._order) > 0 and self._order[-1] == unit


#: Units that are gathered ahead of their turn: so many, or up to the last one of these.
Ahead = int | frozenset[int]


def units_ahead(later: Sequence[int], ahead: Ahead) -> Sequence[int]:
    """Select the later units that are gathered now, in their order."""
    if isinstance(ahead, int):
        return later[:ahead]
    return later[: max((later.index(unit) + 1 for unit in ahead if unit in later), default=0)]


#: Where a forward comes in: a unit's number, and the path of the module in it that was called ("": the unit's own).
Entry = tuple[int, str]
ROOT_ENTRY: Entry = (0, "")
#: Of the passes through one pipeline stage of a model: ``(_STAGES, "2")``, no unit's.
_STAGES = -1


def stage_entry(stage: int) -> Entry:
    """The entry of passes through a pipeline stage, which all take one path, in which no layer is left out."""
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


class Paths:
    """All agreed orders of a model, and those in force.

    Args:
        peers: The ranks that gather with this one in a forward through an entry, and those that reduce with it in the
            backward; ``None``: nobody.
        expected: The units that a forward through an entry may come to.
        changed: Called when a backward takes another path than the ones before.

    Attributes:
        forward: Of gathers in forwards that train.
        evaluation: Of gathers in evaluations, which the ranks make together.
        other: Of gathers in other forwards without grad; only to prefetch.
        backward: Of the units that backward enters.
        entry: The way in of the newest outermost forward.
        forward_order: In force in it.
        backward_order: In force in the newest backward.
    """

    def __init__(
        self,
        peers: Callable[[Entry], tuple[Peers | None, Peers | None]],
        expected: Callable[[Entry], Collection[int]],
        changed: Callable[[], object],
    ) -> None:
        self.forward = Orders(lambda entry: AgreedOrder(peers(entry)[0], expected(entry)))
        self.evaluation = Orders(lambda entry: AgreedOrder(peers(entry)[0], expected(entry)))
        self.other = Orders(lambda _entry: AgreedOrder())
        self.backward = Orders(lambda entry: AgreedOrder(peers(entry)[1], expected(entry), changed, is_backward=True))
        self.entry = ROOT_ENTRY
        self.forward_order = self.forward[ROOT_ENTRY]
        self.backward_order = self.backward[ROOT_ENTRY]

    @property
    def all(self) -> tuple[Orders, ...]:
        """The orders of forwards, evaluations and backwards."""
        return self.forward, self.evaluation, self.other, self.backward

    def enter(self, entry: Entry, *, trains: bool, is_shared: bool) -> None:
        """An outermost forward begins; with ``is_shared`` every rank makes it, whatever path it takes."""
        self.entry = entry
        self.forward_order = (self.forward if trains else self.evaluation if is_shared else self.other)[entry]

    def enter_backward(self, entry: Entry, *, anew: bool) -> None:
        """The backward of such a forward begins; with ``anew`` the ranks negotiate it."""
        self.backward_order = self.backward[entry]
        self.backward_order.start(anew=anew)

    def has_backward(self, index: int) -> bool:
        """Whether backward has entered the unit of this number in some step."""
        return any(index in order for order in self.backward.values())


def units_in(orders: Orders) -> tuple[int, ...]:
    """The units of an order through the whole model, or one stage after the other; empty before the first step."""
    stages = [order.units for (index, _), order in orders.items() if index == _STAGES]
    return tuple(dict.fromkeys(unit for units in stages for unit in units)) or orders[ROOT_ENTRY].units
