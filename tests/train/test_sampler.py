"""The sampler: a permutation per epoch, disjoint over ranks, the same global batches on every world size."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.spec.errors import CheckpointError
from shardwise.train.data.sampler import Permutation, Sampler

seeds = st.integers(0, 2**63 - 1)


@given(st.integers(1, 400), seeds, st.integers(0, 50))
def test_a_permutation_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    order = Permutation(size, seed=seed, epoch=epoch)
    assert sorted(order[index] for index in range(size)) == list(range(size))


@given(st.integers(1, 2**62), seeds)
def test_huge_epochs_cost_no_memory(size: int, seed: int) -> None:
    order = Permutation(size, seed=seed, epoch=0)
    assert all(0 <= order[index] < size for index in {0, size // 2, size - 1})


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {
        tuple(Permutation(50, seed=seed, epoch=epoch)[i] for i in range(50))
        for seed in range(10)
        for epoch in range(10)
    }
    assert len(orders) == 100


def test_every_place_is_equally_likely() -> None:
    counts = Counter(Permutation(10, seed=seed, epoch=0)[3] for seed in range(5000))
    assert all(400 < counts[value] < 600 for value in range(10))  # 500 expected, standard deviation 21


@settings(max_examples=50)
@given(
    size=st.integers(1, 40),
    micro=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    world=st.integers(1, 4),
    seed=seeds,
)
def test_an_epoch_reads_every_sample_once_over_all_ranks(
    size: int, micro: int, accumulation: int, world: int, seed: int
) -> None:
    ranks = [Sampler(size, seed, micro, accumulation, rank, world) for rank in range(world)]
    batch = ranks[0].global_batch_size
    read = []
    for _ in range(-(-size * 2 // batch)):
        read += [sample for sampler in ranks for microbatch in sampler.next_step() for sample in microbatch]
    assert sorted(read[:size]) == list(range(size))
    assert sorted(read[size : 2 * size]) == list(range(size))


@given(size=st.integers(1, 100), seed=seeds, steps=st.integers(1, 6))
def test_global_batches_do_not_depend_on_the_world(size: int, seed: int, steps: int) -> None:
    def batches(world: int, accumulation: int) -> list[list[int]]:
        ranks = [Sampler(size, seed, 12 // world // accumulation, accumulation, rank, world) for rank in range(world)]
        return [[s for rank in ranks for microbatch in rank.next_step() for s in microbatch] for _ in range(steps)]

    first = batches(1, 1)
    assert all(
        batches(world, accumulation) == first for world, accumulation in [(1, 4), (2, 1), (2, 3), (3, 2), (4, 1)]
    )


@given(st.integers(1, 100), seeds, st.integers(0, 9), st.integers(1, 9))
def test_a_saved_position_continues_the_sequence_on_another_world(
    size: int, seed: int, before: int, after: int
) -> None:
    whole = Sampler(size, seed, 4, 1, 0, 1)
    expected = [whole.next_step() for _ in range(before + after)][before:]
    half = [Sampler(size, seed, 2, 1, rank, 2) for rank in range(2)]
    for _ in range(before):
        [sampler.next_step() for sampler in half]
    state = json.loads(json.dumps(half[0].state()))
    resumed = Sampler(size, seed, 1, 4, 0, 1)
    resumed.load_state(state)
    assert [[[sample for microbatch in resumed.next_step() for sample in microbatch]] for _ in range(after)] == expected


def test_ranks_read_contiguous_ranges_of_a_global_batch() -> None:
    sampler = Sampler(1000, 1, 2, 3, 1, 2)
    expected = [[sampler.sample(6 + m * 2 + j) for j in range(2)] for m in range(3)]
    assert sampler.next_step() == expected


@pytest.mark.parametrize(
    "state", [{}, {"seed": 1, "num_samples": 9, "position": 0}, {"seed": 0, "num_samples": 9, "position": -1}]
)
def test_foreign_or_damaged_states_are_refused(state: dict[str, int]) -> None:
    with pytest.raises(CheckpointError, match="the checkpoint's sampler has"):
        Sampler(9, 0, 1, 1, 0, 1).load_state(state)
