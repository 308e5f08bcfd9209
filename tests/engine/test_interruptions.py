"""What is left behind when something ends early: a forward, a backward, an accumulation."""

import contextlib
import io
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing import probe
from tests.common.ranks import on_ranks, refusal


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)])


class Interrupt(nn.Module):
    def forward(self, _x: Tensor) -> Tensor:
        raise KeyboardInterrupt


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
@on_ranks(2)
def test_after_an_interrupted_forward_the_next_one_sees_the_parameters_of_its_time(strategy: str) -> None:
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
    assert (torch.equal(loss, plain(x).sum()), probe(model).units[0].num_open_forwards) == (True, 0)


@pytest.mark.parametrize("is_root_next", [True, False])
@on_ranks(2)
def test_after_an_interrupted_part_of_the_model_the_next_forward_sees_the_parameters_of_its_time(
    is_root_next: bool,
) -> None:
    plain, model = build(), sw.parallelize(build(), sw.ParallelPlan(strategy="zero3"))
    x, optimizers = torch.ones(2, 4), [torch.optim.SGD(each.parameters(), lr=0.5) for each in (plain, model)]
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        each(x).sum().backward()
        tanh, each[2][1] = each[2][1], Interrupt()
        with pytest.raises(KeyboardInterrupt):
            each[2](x)
        each[2][1] = tanh
        optimizer.step()
    if not is_root_next:
        assert torch.equal(model[2](x), plain[2](x))
    assert torch.equal(model(x), plain(x))


@on_ranks(1)
def test_a_step_before_the_sums_are_reduced_is_refused() -> None:
    model = sw.parallelize(build(), sw.ParallelPlan(strategy="ddp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sw.gradient_sync(model, False):
        model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(sw.StateError) as error:
        optimizer.step()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    (message, works) = str(error.value), all(p.grad is not None for p in model.parameters())
    assert message.startswith("optimizer.step() came before")
    assert works


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: object, _grad: Tensor) -> Tensor:
        raise ValueError("no gradient today")


@on_ranks(1)
def test_sums_that_a_failed_backward_took_with_it_are_told() -> None:
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
    message = str(error.value)
    assert "the sums of the earlier microbatches are lost" in message


@on_ranks(1)
def test_a_full_state_dict_leaves_an_unsharded_module_as_it_was() -> None:
    module = sw.fully_shard(nn.Sequential(nn.Linear(4, 4)))
    module.unshard()
    assert (list(sw.full_state_dict(module)), module(torch.ones(2, 4)).shape) == (
        ["0.weight", "0.bias"],
        torch.Size([2, 4]),
    )


class Pair(NamedTuple):
    inputs: Tensor
    targets: Tensor


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (self.inner(inputs) - targets).square().mean()


@on_ranks(1)
def test_a_train_step_cuts_named_tuples_and_honours_an_accumulation_around_it() -> None:
    model = sw.parallelize(WithLoss(), sw.ParallelPlan(strategy="ddp"))
    batch = Pair(torch.ones(4, 4), torch.zeros(4, 4))
    with sw.gradient_sync(model, False), sw.record_collectives(model) as events:
        sw.train_step(model, batch, num_microbatches=2)
    inside = [event.kind for event in events if event.unit == "root"]
    sw.train_step(model, batch, num_microbatches=2)
    assert (model.inner.weight.grad is not None, len(inside)) == (True, 0)


@on_ranks(1)
def test_parity_shows_every_plan() -> None:
    plans = [sw.ParallelPlan(), sw.ParallelPlan(auto_wrap_policy="none")]
    batch = (torch.ones(4, 4), torch.zeros(4, 4))
    report = sw.parity(WithLoss, [batch], None, plans)
    assert [row.plan for row in report.rows] == ["zero3", "zero3 (2)"]


@on_ranks(1)
def test_an_alias_is_translated_once() -> None:
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        for _ in range(2):
            sw.parallelize(build(), sw.ParallelPlan(strategy="FULL_SHARD"))
        sw.parallelize(build(), sw.ParallelPlan(strategy="zero3"))
    assert stderr.getvalue() == "shardwise: strategy 'FULL_SHARD' is 'zero3' here\n"


@on_ranks(1)
def test_patterns_that_overlap_are_refused() -> None:
    assert "'0' overlaps an earlier pattern, both match '0'" in refusal(
        sw.PlanError, sw.parallelize, build(), sw.ParallelPlan(auto_wrap_policy=sw.wrap_by_name("*", "0"))
    )
