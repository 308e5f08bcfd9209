"""What is left behind when something ends early: a forward, a backward, an accumulation."""

import contextlib
import io
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing import probe, run_on_ranks


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)])


class Interrupt(nn.Module):
    def forward(self, _x: Tensor) -> Tensor:
        raise KeyboardInterrupt


def interrupt_a_forward(strategy: str) -> tuple[bool, int]:
    plain, model = build(), sw.parallelize(build(), sw.ParallelPlan(strategy=strategy))
    x, shards = torch.ones(2, 4), list(model.parameters())
    tanh, model[2][1] = model[2][1], Interrupt()
    with pytest.raises(KeyboardInterrupt):
        model(x)
    model[2][1] = tanh
    for parameter in shards:
        parameter.data.mul_(0.5)
    for parameter in plain.parameters():
        parameter.data.mul_(0.5)
    loss = model(x).sum()
    loss.backward()
    return torch.equal(loss, plain(x).sum()), probe(model).units[0].num_open_forwards


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_after_an_interrupted_forward_the_next_one_sees_the_parameters_of_its_time(strategy: str) -> None:
    assert run_on_ranks(interrupt_a_forward, 2, strategy) == [(True, 0)] * 2


def step_too_early() -> tuple[str, bool]:
    model = sw.parallelize(build(), sw.ParallelPlan(strategy="ddp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sw.gradient_sync(model, False):
        model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(sw.StateError) as error:
        optimizer.step()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return str(error.value), all(p.grad is not None for p in model.parameters())


def test_a_step_before_the_sums_are_reduced_is_refused() -> None:
    ((message, works),) = run_on_ranks(step_too_early, 1)
    assert message.startswith("optimizer.step() came before")
    assert works


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: object, _grad: Tensor) -> Tensor:
        raise ValueError("no gradient today")


def fail_inside_an_accumulation() -> str:
    model = sw.parallelize(build(), sw.ParallelPlan(strategy="ddp"))
    x = torch.ones(2, 4)
    with sw.gradient_sync(model, False):
        model(x).sum().backward()
        hook = model[1].register_forward_hook(lambda _m, _a, output: Fails.apply(output))
        with pytest.raises(ValueError, match="no gradient today"):
            model(x).sum().backward()
        hook.remove()
    with pytest.raises(sw.StateError) as error:
        model(x)
    model.zero_grad()
    model(x).sum().backward()
    return str(error.value)


def test_sums_that_a_failed_backward_took_with_it_are_told() -> None:
    (message,) = run_on_ranks(fail_inside_an_accumulation, 1)
    assert "the sums of the earlier microbatches are lost" in message


def look_at_the_state_while_unsharded() -> tuple[list[str], torch.Size]:
    module = sw.fully_shard(nn.Sequential(nn.Linear(4, 4)))
    module.unshard()
    return list(sw.full_state_dict(module)), module(torch.ones(2, 4)).shape


def test_a_full_state_dict_leaves_an_unsharded_module_as_it_was() -> None:
    assert run_on_ranks(look_at_the_state_while_unsharded, 1) == [(["0.weight", "0.bias"], torch.Size([2, 4]))]


class Pair(NamedTuple):
    inputs: Tensor
    targets: Tensor


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (self.inner(inputs) - targets).square().mean()


def step_on_a_named_tuple() -> tuple[bool, int]:
    model = sw.parallelize(WithLoss(), sw.ParallelPlan(strategy="ddp"))
    batch = Pair(torch.ones(4, 4), torch.zeros(4, 4))
    with sw.gradient_sync(model, False), sw.record_collectives(model) as events:
        sw.train_step(model, batch, num_microbatches=2)
    inside = [event.kind for event in events if event.unit == "root"]
    sw.train_step(model, batch, num_microbatches=2)
    return model.inner.weight.grad is not None, len(inside)


def test_a_train_step_cuts_named_tuples_and_honours_an_accumulation_around_it() -> None:
    assert run_on_ranks(step_on_a_named_tuple, 1) == [(True, 0)]


def name_two_plans_of_one_strategy() -> list[str]:
    plans = [sw.ParallelPlan(), sw.ParallelPlan(auto_wrap_policy="none")]
    batch = (torch.ones(4, 4), torch.zeros(4, 4))
    report = sw.parity(WithLoss, [batch], None, plans)
    return [row.plan for row in report.rows]


def test_parity_shows_every_plan() -> None:
    assert run_on_ranks(name_two_plans_of_one_strategy, 1) == [["zero3", "zero3 (2)"]]


def tell_an_alias() -> str:
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        for _ in range(2):
            sw.parallelize(build(), sw.ParallelPlan(strategy="FULL_SHARD"))
        sw.parallelize(build(), sw.ParallelPlan(strategy="zero3"))
    return told.getvalue()


def test_an_alias_is_translated_once() -> None:
    assert run_on_ranks(tell_an_alias, 1) == ["shardwise: strategy 'FULL_SHARD' is 'zero3' here\n"]


def overlap() -> str:
    with pytest.raises(sw.PlanError) as error:
        sw.parallelize(build(), sw.ParallelPlan(auto_wrap_policy=sw.wrap_by_name("*", "0")))
    return str(error.value)


def test_patterns_that_overlap_are_refused() -> None:
    assert "'0' overlaps an earlier pattern, both match '0'" in run_on_ranks(overlap, 1)[0]
