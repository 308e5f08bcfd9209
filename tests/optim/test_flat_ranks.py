"""Flat tensors for the optimizer: the numbers, the checkpoints and the skipped parameters of one over names."""

from __future__ import annotations

import copy
import gc
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.engine.storage import flat_parameters
from shardwise.engine.storage.flat_parameters import FlatParameter
from shardwise.spec.errors import StateError
from shardwise.testing import optimizer_state, probe, run_on_ranks
from tests.common.oracle import (
    PRESETS,
    Block,
    Chain,
    compare,
    compare_each,
    descend,
    even,
    even_loss,
    plain_loss,
    sample,
)
from tests.common.own import own
from tests.common.ranks import on_ranks


def is_matrix(_name, parameter):
    return parameter.dim() >= 2


def two_groups(model):
    """By name what ``sw.flat_parameters(model, is_matrix)`` is in flat tensors."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if is_matrix(name, p)]},
        {"params": [p for name, p in named if not is_matrix(name, p)], "weight_decay": 0.0},
    ]


def flat_groups(model):
    return sw.flat_parameters(model, decay=is_matrix)


def num_flat(optimizer) -> int:
    return sum(isinstance(p, FlatParameter) for settings in optimizer.param_groups for p in settings["params"])


# -- numbers

IMPLEMENTATIONS = (
    lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, foreach=False),
    lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, foreach=True),
    lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, amsgrad=True, foreach=True),
    lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=False),
    lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1, foreach=True),
)
OTHERS = (
    lambda p: torch.optim.Adagrad(p, lr=1e-2),
    lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    torch.optim.Adadelta,
    lambda p: torch.optim.Adamax(p, lr=1e-2),
    lambda p: torch.optim.NAdam(p, lr=1e-2),
    lambda p: torch.optim.RAdam(p, lr=1e-2),
    lambda p: torch.optim.Rprop(p, lr=1e-2),
    lambda p: torch.optim.ASGD(p, lr=1e-2),
)


@on_ranks(2, pytest.param(3, marks=pytest.mark.long), timeout_s=120)
def test_every_elementwise_optimizer_is_bitwise_in_two_weight_decay_groups():
    for make in IMPLEMENTATIONS:
        compare_each(Chain, plain_loss, optimizer=make, parameters=two_groups, given=flat_groups)
    for make in OTHERS if dist.get_world_size() == 2 else ():
        compare(Chain, plain_loss, "zero3", optimizer=make, given=sw.flat_parameters, steps=3)


@on_ranks(2)
def test_a_gradient_that_the_caller_holds_stays_what_it_was():
    """As surgery on gradients holds them over ``zero_grad()`` and the next backward."""
    for strategy in ("ddp", "zero3"):
        model = sw.parallelize(even(), sw.ParallelPlan(strategy=strategy))
        optimizer = torch.optim.SGD(sw.flat_parameters(model), lr=1e-2)
        kept: list[list[torch.Tensor]] = []
        for step in range(3):
            even_loss(model, dist.get_rank(), step).backward()
            grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
            kept += [grads, [grad.to_local().clone() if hasattr(grad, "to_local") else grad.clone() for grad in grads]]
            optimizer.zero_grad()
        for grads, copies in zip(kept[::2], kept[1::2], strict=True):
            for grad, before in zip(grads, copies, strict=True):
                assert torch.equal(grad.to_local() if hasattr(grad, "to_local") else grad, before), strategy


@on_ranks(2)
def test_fused_is_bitwise_where_no_parameter_ends_in_a_tail():
    compare_each(
        even,
        even_loss,
        ("ddp", "zero3"),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        given=sw.flat_parameters,
        auto_wrap_policy=sw.wrap_by_class({nn.Linear}),
    )


@on_ranks(2)
def test_rates_of_groups_schedulers_accumulation_and_both_kinds_of_zero_grad():
    """Two groups with rates of their own, changed by a scheduler; gradients that are kept as zeros."""
    rank = dist.get_rank()
    found = {}
    for is_flat in (False, True):
        model = sw.parallelize(Chain(), sw.ParallelPlan(strategy="zero2"))
        optimizer = torch.optim.AdamW(flat_groups(model) if is_flat else two_groups(model), lr=1e-2)
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 1 / (step + 1)])
        for step in range(4):
            plain_loss(model, rank, step).backward()
            plain_loss(model, rank, 7 + step).backward()  # adds up
            for parameter in list(model.parameters())[::3]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * 0.5  # another tensor than the engine's
            sw.clip_grad_norm(model, 0.01)
            optimizer.step()
            rates.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            assert len(grads) == 0 if step % 2 == 0 else not any(own(grad).any() for grad in grads)
        found[is_flat] = sw.full_state_dict(model)
    assert all(torch.equal(value, found[True][name]) for name, value in found[False].items())


# -- parameters without a gradient


class Branching(nn.Module):
    """Each step uses other parameters of its blocks, the same ones on all ranks, or not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Paths() for _ in range(5))

    def forward(self, x, route):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, route)
        return x


class Paths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(8, 8)
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)

    def forward(self, x, route):
        y = self.common(x)
        return x + torch.tanh({"left": self.left, "right": self.right, "none": nn.Identity()}[route](y))


ROUTES = ("left", "left", "none", "right", "left", "right")


def by_step(model, rank, step):
    return model(sample(rank, step), ROUTES[step]).square().mean()


def by_rank(model, rank, step):
    return model(sample(rank, step), ROUTES[(step + rank) % 3]).square().mean()


@on_ranks(1, 2, timeout_s=120)
def test_a_parameter_that_went_unused_is_skipped_as_by_name():
    for script in (by_step, by_rank):
        for make in IMPLEMENTATIONS[1:4:2]:
            found = compare_each(Branching, script, optimizer=make, parameters=two_groups, given=flat_groups, steps=6)
            assert all(num_flat(trained.optimizer) < 2 * 6 for trained in found.values())


@on_ranks(1)
def test_without_the_split_the_unused_parameters_differ():
    with mock.patch.object(FlatParameter, "is_partial", False), pytest.raises(AssertionError, match="blocks"):
        compare(Branching, by_step, "zero3", given=sw.flat_parameters, steps=6)


@on_ranks(1)
def test_a_split_is_for_good_and_shares_the_state():
    model = sw.parallelize(Branching(), sw.ParallelPlan(strategy="zero3"))
    optimizer = torch.optim.AdamW(sw.flat_parameters(model), lr=1e-2)
    counts = []
    params = optimizer.param_groups[0]["params"]
    for step in (0, 1, 3):
        by_step(model, 0, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(num_flat(optimizer))
        assert optimizer.param_groups[0]["params"] is params  # whoever holds the list sees it
        assert set(optimizer.state) <= set(params)
    storages = {v.untyped_storage().data_ptr() for s in optimizer.state.values() for v in s.values() if v.dim()}
    num_storages, num_params = len(storages), len(params)
    assert counts == [1, 1, 1]  # the root's; those of the blocks were split in the first step: "right" was not used
    assert num_params == 1 + 5 * 6
    assert num_storages <= 2 + 5 * 2 * 6


@on_ranks(2)
def test_a_parameter_that_is_frozen_later_stays_as_it_is():
    rank = dist.get_rank()
    found = {}
    for is_flat in (False, True):
        model = sw.parallelize(Chain(), sw.ParallelPlan(strategy="zero3"))
        optimizer = torch.optim.AdamW(sw.flat_parameters(model) if is_flat else model.parameters(), lr=1e-2)
        for step in range(4):
            if step == 2:
                model.blocks[1].up.weight.requires_grad_(requires_grad=False)
            plain_loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[is_flat] = sw.full_state_dict(model)
    assert all(torch.equal(value, found[True][name]) for name, value in found[False].items())


# -- checkpoints

STORED = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


def train(model, optimizer, script, first, last):
    descend(optimizer, (script(model, dist.get_rank(), step) for step in range(first, last)))


@pytest.mark.parametrize(
    ("source", "target", "is_flat"),
    [
        ("zero3", "ddp", True),
        ("zero1", "zero3", False),
        pytest.param("ddp", "zero3", False, marks=pytest.mark.long),
        pytest.param("zero2", "zero3", True, marks=pytest.mark.long),
    ],
)
@on_ranks(2, timeout_s=120)
def test_state_moves_between_flat_and_by_name_under_any_strategy(tmp_path, source, target, is_flat):
    """Train four steps; or two, save, load the other way (flat or by name), and two more."""
    different = {}
    given = {True: flat_groups, False: two_groups}
    for name, make in STORED.items():
        for build, script in ((Chain, plain_loss), (Branching, by_step)):
            plan = sw.ParallelPlan(strategy=source)
            whole = sw.parallelize(build(), plan)
            train(whole, make(two_groups(whole)), script, 0, 4)
            expected = sw.full_state_dict(whole)
            model = sw.parallelize(build(), plan)
            optimizer = make(given[is_flat](model))
            train(model, optimizer, script, 0, 2)
            path = f"{tmp_path}/{name}-{build.__name__}"
            sw.save(path, model, optimizer)
            model = sw.parallelize(build(), sw.ParallelPlan(strategy=target))
            optimizer = make(given[not is_flat](model))
            train(model, optimizer, script, 3, 4)  # has state of its own, and is split already
            sw.load(path, model, optimizer)
            train(model, optimizer, script, 2, 4)
            got = sw.full_state_dict(model)
            wrong = [key for key, value in expected.items() if not torch.equal(value, got[key])]
            if wrong:
                different[name, build.__name__] = wrong
    assert different == {}


def saved(folder, is_flat):
    model = sw.parallelize(Chain(), sw.ParallelPlan(strategy="zero3"))
    optimizer = STORED["adamw"](flat_groups(model) if is_flat else two_groups(model))
    train(model, optimizer, lambda m, _rank, step: plain_loss(m, 0, step), 0, 2)
    sw.save(folder, model, optimizer, state={"step": 2})


def loaded(folder, is_flat):
    model = sw.parallelize(Chain(), sw.ParallelPlan(strategy="zero1"))
    optimizer = STORED["adamw"](flat_groups(model) if is_flat else two_groups(model))
    assert sw.load(folder, model, optimizer) == {"step": 2}
    states = optimizer_state(optimizer)
    return {
        (shard.name, key): (shard.start, value.flatten().clone() if value.dim() else value.item())
        for shard in probe(model).shards
        for key, value in states.get(shard.parameter, {}).items()
    }, num_flat(optimizer)


def test_a_flat_checkpoint_is_that_of_names_on_another_number_of_ranks(tmp_path):
    for is_flat in (False, True):
        run_on_ranks(saved, 3, f"{tmp_path}/{is_flat}", is_flat)
    found = {}
    for wrote in (False, True):
        for reads in (False, True):
            found[wrote, reads] = run_on_ranks(loaded, 2, f"{tmp_path}/{wrote}", reads)
    for (_, reads), ranks in found.items():
        for (state, count), (expected, _) in zip(ranks, found[False, False], strict=True):
            assert (count > 0) == reads
            assert state.keys() == expected.keys()
            for key, (start, value) in expected.items():
                assert state[key][0] == start
                assert torch.equal(torch.as_tensor(state[key][1]), torch.as_tensor(value)), key


# -- what it is


def shape_of_groups():
    rank = dist.get_rank()
    found = {}
    for strategy in PRESETS:
        model = sw.parallelize(Chain(lambda: Block(32, 64), dim=32), sw.ParallelPlan(strategy=strategy))
        one, two = sw.flat_parameters(model), flat_groups(model)
        assert [set(group) for group in one] == [{"params"}]
        assert [set(group) for group in two] == [{"params"}, {"params", "weight_decay"}]
        assert two[1]["weight_decay"] == 0.0
        all_decay = sw.flat_parameters(model, decay=lambda _name, _parameter: True)
        none_decay = sw.flat_parameters(model, decay=lambda _name, _parameter: False)
        assert [len(all_decay), len(none_decay)] == [1, 1]
        assert "weight_decay" not in all_decay[0]
        assert none_decay[0]["weight_decay"] == 0.0
        found[strategy] = [len(group["params"]) for group in two], len(one[0]["params"])
        odd = sw.flat_parameters(model, decay=lambda name, _parameter: name.endswith("weight") and "up" in name)
        numel = sum(shard.shape.numel() for shard in model.parameters())
        flats = [p for group in odd for p in group["params"] if isinstance(p, FlatParameter)]
        assert sum(part.numel() for p in flats for part in p.views_in(p)) == numel, rank
    return found


def test_one_tensor_per_unit_and_group_because_matrices_are_neighbours():
    """pytorch#134191: an optimizer over one tensor per parameter takes a third of the step."""
    for found in run_on_ranks(shape_of_groups, 1):
        for strategy, (two, one) in found.items():
            assert two == [6, 6], strategy
            assert one == 6, strategy
    for found in run_on_ranks(shape_of_groups, 2):
        for two, one in found.values():
            assert max(two) <= 6
            assert one <= 6


def known_everywhere():
    model = sw.parallelize(nn.Linear(2, 2), sw.ParallelPlan(strategy="zero3"))
    optimizer = torch.optim.AdamW(sw.flat_parameters(model), lr=1e-2)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return num_flat(optimizer), probe(model).num_updates


def test_the_optimizer_is_known_to_be_the_models_on_ranks_that_hold_nothing():
    assert run_on_ranks(known_everywhere, 3) == [(1, 1), (1, 1), (0, 1)]  # the bias is the second rank's


class Stranger(torch.optim.SGD):
    """A subclass that nobody vouched for."""


def refusals():
    texts = {}
    for strategy in ("ddp", "zero3"):
        model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))
        groups = sw.flat_parameters(model)
        plain_loss(model, 0, 0).backward()
        with pytest.raises(StateError) as caught:
            Stranger(groups, lr=0.1).step()
        texts[strategy] = str(caught.value)
        optimizer = torch.optim.SGD(groups, lr=0.1)
        for args, kwargs in (((lambda: None,), {}), ((), {"closure": lambda: None})):
            with pytest.raises(StateError, match=r"SGD.step\(closure\) with flat parameters"):
                optimizer.step(*args, **kwargs)
        for copied in (groups[0]["params"][0], optimizer):
            with pytest.raises(StateError, match="cannot be copied"):
                copy.deepcopy(copied)
        optimizer.step(None)
    with pytest.raises(StateError, match=r"sw.flat_parameters got a Chain that is not parallelized"):
        sw.flat_parameters(Chain())
    return texts


def test_what_looks_beyond_an_element_is_refused_even_under_ddp():
    for text in run_on_ranks(refusals, 1)[0].values():
        assert text.startswith("Stranger is not known to work element by element, but sw.flat_parameters() gave it")
        assert "Build it on model.parameters()" in text


@on_ranks(1)
def test_the_optimizer_does_not_keep_the_model_alive():
    model = sw.parallelize(Chain(), sw.ParallelPlan(strategy="zero3"))
    optimizer = torch.optim.AdamW(sw.flat_parameters(model), lr=1e-2)
    train(model, optimizer, plain_loss, 0, 2)
    engine = probe(model).weak_references()
    gc.disable()
    del model
    was_freed = all(reference() is None for reference in engine)
    gc.enable()
    optimizer.step()  # nothing has a gradient any longer
    optimizer.zero_grad()
    assert was_freed


def state_bytes(strategy):
    """Of the optimizer's state: held, predicted."""
    model = sw.parallelize(Chain(lambda: Block(8, 61)), sw.ParallelPlan(strategy=strategy))
    optimizer = torch.optim.AdamW(flat_groups(model), lr=1e-2)
    train(model, optimizer, plain_loss, 0, 1)
    measured = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    return measured, probe(model).predicted_bytes()["optimizer"]


@on_ranks(1, 3)
def test_bytes_of_state_are_the_closed_form_padding_inside_a_range_included():
    found = {strategy: state_bytes(strategy) for strategy in PRESETS}
    for strategy, (measured, predicted) in found.items():
        assert measured == predicted, strategy


def test_an_optimizer_of_other_parameters_is_left_alone():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    flat_parameters.before_step(optimizer)
    assert optimizer.param_groups[0]["params"] == [parameter]
