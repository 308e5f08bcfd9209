"""The agreed order: ranks that take different paths issue the same sequence, as long as that can be done."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.spec.errors import CommError
from shardwise.spec.order import FAILED, FINISHED, AgreedOrder, OrderMessage

T = TypeVar("T")
W = TypeVar("W", bound=tuple[int, ...])


def follow(order: AgreedOrder, path: list[int], *, anew: bool = False) -> list[int]:
    """What a rank issues that runs the units of ``path``."""
    issued: list[int] = []
    order.start(anew=anew)
    for unit in path:
        issued += [*order.advance_to(unit), unit]
    return in_places(issued + list(order.finish()))


def in_places(path: list[int]) -> list[int]:
    """Calls of one unit that follow one another are one."""
    return [unit for unit, _ in itertools.groupby(path)]


#: A path through a model of up to eight units, some of them called more than once.
PATHS = st.lists(st.integers(0, 7), min_size=1, max_size=12).map(in_places)


@st.composite
def recorded_and_skipping(draw):
    """A recorded path and, for some later passes, two ranks' selections from it in order."""
    path = draw(PATHS)
    masks = st.lists(st.booleans(), min_size=len(path), max_size=len(path))
    passes = draw(st.lists(st.tuples(masks, masks), min_size=1, max_size=5))
    return path, [
        tuple([unit for unit, runs in zip(path, mask, strict=True) if runs] for mask in pair) for pair in passes
    ]


@given(PATHS)
def test_a_path_is_recorded_and_then_followed_without_change(path):
    order = AgreedOrder()
    assert not order.is_recorded
    assert follow(order, path) == path
    assert order.is_recorded
    assert list(order.units) == path
    changes = order.num_changes
    assert follow(order, path) == path
    assert order.num_changes == changes == 0


@given(PATHS, st.data())
def test_calls_of_one_unit_that_follow_one_another_are_one_place(path, data):
    repeated = [unit for unit in path for _ in range(data.draw(st.integers(1, 3)))]
    order = AgreedOrder()
    assert follow(order, repeated) == path
    assert list(order.units) == path
    assert follow(order, path) == follow(order, repeated) == path
    assert order.num_changes == 0


@given(recorded_and_skipping())
def test_ranks_that_skip_different_units_issue_the_same_sequence(case):
    path, passes = case
    ranks = [AgreedOrder(), AgreedOrder()]
    for order in ranks:
        follow(order, path)
    for selections in passes:
        issued = [follow(order, selection) for order, selection in zip(ranks, selections, strict=True)]
        # A unit that comes again later may be taken for its later call: then more is visited at once, never less.
        assert issued[0] == issued[1] == path
        assert ranks[0].units == ranks[1].units == tuple(path)


@given(recorded_and_skipping(), st.integers(8, 11), st.data())
def test_a_unit_that_every_rank_inserts_at_one_place_is_followed_from_then_on(case, newcomer, data):
    path, passes = case
    place = data.draw(st.integers(0, len(path)))
    grown = [*path[:place], newcomer, *path[place:]]
    ranks = [AgreedOrder(), AgreedOrder()]
    for order in ranks:
        follow(order, path)
    assert [follow(order, grown) for order in ranks] == [grown, grown]
    for selections in passes:
        assert [follow(order, selection) for order, selection in zip(ranks, selections, strict=True)] == [grown, grown]


@given(PATHS, PATHS)
def test_whatever_path_a_rank_takes_everything_agreed_is_issued_and_everything_it_runs(path, other):
    order = AgreedOrder()
    follow(order, path)
    issued = follow(order, other)
    assert tuple(issued) == order.units
    assert _is_subsequence(path, issued)
    assert _is_subsequence(other, issued)
    assert follow(order, other) == issued


@given(PATHS)
def test_what_is_upcoming_is_what_comes(path):
    order = AgreedOrder()
    order.start()
    assert order.upcoming() == []
    follow(order, path)
    order.start()
    for index, unit in enumerate(path):
        assert order.upcoming() == [unit]
        assert list(order.upcoming(3)) == path[index : index + 3]
        assert order.remaining(unit) == path[index:].count(unit)
        assert not order.is_last(unit)
        order.advance_to(unit)
    assert order.upcoming() == []
    assert order.is_last(path[-1])
    assert not order.is_last(path[-1] + 1)


def agree(orders: list[AgreedOrder]) -> None:
    """What ranks do at the end of a pass."""
    assert len({order.is_overgrown for order in orders}) == 1
    if orders[0].is_overgrown:
        marks = [sum(values) for values in zip(*(order.marks() for order in orders), strict=True)]
        for order in orders:
            order.keep(marks)


@given(st.integers(2, 12), st.randoms(use_true_random=False))
def test_paths_that_always_change_do_not_make_the_order_grow_for_ever(count, random):
    ranks = [AgreedOrder(), AgreedOrder()]
    for _ in range(60):
        path = random.sample(range(count), count)
        assert follow(ranks[0], path) == follow(ranks[1], path)
        agree(ranks)
        assert ranks[0].units == ranks[1].units
        assert len(ranks[0].units) <= 2 * count + 8
        assert list(in_places(list(ranks[0].units))) == list(ranks[0].units)


def test_what_some_rank_has_used_lately_is_kept_and_what_none_has_used_is_not():
    ranks = [AgreedOrder(), AgreedOrder()]
    for first in (1, 5, 9):  # three ways of four units: 14 places, 20 are allowed
        for order in ranks:
            follow(order, [0, *range(first, first + 4), 99])
        agree(ranks)
    assert len(ranks[0].units) == 14
    follow(ranks[0], [0, 1, 2, 3, 4, 99])
    follow(ranks[1], [0, 9, 10, 11, 12, 99])
    for order in ranks:
        follow(order, [0, *range(20, 24), 99])
        follow(order, [0, *range(30, 34), 99])  # 22 places
    before = ranks[0].units
    agree(ranks)
    assert len(before) == 22
    assert set(ranks[0].units) == {0, *range(30, 34), 99}  # all were used lately: too many, so what is used now
    assert [follow(order, [0, *range(30, 34), 99]) for order in ranks] == [[0, 30, 31, 32, 33, 99]] * 2


def test_the_example_of_the_docstring():
    order = AgreedOrder()
    follow(order, [0, 1, 2])
    order.start()
    assert list(order.advance_to(2)) == [0, 1]
    assert list(order.finish()) == []


def test_while_a_skipped_unit_is_visited_the_cursor_stands_behind_it():
    order = AgreedOrder()
    follow(order, [0, 1, 0, 2])
    order.start()
    list(order.advance_to(0))
    assert [(unit, order.remaining(0)) for unit in order.advance_to(2)] == [(1, 1), (0, 0)]
    assert order.is_last(2)


def test_changes_are_counted():
    order = AgreedOrder()
    follow(order, [0, 1, 2])
    assert order.num_changes == 0
    follow(order, [0, 2])  # a skip
    assert order.num_changes == 1
    follow(order, [0, 1])  # an early end
    assert order.num_changes == 2
    follow(order, [0, 3, 1, 2])  # a newcomer
    assert order.num_changes == 3
    assert order.units == (0, 3, 1, 2)


def test_a_first_pass_that_ends_by_an_exception_is_no_record():
    order = AgreedOrder()
    order.start()
    order.advance_to(0)
    order.start()  # the next pass begins without an end of the last
    assert not order.is_recorded
    assert follow(order, [0, 1]) != []
    assert order.units == (0, 1)


def _is_subsequence(part: list[int], whole: list[int]) -> bool:
    rest = iter(whole)
    return all(unit in rest for unit in part)


# -- ranks that negotiate


class Meeting:
    """Ranks, each a thread, that exchange messages."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_words = 0
        self._words: dict[int, Any] = {}
        self._barrier = threading.Barrier(size, timeout=20)

    def peer(self, rank: int) -> Peer:
        return Peer(self, rank)

    def exchange(self, rank: int, message: W) -> list[W]:
        self._words[rank] = message
        if self._barrier.wait() == 0:
            self.num_words += 1
        messages = [self._words[rank] for rank in range(self.size)]
        self._barrier.wait()
        if FAILED not in message and any(FAILED in other for other in messages):
            raise CommError("a peer has failed.\n  Look there.")
        return messages

    def run(self, body: Callable[[int], T]) -> list[T]:
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(body, range(self.size)))


@dataclass
class Peer:
    meeting: Meeting
    rank: int
    can_answer: bool = True
    under_way: frozenset[int] = frozenset()

    def exchange(self, message: OrderMessage) -> list[OrderMessage]:
        return self.meeting.exchange(self.rank, message)

    def highest(self, *numbers: int, wants: int = FINISHED) -> list[int]:
        return list(map(max, zip(*self.meeting.exchange(self.rank, numbers), strict=True)))


def follow_together(
    meeting: Meeting, orders: list[AgreedOrder], paths: Sequence[list[int]], *, anew: bool = False
) -> list[int]:
    """What all ranks issue, the same, and in it what each runs."""
    issued = meeting.run(lambda rank: follow(orders[rank], list(paths[rank]), anew=anew))
    assert all(each == issued[0] for each in issued)
    assert all(order.units == orders[0].units for order in orders)
    assert all(order.is_settled == orders[0].is_settled for order in orders)
    assert all(_is_subsequence(path, issued[0]) for path in paths)
    return issued[0]


@st.composite
def subsets_of_a_path(draw):
    """For some passes the path of each of two or three ranks: any units of one path, in its order."""
    path = draw(st.permutations(range(draw(st.integers(1, 6)))))
    size = draw(st.integers(2, 3))
    masks = st.lists(st.booleans(), min_size=len(path), max_size=len(path))
    passes = draw(st.lists(st.lists(masks, min_size=size, max_size=size), min_size=1, max_size=6))
    return path, [[[u for u, runs in zip(path, mask, strict=True) if runs] for mask in ranks] for ranks in passes]


@settings(max_examples=60, deadline=None)
@given(subsets_of_a_path(), st.booleans())
def test_ranks_may_take_different_paths_from_the_first_pass_on(case, is_backward):
    path, passes = case
    meeting = Meeting(len(passes[0]))
    orders = [
        AgreedOrder(meeting.peer(rank), () if is_backward else path, is_backward=is_backward)
        for rank in range(meeting.size)
    ]
    for paths in passes:
        follow_together(meeting, orders, paths, anew=is_backward)  # before a backward, a forward has told of it
        assert set(orders[0].units) >= {unit for each in paths for unit in each}


@settings(max_examples=30, deadline=None)
@given(PATHS)
def test_ranks_that_take_one_path_record_it_and_then_exchange_nothing(path):
    meeting = Meeting(2)
    orders = [AgreedOrder(meeting.peer(rank), set(path)) for rank in range(2)]
    assert follow_together(meeting, orders, [path, path]) == path
    assert meeting.num_words == len(path) + 1
    assert follow_together(meeting, orders, [path, path]) == path
    assert meeting.num_words == len(path) + 1


def test_the_union_of_two_paths_holds_what_they_share_once():
    meeting = Meeting(2)
    orders = [AgreedOrder(meeting.peer(rank), range(6)) for rank in range(2)]
    # Unit 5 is registered last and runs second: what follows it on rank 0 is issued twice in this pass only.
    assert follow_together(meeting, orders, [[0, 5, 2, 3], [0, 2, 3]]) == [0, 2, 3, 5, 2, 3]
    assert orders[0].units == (0, 5, 2, 3)
    assert orders[0].is_settled
    assert follow_together(meeting, orders, [[0, 2, 3], [0, 5, 2]]) == [0, 5, 2, 3]
    # One rank alone comes to a unit that nobody has run: it visits the rest first.
    assert follow_together(meeting, orders, [[0, 2, 3], [0, 1, 2, 3]]) == [0, 5, 2, 3, 1, 2, 3]
    assert orders[0].units == (0, 1, 5, 2, 3)
    assert not orders[0].is_settled  # nobody has run 1 and 5 in one pass
    # They run in the other order: one rank that leaves the order tells the others at the end of the pass.
    assert follow_together(meeting, orders, [[0, 5, 1, 2, 3], [0, 3]]) == [0, 1, 5, 2, 3, 1, 2, 3]


def test_where_a_rank_fails_while_ranks_negotiate_all_others_raise():
    meeting = Meeting(3)
    orders = [AgreedOrder(meeting.peer(rank), range(4)) for rank in range(3)]

    def body(rank: int) -> str:
        orders[rank].start()
        list(orders[rank].advance_to(0))
        if rank == 1:
            orders[rank].fail()
            orders[rank].fail()  # nobody waits for a second message
            return "failed"
        with pytest.raises(CommError):
            list(orders[rank].advance_to(rank + 1))
        orders[rank].fail()
        return "told"

    assert meeting.run(body) == ["told", "failed", "told"]
    assert not orders[0].units
    assert follow_together(meeting, orders, [[0, 1], [0, 1], [0, 1, 2]]) == [0, 1, 2]


def test_where_a_negotiation_fails_the_order_is_what_it_was():
    meeting = Meeting(2)
    orders = [AgreedOrder(meeting.peer(rank), range(4), is_backward=True) for rank in range(2)]
    follow_together(meeting, orders, [[3, 2, 1, 0]] * 2)

    def body(rank: int) -> None:
        orders[rank].start(anew=True)
        list(orders[rank].advance_to(3))
        if rank == 1:
            orders[rank].fail()
            return
        with pytest.raises(CommError):
            list(orders[rank].advance_to(2))

    meeting.run(body)
    num_words = meeting.num_words
    assert [order.units for order in orders] == [(3, 2, 1, 0)] * 2
    assert follow_together(meeting, orders, [[3, 1], [2]]) == [3, 2, 1, 0]
    assert meeting.num_words == num_words


def test_what_another_rank_has_run_is_not_what_this_rank_has_run():
    """Two heads, 2 and 3, of which each rank has run one: that 3 comes first is a guess until a rank has run both."""
    meeting = Meeting(2)
    orders = [AgreedOrder(meeting.peer(rank), range(4), is_backward=True) for rank in range(2)]
    follow_together(meeting, orders, [[2, 0], [3, 0]])
    ask = lambda rank: orders[rank].is_negotiation_wanted(is_wanted_here=False, is_exchanged=True)  # noqa: E731
    for _ in range(2):
        assert meeting.run(ask) == [False, False]
        assert [order.is_settled for order in orders] == [False, False]
        follow_together(meeting, orders, [[2, 0], [3, 0]])
    follow_together(meeting, orders, [[2, 3, 0], [3, 0]], anew=True)
    assert orders[0].contains_path([2, 3, 0])
    assert orders[0].contains_path([2, 2, 0])  # calls that follow one another are one place
    assert not orders[0].contains_path([0, 3])
