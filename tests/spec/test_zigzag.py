"""Every position is one rank's, and causal work is the same on all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.traffic.context import chunks_of, own_ranges, padded_length, ring_part

sizes = st.integers(1, 9)


@given(sizes, st.integers(1, 200), st.integers(1, 4))
def test_the_ranks_divide_the_padded_sequence(size: int, length: int, multiple: int) -> None:
    padded = padded_length(length, size, multiple)
    assert length <= padded < length + 2 * size * multiple
    held = [range(start, stop) for rank in range(size) for start, stop in own_ranges(padded, size, rank)]
    assert sorted(position for each in held for position in each) == list(range(padded))
    assert {len(each) for each in held} == {padded // (2 * size)}
    assert padded // size % multiple == 0


@given(sizes, st.integers(1, 4))
def test_the_parts_are_what_causal_attention_looks_at_and_the_same_work_on_every_rank(size: int, each: int) -> None:
    length = 2 * each
    places = [
        [position for start, stop in own_ranges(size * length, size, rank) for position in range(start, stop)]
        for rank in range(size)
    ]
    work = set()
    for rank in range(size):
        scores = 0
        for source in range(size):
            rows, columns, is_causal = ring_part(rank, source, length, is_causal=True)
            seen = {
                (places[rank][row], places[source][column])
                for row in range(length)[rows]
                for column in range(length)[columns]
                if not is_causal or column <= row
            }
            assert seen == {(q, k) for q in places[rank] for k in places[source] if k <= q}
            scores += len(seen)
        work.add(scores)
    assert len(work) == 1


@given(sizes)
def test_a_rank_has_an_early_and_a_late_chunk(size: int) -> None:
    assert all(sum(chunks_of(size, rank)) == 2 * size - 1 for rank in range(size))
