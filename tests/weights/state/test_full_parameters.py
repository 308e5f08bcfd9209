"""Whole parameters inside a context: reading, changing, computing, and what is refused there."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.spec.errors import StateError
from shardwise.testing import StorageCount, probe, run_on_ranks
from tests.common import models
from tests.common.oracle import PRESETS, Chain, compare_each, plain_loss, presets, sample
from tests.common.ranks import on_ranks, refusal

WORLDS = pytest.mark.parametrize("world", [1, 2, 3])


def same_state(got, expected, where):
    assert list(got) == list(expected), where
    for name, value in expected.items():
        assert torch.equal(got[name], value), f"{where}: {name}"


def looks_plain(name):
    plain = models.build(name)
    expected = plain.state_dict()
    for strategy in presets():
        model = models.build(name)
        before = dict(model.named_parameters())
        sw.parallelize(model, sw.ParallelPlan(strategy=strategy, auto_wrap_policy=models.wrap_policy(name)))
        shards = {key: (p.shape, p.data_ptr()) for key, p in model.named_parameters()}
        with sw.full_parameters(model):
            same_state(model.state_dict(), expected, f"{name}, {strategy}")
            for key, parameter in plain.named_parameters():
                mine = model.get_parameter(key)
                assert mine is before[key]
                assert mine.shape == parameter.shape
                assert mine.stride() == parameter.stride()
                assert torch.equal(mine.norm(), parameter.norm())
            ours = nn.utils.parameters_to_vector(p.contiguous() for p in model.parameters())
            assert torch.equal(ours, nn.utils.parameters_to_vector(p.contiguous() for p in plain.parameters()))
        assert {key: (p.shape, p.data_ptr()) for key, p in model.named_parameters()} == shards


@WORLDS
def test_inside_the_model_shows_what_the_plain_one_holds(world):
    for name in ("gpt", "tied", "odd", "frozen"):
        run_on_ranks(looks_plain, world, name)


# -- changes


def clamp(model, step):
    """The same change on either side: a limit on weights, as in weight clipping."""
    is_plain = "_shardwise" not in model.__dict__
    targets = (model, model.blocks[1]) if step % 2 else (model.blocks[2].up, model.stem)
    for target in targets:
        if is_plain:
            _clamp(target)
        else:
            with sw.full_parameters(target, writeback=True):
                _clamp(target)


@torch.no_grad()
def _clamp(module):
    for parameter in module.parameters():
        limit = 0.9 * parameter.abs().max()
        parameter.clamp_(-limit, limit)


def drop(model, step):
    if "_shardwise" not in model.__dict__:
        return
    with sw.full_parameters(model.blocks[step % 5]), torch.no_grad():
        for parameter in model.blocks[step % 5].parameters():
            parameter.zero_()
    with pytest.raises(KeyError):
        _fail_inside(model)


@torch.no_grad()
def _fail_inside(model):
    with sw.full_parameters(model, writeback=True):
        for parameter in model.parameters():
            parameter.zero_()
        raise KeyError


def between_backward_and_step(model, rank, step):
    loss = plain_loss(model, rank, step)
    if "_shardwise" in model.__dict__:
        with sw.full_parameters(model):
            assert all(p.grad is None for p in model.parameters())
            assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in Chain().parameters())
    loss.backward()
    if "_shardwise" in model.__dict__:
        with sw.full_parameters(model):
            assert all(p.grad is None for p in model.parameters())
    yield loss


@on_ranks(1, 2, 3)
def test_changes_are_kept_with_writeback_and_dropped_without_or_after_an_exception():
    compare_each(Chain, plain_loss, between=clamp)
    compare_each(Chain, plain_loss, between=drop)
    compare_each(Chain, between_backward_and_step)


@on_ranks(2)
def test_where_ranks_change_differently_rank_0s_values_win():
    rank = dist.get_rank()
    states = {}
    for strategy in PRESETS:
        model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))
        with sw.full_parameters(model, writeback=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(rank + 5)
        with sw.full_parameters(model):
            states[strategy] = {value for p in model.parameters() for value in p.unique().tolist()}
        with sw.full_parameters(model.stem, writeback=True, rank0_only=True), torch.no_grad():
            if rank == 0:
                model.stem.weight.fill_(7)
        with sw.full_parameters(model):
            assert bool((model.stem.weight == 7).all())
            assert bool((model.head.weight == 5).all())
    assert states == {strategy: {5.0} for strategy in PRESETS}


@on_ranks(2)
def test_values_may_be_set_by_data_and_by_load_state_dict():
    for strategy in PRESETS:
        model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))
        vector = torch.arange(sum(p.numel() for p in Chain().parameters()), dtype=torch.float32)
        with sw.full_parameters(model, writeback=True):
            nn.utils.vector_to_parameters(vector, model.parameters())
        with sw.full_parameters(model):
            assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), vector)
        with sw.full_parameters(model, writeback=True):
            model.load_state_dict(Chain().state_dict())
        with sw.full_parameters(model):
            same_state(model.state_dict(), Chain().state_dict(), strategy)


# -- parts, ranks, memory


@on_ranks(2)
def test_a_part_of_a_model_is_shown_by_its_units():
    model = sw.parallelize(Chain())
    whole = dict(Chain().named_parameters())
    with sw.record_collectives(model) as events, sw.full_parameters(model.blocks[3].up):
        shown = {key for key, p in model.named_parameters() if p.shape == whole[key].shape}
        assert "blocks.3.up.weight" in shown
        assert "blocks.3.down.weight" in shown  # of the same unit
        assert "blocks.2.up.weight" not in shown
        assert torch.equal(model.blocks[3].up.weight, whole["blocks.3.up.weight"])
        with pytest.raises(StateError, match="would give slices"):
            model.blocks[2].state_dict()
        model.blocks[3].state_dict()
        x = sample(0, 0)
        with torch.no_grad():  # the part by itself, which outside is a StateError
            assert torch.equal(model.blocks[3].up(x), Chain().blocks[3].up(x))
            assert torch.equal(model(x), Chain()(x))
    numel = probe(model).units[4].padded_numel
    assert (events[0].kind, events[0].unit, events[0].sent_bytes) == ("all_gather", "blocks.3", numel // 2 * 4)
    assert "blocks.3" not in [event.unit for event in events[1:]]


@on_ranks(2)
def test_with_rank0_only_the_other_ranks_keep_shards():
    rank = dist.get_rank()
    for strategy in PRESETS:
        model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))
        shapes = [p.shape for p in model.parameters()]
        with sw.full_parameters(model, rank0_only=True, offload_to_cpu=True):
            if rank == 0:
                same_state(model.state_dict(), Chain().state_dict(), strategy)
            else:
                assert [p.shape for p in model.parameters()] == shapes
            with pytest.raises(StateError, match="without rank0_only"), torch.no_grad():
                model(sample(rank, 0))
            with pytest.raises(StateError, match="is whole on rank 0 only"), sw.full_parameters(model.stem):
                pass
        plain_loss(model, rank, 0).backward()


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@on_ranks(2)
def test_memory_is_that_of_the_parameters_and_given_back(strategy):
    model = sw.parallelize(models.build("gpt"), sw.ParallelPlan(strategy=strategy))
    models_bytes = sum(p.nbytes for p in models.build("gpt").parameters())
    count = StorageCount("cpu")
    count.see_all_objects()
    before = count.live_bytes
    with count:
        with sw.full_parameters(model):
            inside = count.live_bytes - before
        after = count.live_bytes - before
    count.forget()
    inside = inside / models_bytes
    assert 1 <= inside < 1.2
    assert after == 0


# -- computing


@on_ranks(1, 2)
def test_a_forward_inside_computes_with_the_changed_values_and_sends_nothing():
    rank = dist.get_rank()
    x = sample(rank, 0)
    for strategy in presets():
        for policy in (None, sw.PrecisionPolicy(param_dtype="bf16")):
            model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy, mp_policy=policy))
            for step in range(2):
                plain_loss(model, rank, step).backward()
            expected = sw.parallelize(Chain(), sw.ParallelPlan(strategy="ddp", mp_policy=policy))
            with sw.full_parameters(expected, writeback=True), torch.no_grad():
                expected.stem.weight.mul_(2)
                expected.blocks[1].up.bias.add_(1)
            with torch.no_grad():
                wanted, before = expected(x), model(x)
            with sw.full_parameters(model), torch.no_grad():
                model.stem.weight.mul_(2)
                with sw.record_collectives(model) as events:
                    model(x)
                    model.blocks[1].up.bias.add_(1)
                    assert torch.equal(model(x), wanted), strategy
                    model.head(x.to(wanted.dtype))
                assert events == []
            with torch.no_grad():
                assert torch.equal(model(x), before), strategy


@on_ranks(2)
def test_a_backward_after_a_forward_inside_is_refused():
    """A forward inside replaces what a backward of an earlier forward would need."""
    model = sw.parallelize(Chain())
    loss = plain_loss(model, 0, 0)
    with sw.full_parameters(model), torch.no_grad():
        model.stem.weight.mul_(2)
        model(sample(0, 0))
    with pytest.raises(StateError, match="parameters have changed since"):
        loss.backward()


# -- what is refused


def refusals():
    texts = {}

    def note(name, attempt):
        texts[name] = refusal(StateError, attempt)

    rank = dist.get_rank()
    model = sw.parallelize(Chain())
    optimizer = torch.optim.AdamW(model.parameters())
    plain_loss(model, rank, 0).backward()

    def enter(**options):
        with sw.full_parameters(model, **options):
            pass

    with sw.full_parameters(model):
        note("train", lambda: plain_loss(model, rank, 0))
        note("step", optimizer.step)
        note("clip", lambda: sw.clip_grad_norm(model, 1.0))
        note("full_state_dict", lambda: sw.full_state_dict(model))
        note("save", lambda: sw.save("/nonexistent", model))
        note("writeback in one without", lambda: enter(writeback=True))
        note("deepcopy", lambda: copy.deepcopy(model))
        with sw.full_parameters(model):
            pass
        assert model.stem.weight.shape == (8, 8)

    def in_forward(*_):
        enter()

    handle = model.blocks[1].register_forward_hook(in_forward)
    note("in forward", lambda: plain_loss(model, rank, 0))
    handle.remove()
    x = sample(rank, 0).requires_grad_()
    y = model(x)
    y.register_hook(in_forward)
    note("in backward", lambda: y.sum().backward())
    optimizer.zero_grad()

    def train_inside():
        with sw.full_parameters(model):
            model.stem.weight.square().sum().backward()

    note("gradient", train_inside)

    def replace():
        with sw.full_parameters(model, writeback=True):
            if rank == 1:
                model.stem.weight = nn.Parameter(torch.zeros(8, 8))

    note("replaced on one rank", replace)

    def reshape():
        with sw.full_parameters(model, writeback=True):
            model.stem.bias.data = torch.zeros(3)

    note("reshaped", reshape)
    note("plain", lambda: sw.full_parameters(nn.Linear(2, 2)).__enter__())
    plain_loss(model, rank, 0).backward()  # all of it has left the model in order
    return texts


def test_refusals_are_clear_and_leave_the_model_in_order():
    for texts in run_on_ranks(refusals, 2):
        assert "Train outside of it; inside, use torch.no_grad()" in texts["train"]
        assert texts["step"].startswith("optimizer.step() inside sw.full_parameters()")
        for call in ("clip", "full_state_dict", "save"):
            assert "works on shards, but sw.full_parameters() shows whole parameters now" in texts[call]
        assert "Give the outer one writeback=True." in texts["writeback in one without"]
        assert texts["in forward"].startswith("sw.full_parameters() was called inside a forward or backward")
        assert texts["in backward"].startswith("sw.full_parameters() was called inside a forward or backward")
        assert "a gradient for 'stem.weight' arrived inside" in texts["gradient"]
        assert "parameter 'stem.weight' was replaced by another object" in texts["replaced on one rank"]
        assert "'stem.bias' became [3] torch.float32, from [8] torch.float32" in texts["reshaped"]
        assert "is not parallelized" in texts["plain"]


@on_ranks(2)
def test_it_works_on_models_of_fully_shard():
    model = Chain()
    for block in model.blocks:
        sw.fully_shard(block)
    sw.fully_shard(model)
    with sw.full_parameters(model):
        same_state(model.state_dict(), Chain().state_dict(), "fully_shard")
    model.blocks[0].unshard()
    with pytest.raises(StateError, match=r"Call its reshard\(\) first"), sw.full_parameters(model):
        pass
    model.blocks[0].reshard()
    with sw.full_parameters(model.blocks[0]):
        assert model.blocks[0].up.weight.shape == (13, 8)
