"""The agreed order: ranks that take different paths issue the same sequence, as long as that can be done."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.order import AgreedOrder, LayerList


def follow(order: AgreedOrder, path: list[int]) -> list[int]:
    """What a rank issues that runs the units of ``path``."""
    issued: list[int] = []
    order.start()
    for unit in path:
        issued += [*order.reach(unit), unit]
    return in_places(issued + list(order.rest()))


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
    assert order.upcoming() is None
    follow(order, path)
    order.start()
    for index, unit in enumerate(path):
        assert order.upcoming() == unit
        assert order.remaining(unit) == path[index:].count(unit)
        assert not order.is_last(unit)
        order.reach(unit)
    assert order.upcoming() is None
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
    assert list(order.reach(2)) == [0, 1]
    assert list(order.rest()) == []


def test_while_a_skipped_unit_is_visited_the_cursor_stands_behind_it():
    order = AgreedOrder()
    follow(order, [0, 1, 0, 2])
    order.start()
    list(order.reach(0))
    assert [(unit, order.remaining(0)) for unit in order.reach(2)] == [(1, 1), (0, 0)]
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
    order.reach(0)
    order.start()  # the next pass begins without an end of the last
    assert not order.is_recorded
    assert follow(order, [0, 1]) != []
    assert order.units == (0, 1)


def _is_subsequence(part: list[int], whole: list[int]) -> bool:
    rest = iter(whole)
    return all(unit in rest for unit in part)


# -- lists of layers of which a rank may leave out some, from the first pass on

#: 1 calls a list of layers 2 to 5, of which each holds a unit; 10 comes between; 11 calls the layers 12 to 15.
OUTER = LayerList(((2, 6), (3, 7), (4, 8), (5, 9)), frozenset({2, 3, 4, 5, 6, 7, 8, 9}))
LATER = LayerList(((12,), (13,), (14,), (15,)), frozenset({12, 13, 14, 15}))
WHOLE = [0, 1, 2, 6, 3, 7, 4, 8, 5, 9, 10, 11, 12, 13, 14, 15]

#: Which layers of each list run, at least one.
SOME = st.lists(st.sampled_from(range(4)), min_size=1, unique=True)


def path_of(outer, later):
    inner = [unit for place, member in enumerate(OUTER.members) if place in outer for unit in member]
    return [0, 1, *inner, 10, 11, *(head for place, (head,) in enumerate(LATER.members) if place in later)]


@given(st.lists(st.tuples(SOME, SOME), min_size=1, max_size=4))
def test_layers_may_be_left_out_from_the_first_pass_on(passes):
    order = AgreedOrder([OUTER, LATER])
    for outer, later in passes:
        assert follow(order, path_of(outer, later)) == WHOLE


@given(SOME, SOME)
def test_backward_too(outer, later):
    forward = path_of(outer, later)
    order = AgreedOrder([OUTER.reversed(), LATER.reversed()], set(forward).__contains__)
    backward = [0, 11, *reversed(forward[forward.index(11) + 1 :]), 10, 1]
    backward += [unit for member in reversed(OUTER.members) if member[0] in forward for unit in member]
    assert follow(order, backward) == [0, 11, 15, 14, 13, 12, 10, 1, 5, 9, 4, 8, 3, 7, 2, 6]


def test_backward_need_not_reach_every_layer_that_has_run():
    order = AgreedOrder([LATER.reversed()], {12, 13, 15}.__contains__)
    assert follow(order, [13, 12]) == [14, 13, 12]


def test_lists_that_take_turns_stay_as_they_are():
    first, second = (
        LayerList(tuple((unit,) for unit in units), frozenset(range(1, 9))) for units in ((1, 2, 3, 4), (5, 6, 7, 8))
    )
    order = AgreedOrder([first, second])
    assert follow(order, [0, 1, 5, 2, 6, 3, 7, 4, 8]) == [0, 1, 5, 2, 6, 3, 7, 4, 8]
    order = AgreedOrder([first, second])
    assert follow(order, [0, 1, 5, 3, 7, 4, 8]) == [0, 1, 5, 2, 3, 6, 7, 4, 8]


def test_lists_of_one_module_that_follow_one_another_do_so():
    first, second = (
        LayerList(tuple((unit,) for unit in units), frozenset(range(1, 9))) for units in ((1, 2, 3, 4), (5, 6, 7, 8))
    )
    for path in ([1, 2, 3, 5, 6, 7, 8], [1, 3, 6, 8], [1, 3, 4, 5]):
        assert follow(AgreedOrder([first, second]), [0, *path]) == list(range(9))


def test_a_list_that_is_never_entered_is_not_visited():
    assert follow(AgreedOrder([OUTER, LATER]), [0, 1, 2, 6, 3, 7, 4, 8, 5, 9]) == [0, 1, 2, 6, 3, 7, 4, 8, 5, 9]


def test_layers_that_run_again_are_not_expected_twice():
    path = [0, 1, 2, 6, 3, 7, 4, 8, 5, 9, 2, 6, 3, 7, 4, 8, 5, 9]
    assert follow(AgreedOrder([OUTER]), path) == path
