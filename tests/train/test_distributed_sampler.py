"""The public sampler: complete, disjoint, one order on any world, resumable; and torch's beside it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler as TorchSampler

import shardwise as sw
from shardwise.spec.errors import CheckpointError, ConfigError

SIZES = (1, 2, 7, 64, 101)
WORLDS = (1, 2, 3, 5, 8)


def samplers(data, world, **options):
    return [sw.DistributedSampler(data, num_replicas=world, rank=rank, **options) for rank in range(world)]


def together(parts):
    """What the ranks read, in the order of places."""
    return [part[k] for k in range(max(map(len, parts))) for part in parts if k < len(part)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_samples", SIZES)
def test_every_sample_is_read_once_in_one_order_on_any_world(num_samples, shuffle):
    for epoch in range(3):
        orders = []
        for world in WORLDS:
            parts = []
            for sampler in samplers(num_samples, world, shuffle=shuffle, seed=4):
                sampler.set_epoch(epoch)
                parts.append(list(sampler))
                assert len(sampler) == len(parts[-1])
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
            orders.append(together(parts))
            assert sorted(orders[-1]) == list(range(num_samples))
        assert all(order == orders[0] for order in orders)
        assert shuffle or orders[0] == list(range(num_samples))


def test_epochs_and_seeds_give_other_orders():
    (first,) = samplers(101, 1)
    (other,) = samplers(101, 1, seed=1)
    assert list(first) != list(other)
    before = list(first)
    first.set_epoch(1)
    assert before != list(first)
    first.set_epoch(0)
    assert before == list(first)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (4, 2), (3, 3), (2, 5)])
def test_a_run_goes_on_where_it_was_on_another_number_of_ranks(before, after):
    data, batch = 101, 4
    (whole,) = samplers(data, 1, seed=7)
    whole.set_epoch(2)
    order = list(whole)
    old = samplers(data, before, seed=7)
    read = []
    for sampler in old:
        sampler.set_epoch(2)
        iterator = iter(sampler)
        read.append([next(iterator) for _ in range(3 * batch)])
    assert together(read) == order[: 3 * batch * before]
    state = old[0].state_dict()
    assert state == old[-1].state_dict() == old[0].state_dict(consumed=3 * batch * before)
    new = samplers(data, after, seed=7)
    for sampler in new:
        sampler.load_state_dict(state)
        sampler.set_epoch(2)
    assert together([list(sampler) for sampler in new]) == order[3 * batch * before :]
    for sampler in new:
        sampler.set_epoch(3)
    assert len(together([list(sampler) for sampler in new])) == data


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_plain_call_resumes_at_each_step_also_twice_and_behind_a_last_batch_that_is_a_part(drop_last):
    data, world, batch = 101, 2, 8
    (whole,) = samplers(data, 1, seed=7)
    order = list(whole)[: 100 if drop_last else 101]
    place = 0
    for steps in (2, 3, 2):  # three runs, each in the same epoch; 100 or 101 samples make seven steps
        running = samplers(data, world, seed=7, drop_last=drop_last)
        for sampler in running:
            sampler.load_state_dict({"epoch": 0, "position": place, "seed": 7, "num_samples": data})
        parts = [list(sampler) for sampler in running]  # workers have read the whole epoch in advance
        assert together(parts) == order[place:]
        (state, other) = (sampler.state_dict(consumed=steps * batch * world) for sampler in running)
        assert state == other
        place = state["position"]
        assert place == min(place, len(order))
    assert place == 7 * batch * world - (12 if drop_last else 11)


def test_a_number_of_consumed_samples_that_cannot_be_is_refused_and_the_advice_is_right():
    sampler = samplers(100, 2)[0]
    iterator = iter(sampler)
    for _ in range(20):
        next(iterator)
    for wrong in (10**6, 42, 17, -2):  # 40 samples have been given, in pairs
        with pytest.raises(ConfigError, match=rf"consumed={wrong}\).*\n.*step \* batch_size \* sw.data_parallel_size"):
            sampler.state_dict(consumed=wrong)
    assert sampler.state_dict(consumed=2 * 8 * 2)["position"] == 32
    sampler.load_state_dict(sampler.state_dict(consumed=32))
    with pytest.raises(ConfigError, match="at most the 0"):  # the count since the epoch began, in an epoch resumed
        sampler.state_dict(consumed=48)
    sampler.load_state_dict(sampler.state_dict() | {"position": 96})
    list(sampler)  # the last batch counts as a full one of 8, and there were four samples for both ranks
    assert sampler.state_dict(consumed=8 * 2)["position"] == 100


@pytest.mark.parametrize("changed", [{"position": -1}, {"position": 101}, {"position": None}, {"epoch": True}])
def test_a_state_that_names_no_place_is_refused(changed):
    (sampler,) = samplers(100, 1)
    with pytest.raises(CheckpointError, match=f"{next(iter(changed))}={next(iter(changed.values()))}"):
        sampler.load_state_dict(sampler.state_dict() | changed)
    assert len(sampler) == 100


def test_a_run_that_went_on_goes_on_again():
    (sampler,) = samplers(20, 1)
    order = list(sampler)
    sampler.load_state_dict(sampler.state_dict(consumed=5))
    iterator = iter(sampler)
    assert [next(iterator) for _ in range(4)] == order[5:9]
    assert sampler.state_dict()["position"] == 9


def test_what_the_ranks_do_not_divide_is_left_out_where_asked():
    parts = [list(sampler) for sampler in samplers(101, 8, drop_last=True)]
    assert {len(part) for part in parts} == {12}
    assert len(set(together(parts))) == 96
    assert sorted(len(list(sampler)) for sampler in samplers(3, 8)) == [0] * 5 + [1] * 3


def test_torchs_repeats_samples_to_fill_up():
    data = TensorDataset(torch.arange(5))
    theirs = [index for rank in range(2) for index in TorchSampler(data, 2, rank, seed=0)]
    ours = [index for sampler in samplers(data, 2) for index in sampler]
    assert len(theirs) == 6
    assert sorted(ours) == list(range(5))


def test_a_data_loader_reads_by_it():
    data = TensorDataset(torch.arange(11))
    (sampler,) = samplers(data, 1)
    order = list(sampler)
    batches = [batch.tolist() for (batch,) in DataLoader(data, batch_size=4, sampler=sampler)]
    assert [index for batch in batches for index in batch] == order


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        sw.DistributedSampler(4, num_replicas=2, rank=2)
    with pytest.raises(ConfigError, match="of 0 samples"):
        sw.DistributedSampler([], num_replicas=2, rank=0)
    with pytest.raises(ConfigError, match="given together"):
        sw.DistributedSampler(4, rank=0)
    (sampler,) = samplers(4, 1)
    with pytest.raises(CheckpointError, match="num_samples=5, this run has 4"):
        sampler.load_state_dict({"seed": 0, "num_samples": 5, "epoch": 0, "position": 0})


def test_without_ranks_it_is_one_process():
    assert sorted(sw.DistributedSampler(6)) == list(range(6))
