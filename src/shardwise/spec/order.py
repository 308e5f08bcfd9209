"""The order in which units are gathered and reduced: agreed on in the first pass, followed, and extended. No torch.

Ranks must issue the same collectives in the same order, even if one of them takes a different path through the model.
So every rank follows one agreed order. A rank whose path skips a unit still visits it, so that its peers do not wait.

The order is made in a *negotiated* pass: before each unit, every rank sends a message with the unit that it wants next
(``Peers``). All ranks issue one of these units, and repeat until every rank has finished. The order is the union of
their paths. The first pass through each entry of the model (:class:`ModelOrders`) is negotiated.

Later passes need no messages once the order has every unit and some rank has run all of it in one pass. Before that,
one message at the end of each forward says whether a rank needs a unit that the rest of the order did not have. Such a
rank first visits the rest of the order, and then the ranks negotiate the units that it still needs. Once messages have
ended, a rank that leaves the order waits until its peers leave the order too. If they do not, the stall watch reports
it on all ranks. Data of different units is never mixed.

No rank removes a unit alone, because its peers may still use it. If paths keep changing, the order grows, and every
rank visits all of it. When it exceeds about twice the recorded length, the ranks exchange which positions they have
used, and keep only those.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple, Protocol

#: In a message, instead of a unit's number: the rank has reached the end of its path; an exception has ended its pass.
FINISHED, FAILED = -1, -2


class OrderMessage(NamedTuple):
    """A rank's message while ranks negotiate.

    Attributes:
        wants: Number of the unit that the rank wants next, ``FINISHED`` or ``FAILED``.
        position: Position in the order at which the rank's path left the order; the end, if it has not left the order.
        is_complete: The rank has run all units before that position in this pass.
    """

    wants: int
    position: int = 0
    is_complete: bool = False


class Peers(Protocol):
    """The ranks that follow an order together with this one."""

    @property
    def can_answer(self) -> bool:
        """Whether there are other ranks, and they can answer."""
        ...

    @property
    def under_way(self) -> frozenset[int]:
        """Units that this rank is gathering ahead of their turn."""
        ...

    def highest(self, *numbers: int, wants: int = FINISHED) -> Sequence[int]:
        """The maximum of each number over the ranks; ``wants`` is the unit for which this rank asks."""
        ...

    def exchange(self, message: OrderMessage) -> Sequence[OrderMessage]:
        """Exchange messages and return every rank's message, in rank order. Raises if a rank has failed."""
        ...


#: Number of positions that an order may have in addition to twice the length of the recorded path.
_SLACK = 8


class AgreedOrder:
    """A sequence of unit numbers, and a cursor in it. Consecutive calls of one unit share one position in the sequence.

    Example: with the recorded order ``[0, 1, 2]``, ``advance_to(2)`` right after ``start()`` returns ``[0, 1]``, the
    units to visit before 2; ``finish()`` returns the units that remain at the end of the pass. The cursor moves while
    the caller iterates: during the visit of a unit it is behind that unit, as on a rank that runs the unit.

    Args:
        peers: The ranks to agree with; ``None``: this rank records its own path.
        expected: Units that a pass may reach. Until the order has all of them, ranks exchange a message at the end of
            each forward.
        is_backward: The order of a backward: units whose mutual order is unknown are sorted from the highest number
            down, and ranks exchange nothing at the end of a pass.
        on_change: Called when the path differs from the order.

    Attributes:
        is_open: This pass is negotiated, and peers wait for this rank's next message.
        was_open: A pass since this was last set to ``False`` has been negotiated.
        is_backward: As given.
        is_recorded: A complete pass has been recorded.
        is_settled: Some rank has run all units of the order in one pass, so no part of the order is a guess.
        num_changes: How often the path has differed from the order.
    """

    def __init__(
        self,
        peers: Peers | None = None,
        expected: Collection[int] = (),
        on_change: Callable[[], object] = lambda: None,
        *,
        is_backward: bool = False,
    ) -> None:
        self._peers = peers
        self._expected = frozenset(expected)
        self.is_backward = is_backward
        self._order: list[int] = []
        self._used_in: list[int] = []  # by position: the last pass in which this rank ran the unit there
        self._pass = 0
        self._agreed_in = 0  # the pass in which the ranks last agreed on the positions to keep
        self._max_length = 0  # the ranks agree again when the order is longer than this
        self._cursor = 0
        self.is_recorded = False
        self._new_units: set[int] = set()
        self.num_changes = 0
        self._on_change = on_change
        self.is_open = self.was_open = False
        self.is_settled = True
        self._before: list[tuple[int, int]] = []  # order and last use, from before the negotiation
        self._left_at = OrderMessage(FINISHED)  # where and how this rank's path left the order
        # By rank: where its path left the order, and its units since.
        self._tails: list[tuple[OrderMessage, list[int]]] = []

    @property
    def units(self) -> tuple[int, ...]:
        """The units of the order."""
        return tuple(self._order)

    def start(self, *, anew: bool = False) -> None:
        """Begin a pass; with ``anew``, the same on all ranks, the ranks negotiate it from its beginning."""
        self._restore()
        self._cursor = 0
        self._pass += 1
        self._new_units.clear()
        if not self.is_recorded:
            self._order, self._used_in = [], []
        if (anew or not self.is_recorded) and self._has_peers:
            if self.is_recorded:
                self._change()
            self._open(self._here)

    @property
    def _has_peers(self) -> bool:
        return self._peers is not None and self._peers.can_answer

    @property
    def _ends_with_message(self) -> bool:
        """Whether ranks exchange a message at the end of this pass. The same on every rank."""
        return not self.is_backward and bool(not self.is_settled or self.missing) and self._has_peers

    @property
    def missing(self) -> frozenset[int]:
        """Units that a pass may reach and that have no position in the order."""
        return self._expected.difference(self._order)

    def advance_to(self, unit: int) -> Iterable[int]:
        """Move to the next position of ``unit``, and return the skipped units, in order, for the caller to visit.

        A unit that is not in the rest of the order is negotiated; without peers it is inserted at the cursor.
        """
        cursor = self._cursor
        if cursor and self._order[cursor - 1] == unit:
            return ()
        try:
            position = self._order.index(unit, cursor)
        except ValueError:
            return self._leave(unit)
        self._used_in[position] = self._pass
        if position > cursor:
            self._change()
            return self._until(position, num_own=1)
        self._cursor = cursor + 1
        return ()

    def _leave(self, unit: int) -> Iterable[int]:
        """Continue with a unit that the rest of the order does not have."""
        if self.is_open:
            return self._negotiate(unit)
        if self.is_recorded:
            self._change()
        if self._has_peers:
            return self._leave_with_peers(unit)
        self._add(unit)
        return ()

    def _add(self, unit: int) -> None:
        self._order.insert(self._cursor, unit)
        self._used_in.insert(self._cursor, self._pass)
        self._new_units.add(unit)
        self._cursor += 1

    def _change(self) -> None:
        self.num_changes += 1
        self._on_change()

    def _until(self, position: int, *, num_own: int = 0) -> Iterator[int]:
        """Yield the units up to ``position`` for the caller to visit, then move past ``num_own`` units that it runs."""
        while self._cursor < position:
            self._cursor += 1
            yield self._order[self._cursor - 1]
        self._cursor += num_own

    # -- negotiating

    def _leave_with_peers(self, unit: int) -> Iterator[int]:
        """Move to a position up to which all ranks issue the same units, and negotiate from there, ``unit`` first.

        If ranks exchange a message at the end of this pass, that position is the end of the order. Otherwise the peers
        leave the order too, and it is the farthest position up to which one of them has issued the order's units.
        """
        assert self._peers is not None
        left_at = self._here
        if self._ends_with_message:
            yield from self._until(len(self._order))
            self._exchange_wishes(by_this_rank=True, unit=unit)
        else:
            num_ahead = len(units_ahead(self._order[self._cursor :], self._peers.under_way))
            yield from self._until(*self._peers.highest(self._cursor + num_ahead, wants=unit))
        self._open(left_at)
        yield from self._negotiate(unit)

    @property
    def _here(self) -> OrderMessage:
        """A message that this rank's path leaves the order at the cursor."""
        return OrderMessage(FINISHED, self._cursor, is_complete=self._has_run_all)

    def _open(self, left_at: OrderMessage) -> None:
        """Negotiate the rest of the pass, from the cursor."""
        self.is_open = True
        self._before = list(zip(self._order, self._used_in, strict=True))
        self._left_at = left_at
        self._tails = []
        del self._order[self._cursor :], self._used_in[self._cursor :]

    def _restore(self) -> None:
        """Restore the order from before the negotiation, if an exception has ended a negotiated pass."""
        if self.is_open:
            self.is_open = False
            self._order, self._used_in = [unit for unit, _ in self._before], [used for _, used in self._before]

    def _negotiate(self, wants: int) -> Iterator[int]:
        """Exchange messages until all ranks issue the unit that this rank wants; yield the units issued before."""
        assert self._peers is not None
        turn = None
        while turn != wants:
            try:
                messages = self._peers.exchange(self._left_at._replace(wants=wants))
            except BaseException:
                self._restore()  # no peer waits for this rank any more
                raise
            self._tails = self._tails or [(message, []) for message in messages]
            wanted = {message.wants for message in messages} - {FINISHED}
            if not wanted:
                return
            self.was_open = True
            turn = max(wanted) if self.is_backward else min(wanted)
            for (_, tail), message in zip(self._tails, messages, strict=True):
                if message.wants == turn:
                    tail.append(turn)
            self._add(turn)
            if turn != wants:
                yield turn

    @property
    def _has_run_all(self) -> bool:
        """Whether this rank has run, in the newest pass, all units before the cursor.

        False if units were negotiated in this pass: the end of the negotiation finds out whether some rank has.
        """
        return not self._new_units and all(used == self._pass for used in self._used_in[: self._cursor])

    def fail(self) -> None:
        """Notify peers that wait for this rank's next message that an exception has ended its pass."""
        if self.is_open and self._peers is not None:
            self._restore()
            self._peers.exchange(OrderMessage(FAILED))

    def _exchange_wishes(self, *, by_this_rank: bool, unit: int = FINISHED) -> bool:
        """Exchange whether some rank wants to negotiate, and whether some rank has run all units of the order."""
        assert self._peers is not None
        wanted, complete = self._peers.highest(by_this_rank, self._has_run_all, wants=unit)
        self.is_settled |= bool(complete)
        return bool(wanted)

    def is_negotiation_wanted(self, *, is_wanted_here: bool, is_exchanged: bool) -> bool:
        """Ask peers before a pass whether a rank wants to negotiate it; ``is_exchanged`` is the same on all ranks."""
        if not (self.is_recorded and self._has_peers and is_exchanged):
            return False
        self._cursor = len(self._order)
        return self._exchange_wishes(by_this_rank=is_wanted_here)

    def contains_path(self, path: Iterable[int]) -> bool:
        """Whether the order contains ``path`` as a subsequence: a rank that runs a part of it stays in the order."""
        rest = iter(self._order)
        return all(unit in rest for unit, _ in itertools.groupby(path))

    def _unite(self) -> None:
        """Record the union of the previous order and of the paths of all ranks."""
        united, before = self._before, [unit for unit, _ in self._before]
        for left_at, tail in sorted(self._tails, key=lambda entry: -entry[0].position):
            united = united[: left_at.position] + self._merged(united[left_at.position :], tail)
        self._order, self._used_in = [unit for unit, _ in united], [used for _, used in united]
        self._cursor = len(self._order)
        self.is_settled = (self.is_settled and self._order == before) or any(
            left_at.is_complete and before[: left_at.position] + tail == self._order for left_at, tail in self._tails
        )

    def _merged(self, known: Sequence[tuple[int, int]], path: Sequence[int]) -> list[tuple[int, int]]:
        """Merge two sequences; shared units appear once where their order permits."""
        merged: list[tuple[int, int]] = []
        new = [(unit, self._pass) for unit in path]
        matcher = SequenceMatcher(None, [unit for unit, _ in known], path, autojunk=False)
        for kind, start, stop, new_start, new_stop in matcher.get_opcodes():
            ours, theirs = list(known[start:stop]), new[new_start:new_stop]
            while kind != "equal" and ours and theirs:
                is_first = (ours[0][0] > theirs[0][0]) is self.is_backward
                merged.append((ours if is_first else theirs).pop(0))
            merged += theirs or ours
        return [entry for position, entry in enumerate(merged) if not position or merged[position - 1][0] != entry[0]]

    def is_new(self, unit: int) -> bool:
        """Whether ``unit`` was added to the order in this pass."""
        return unit in self._new_units

    def finish(self) -> Iterator[int]:
        """End the pass, and yield the units that were not reached, in order, for the caller to visit."""
        if self._cursor < len(self._order):
            self._change()
        yield from self._until(len(self._order))
        if not self.is_open and self._ends_with_message and self._exchange_wishes(by_this_rank=False):
            self._open(self._here)
        if self.is_open:
            yield from self._negotiate(FINISHED)
        self.end()

    def end(self) -> None:
        """End the pass without visiting the units that were not reached."""
        if self.is_open:
            self.is_open = False
            self._unite()
        if not self.is_recorded:
            self.is_recorded = True
            self._max_length = 2 * len(self._order) + _SLACK

    @property
    def is_overgrown(self) -> bool:
        """Whether the ranks should agree, at the end of a pass, on the positions to keep. The same on every rank."""
        return len(self._order) > self._max_length

    def marks(self) -> list[int]:
        """1 for each position that this rank used in this pass, else 0; then the same for use since the last ``keep``.

        After a negotiation the positions that any rank used are 1.
        """
        return [int(used == self._pass) for used in self._used_in] + [
            int(used > self._agreed_in) for used in self._used_in
        ]

    def keep(self, marks: Sequence[int]) -> None:
        """Keep the positions that any rank has used since the last agreement, or, if too many, in this pass.

        ``marks`` is the sum of :meth:`marks` over all ranks.
        """
        count = len(self._order)
        now, lately = ([i for i in range(count) if chosen[i]] for chosen in (marks[:count], marks[count:]))
        selected = lately if 4 * len(lately) <= 3 * self._max_length else now
        path = [(self._order[position], self._used_in[position]) for position in selected]
        path = [entry for position, entry in enumerate(path) if not position or path[position - 1][0] != entry[0]]
        self._order, self._used_in = [unit for unit, _ in path], [used for _, used in path]
        self._agreed_in = self._pass
        self._max_length = max(self._max_length, 2 * len(now) + _SLACK)
        self._cursor = len(self._order)
        self._change()

    def __contains__(self, unit: int) -> bool:
        """Whether ``unit`` has a position in the order."""
        return unit in self._order

    def upcoming(self, ahead: Ahead = 1) -> Sequence[int]:
        """The units expected next (:func:`units_ahead`); none at the end of the order or before it is recorded."""
        if isinstance(ahead, int):
            return self._order[self._cursor : self._cursor + ahead]
        return units_ahead(self._order[self._cursor :], ahead)

    def remaining(self, unit: int) -> int:
        """The number of positions of ``unit`` behind the cursor."""
        return self._order[self._cursor :].count(unit)

    def is_last(self, unit: int) -> bool:
        """Whether the cursor is at the end of a recorded order whose last unit is ``unit``."""
        return self.is_recorded and self._cursor == len(self._order) > 0 and self._order[-1] == unit


#: Units that are gathered ahead of their turn: a number of units, or all up to the last one of this set.
Ahead = int | frozenset[int]


def units_ahead(later: Sequence[int], ahead: Ahead) -> Sequence[int]:
    """Select the units of ``later`` that are gathered now, in order."""
    if isinstance(ahead, int):
        return later[:ahead]
    return later[: max((later.index(unit) + 1 for unit in ahead if unit in later), default=0)]


#: The module that was called to start a forward: the number of its unit, and its path in the unit ("": the unit's own
#: module).
EntryPoint = tuple[int, str]
ROOT_ENTRY: EntryPoint = (0, "")
#: The entry of passes through pipeline stage 2 is ``(_STAGES, "2")``, because it has no unit.
_STAGES = -1


def stage_entry(stage: int) -> EntryPoint:
    """The entry of passes through a pipeline stage. All of them take the same path and skip no layer."""
    return _STAGES, str(stage)


class Orders(dict[EntryPoint, AgreedOrder]):
    """One order for each entry of a forward, or of the forward to which a backward belongs; ``make`` makes new ones."""

    def __init__(self, make: Callable[[EntryPoint], AgreedOrder]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, entry: EntryPoint) -> AgreedOrder:
        """A new order."""
        self[entry] = order = self._make(entry)
        return order


class ModelOrders:
    """All agreed orders of a model, and the current ones.

    Args:
        peers: For an entry, the ranks that gather with this one in forward, and the ranks that reduce with it in
            backward; ``None``: no other ranks.
        expected: The units that a forward through an entry may reach.
        on_change: Called when the path of a backward differs from its order.

    Attributes:
        forward: Orders of gathers in training forwards.
        evaluation: Orders of gathers in evaluations that all ranks run together.
        other: Orders of gathers in other forwards without grad, used only to prefetch.
        backward: Orders in which backward enters units.
        entry: The entry of the newest outermost forward.
        forward_order: The order of the newest outermost forward.
        backward_order: The order of the newest backward.
    """

    def __init__(
        self,
        peers: Callable[[EntryPoint], tuple[Peers | None, Peers | None]],
        expected: Callable[[EntryPoint], Collection[int]],
        on_change: Callable[[], object],
    ) -> None:
        self.forward = Orders(lambda entry: AgreedOrder(peers(entry)[0], expected(entry)))
        self.evaluation = Orders(lambda entry: AgreedOrder(peers(entry)[0], expected(entry)))
        self.other = Orders(lambda _entry: AgreedOrder())
        self.backward = Orders(lambda entry: AgreedOrder(peers(entry)[1], expected(entry), on_change, is_backward=True))
        self.entry = ROOT_ENTRY
        self.forward_order = self.forward[ROOT_ENTRY]
        self.backward_order = self.backward[ROOT_ENTRY]

    @property
    def all(self) -> tuple[Orders, ...]:
        """Every kind of orders."""
        return self.forward, self.evaluation, self.other, self.backward

    def enter(self, entry: EntryPoint, *, trains: bool, is_shared: bool) -> None:
        """Begin an outermost forward; ``is_shared``: every rank runs it, perhaps on a different path."""
        self.entry = entry
        self.forward_order = (self.forward if trains else self.evaluation if is_shared else self.other)[entry]

    def enter_backward(self, entry: EntryPoint, *, anew: bool) -> None:
        """Begin the backward of a forward through ``entry``; with ``anew`` the ranks negotiate it."""
        self.backward_order = self.backward[entry]
        self.backward_order.start(anew=anew)

    def has_backward(self, index: int) -> bool:
        """Whether backward has ever entered the unit with this number."""
        return any(index in order for order in self.backward.values())


def units_in(orders: Orders) -> tuple[int, ...]:
    """The units of the order through the model, or of all pipeline stages in turn; empty before the first step."""
    stages = [order.units for (index, _), order in orders.items() if index == _STAGES]
    return tuple(dict.fromkeys(unit for units in stages for unit in units)) or orders[ROOT_ENTRY].units
