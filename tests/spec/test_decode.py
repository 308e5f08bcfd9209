"""The order in which parts of a batch go round the stages while they generate."""

from __future__ import annotations

import itertools
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from shardwise.generation.chunks import Turn, divide, slots
from shardwise.spec.schedule.actions import folded_ranks, looped_ranks


def turns(*args):
    return itertools.chain.from_iterable(slots(*args))


PLACES = st.one_of(
    st.builds(looped_ranks, st.integers(1, 4), st.integers(1, 3)), st.builds(folded_ranks, st.integers(1, 4))
)


@given(PLACES, st.integers(1, 6), st.integers(1, 4))
def test_ranks_that_follow_it_wait_in_no_circle_and_messages_arrive_in_the_order_in_which_they_were_sent(
    ranks, num_chunks, num_steps
):
    num_stages, size = len(ranks), max(ranks) + 1
    orders = [
        list(turns([s for s, rank in enumerate(ranks) if rank == me], num_stages, num_chunks, num_steps))
        for me in range(size)
    ]
    computed = [turn for order in orders for turn in order if turn.stage < num_stages]
    every = {Turn(t, j, s) for t in range(num_steps) for j in range(num_chunks) for s in range(num_stages)}
    assert len(computed) == len(every)
    assert set(computed) == every
    sent, received = defaultdict(list), defaultdict(list)
    done: set[tuple[int, Turn]] = set()
    places = [0] * size
    moved = True
    while moved:
        moved = False
        for me, order in enumerate(orders):
            while places[me] < len(order):
                turn = order[places[me]]
                step, part, stage = turn
                if stage == 0:
                    needed = (me, Turn(step - 1, part, num_stages)) if step else None
                else:
                    needed = (ranks[stage - 1], Turn(step, part, stage - 1))
                if needed is not None and needed not in done:
                    break
                source = ranks[stage - 1] if stage else me
                if source != me:
                    received[source, me].append(turn)
                targets = range(size) if stage == num_stages - 1 else [ranks[stage + 1]] if stage < num_stages else []
                for target in targets:
                    if target != me:
                        sent[me, target].append(Turn(step, part, stage + 1))
                done.add((me, turn))
                places[me] += 1
                moved = True
    assert places == [len(order) for order in orders]
    assert sent == received


def test_from_as_many_parts_as_stages_on_no_stage_waits():
    for num_chunks in (3, 4):
        for stage in range(3):
            order = [turn for turn in turns([stage], 3, num_chunks, 2) if turn.stage == stage]
            assert order == [Turn(t, j, stage) for t in range(2) for j in range(num_chunks)]


@given(st.integers(0, 40), st.integers(1, 9))
def test_shares_are_neighbours_and_even(count, num_shares):
    shares = divide(count, num_shares)
    assert [row for share in shares for row in share] == list(range(count))
    sizes = [len(share) for share in shares]
    assert len(sizes) == num_shares
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
