"""Derivatives otherwise than by one backward: of derivatives, by ``torch.func``, and with weights from outside."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

import shardwise as sw
from shardwise.spec.errors import StateError
from tests.common.oracle import PRESETS, Block, Chain, Waiting, compare_each, plain_loss, planned, sample
from tests.common.ranks import on_ranks, refusal


def with_slope(model: nn.Module, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """The model's outputs, and the gradient of their sum by its inputs."""
    x = sample(rank, step).requires_grad_()
    y = model(x)
    return y, torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def gradient_penalty(model, rank, step):
    y, slope = with_slope(model, rank, step)
    return y.square().mean() + (slope.norm(dim=1) - 1).square().mean()


def forces(model, rank, step):
    """The outputs have no part in the loss: no backward of theirs announces the gradients."""
    return with_slope(model, rank, step)[1].square().mean()


def forces_after_another_loss(model, rank, step):
    for each in (plain_loss, forces):
        loss = each(model, rank, step)
        loss.backward()
        yield loss


def tangent(model, rank, step):
    return jvp(model, (sample(rank, step),), (sample(rank, step, salt=1),))[1].square().mean()


def one_by_one(model, rank, step):
    return vmap(model)(sample(rank, step)).square().mean()


def slopes_one_by_one(model, rank, step):
    return vmap(grad(lambda x: model(x).square().sum()))(sample(rank, step)).square().mean()


def frozen_at_first(model, rank, step):
    """A parameter is watched from the first transform on that runs while it is trained."""
    model.requires_grad_(step > 0)
    model.head.requires_grad_(requires_grad=True)
    return forces(model, rank, step)


@on_ranks(2)
def test_second_derivatives_and_transforms_are_right_under_ddp():
    warnings.filterwarnings("ignore", "`torch.jit.script`")
    with planned(only=("ddp",), merge_units=False):
        for script in (gradient_penalty, forces, forces_after_another_loss, tangent, one_by_one, slopes_one_by_one):
            compare_each(Chain, script, steps=3)
        compare_each(Chain, frozen_at_first, steps=3)
        compare_each(lambda: Chain(num_blocks=0).head, forces, steps=2)


@on_ranks(2)
def test_a_pass_that_makes_a_graph_sends_nothing_and_refuses_an_older_forward():
    model = sw.parallelize(Chain(), sw.ParallelPlan(strategy="ddp"))
    with sw.record_collectives(model) as events:
        loss = gradient_penalty(model, 0, 0)
    assert not events
    loss.backward()
    x = sample(0, 1).requires_grad_()
    y = model(x).sum()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    message = refusal(StateError, torch.autograd.grad, y, x, create_graph=True)
    assert "that ran before the last optimizer.step()" in message


def derive(model: nn.Module, how: str) -> None:
    x = sample(0, 0)
    if how == "create_graph":
        with_slope(model, 0, 0)
    elif how == "jvp":
        jvp(model, (x,), (x,))
    elif how == "vmap":
        vmap(model)(x)
    else:
        grad(lambda x: model(x).sum())(x)


@on_ranks(2)
def test_elsewhere_they_are_refused_and_the_refusal_says_where_they_work():
    warnings.filterwarnings("ignore", "`torch.jit.script`")
    plain = Chain()
    for strategy in PRESETS[1:]:
        model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))
        for how in ("create_graph", "jvp", "vmap", "grad"):
            message = refusal(StateError, derive, model, how)
            what = "backward with create_graph=True" if how == "create_graph" else "a transform of torch.func"
            assert message.startswith(f"{what} reached unit 'root': the plan divides its parameters, or their")
            assert "Set strategy='ddp'" in message
            assert torch.equal(plain_loss(model, 0, 0), plain_loss(plain, 0, 0))
            plain_loss(model, 0, 0).backward()
            model.zero_grad()
    other = Chain()
    with sw.full_parameters(model):
        other.load_state_dict(model.state_dict())
    for how in ("create_graph", "jvp", "vmap", "grad"):  # as it advises
        derive(other, how)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@on_ranks(2)
def test_gradients_with_a_graph_are_refused_under_ddp():
    model = sw.parallelize(Chain(), sw.ParallelPlan(strategy="ddp"))
    message = refusal(StateError, plain_loss(model, 0, 0).backward, create_graph=True)
    assert re.match(r"loss.backward\(create_graph=True\) left gradients of unit '[^']+' that have a graph", message)
    assert "Call torch.autograd.grad(outputs, inputs, create_graph=True)" in message
    model.zero_grad()
    gradient_penalty(model, 0, 0).backward()


@on_ranks(2)
def test_derivatives_by_sharded_parameters_are_refused_in_favour_of_backward():
    for strategy in ("zero1", "zero3"):
        model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))
        x = sample(0, 0).requires_grad_()
        loss = model(x).square().mean()
        for inputs in (model.head.weight, [x, *model.parameters()]):
            message = refusal(StateError, torch.autograd.grad, loss, inputs, allow_unused=True, retain_graph=True)
            assert message.startswith("torch.autograd.grad() by parameters of a parallelized model")
            assert message.endswith("Call loss.backward(), and read .grad.")
        loss.backward()
        assert all(p.grad is not None or 0 in p.shape for p in model.parameters())


# -- weights from outside


def weights_of(*names: str) -> dict[str, Tensor]:
    return {
        name: (0.5 * value).requires_grad_()
        for name, value in Chain().state_dict().items()
        if not names or name in names
    }


def other_weights(model, rank, step):
    x = sample(rank, step)
    weights = weights_of()
    loss = functional_call(model, weights, (x,)).square().mean()
    yield Waiting([loss, *torch.autograd.grad(loss, list(weights.values()))])
    weights = weights_of("head.weight", "blocks.1.up.weight")
    own = dict(model.named_parameters())
    loss = functional_call(model, weights, (x,)).square().mean() + functional_call(model, own, (x,)).square().mean()
    loss = loss + plain_loss(model, rank, step)
    loss.backward()
    yield [loss, *(weight.grad for weight in weights.values())]


def of_several_calls(model, rank, step):
    """The unit runs twice in one call."""
    weights = weights_of("head.weight", "blocks.1.up.weight")

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + self.inner(2 * x)

    given = {f"inner.{name}": weight for name, weight in weights.items()}
    loss = functional_call(Twice(), given, (sample(rank, step),)).square().mean()
    loss.backward()
    yield [loss, *(weight.grad for weight in weights.values())]


@on_ranks(2, timeout_s=120.0)
def test_a_model_computes_with_the_weights_that_functional_call_gives_it():
    for script in (other_weights, of_several_calls):
        compare_each(Chain, script, steps=2, merge_units=False)


@on_ranks(2)
def test_parts_given_by_functional_call_are_refused_and_whole_values_as_advised_are_right():
    plain = Chain()
    expected = functional_call(plain, {name: 2 * value for name, value in plain.state_dict().items()}, (sample(0, 0),))
    for strategy in PRESETS:
        model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))
        if strategy != "ddp":
            parts = {name: 2 * p.detach() for name, p in model.named_parameters()}
            message = refusal(StateError, functional_call, model, parts, (sample(0, 0),))
            assert message.startswith("torch.func.functional_call() gave 'stem.weight' a value of shape")
            assert "model.state_dict() of `with sw.full_parameters(model):`" in message
        with sw.full_parameters(model):
            wholes = {name: 2 * value for name, value in model.state_dict().items()}
        assert torch.equal(functional_call(model, wholes, (sample(0, 0),)), expected)
        assert torch.equal(model(sample(0, 0)), plain(sample(0, 0)))


def replace(model: nn.Module, how: str) -> None:
    layer = model.blocks[1].up
    if how == "parameter":
        layer.weight = nn.Parameter(torch.ones(13, 8))
    elif how == "same shape":
        layer.weight = nn.Parameter(torch.ones_like(layer.weight))
    else:
        model.scale = nn.Parameter(model.scale.detach().clone())


class Scaled(Chain):
    def __init__(self) -> None:
        super().__init__(Block)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


@on_ranks(2)
def test_a_parameter_that_is_replaced_is_refused_by_the_next_forward_under_every_strategy():
    for strategy in PRESETS:
        for how, name in (
            ("parameter", "blocks.1.up.weight"),
            ("same shape", "blocks.1.up.weight"),
            ("one value", "scale"),
        ):
            model = sw.parallelize(Scaled(), sw.ParallelPlan(strategy=strategy, merge_units=False))
            plain_loss(model, 0, 0).backward()
            replace(model, how)
            refusal(StateError, plain_loss, model, 0, 1)
            message = refusal(StateError, plain_loss, model, 0, 1)  # by every further forward too
            assert message.startswith(f"parameter {name!r} was replaced or removed after sw.parallelize()")
            assert message.endswith("To give it other values, use sw.load_full_state_dict().")
    plain = Scaled()
    plain.blocks[1].up.weight = nn.Parameter(torch.ones(13, 8))
    model = sw.parallelize(Scaled())
    sw.load_full_state_dict(model, plain.state_dict())
    assert torch.equal(plain_loss(model, 0, 0), plain_loss(plain, 0, 0))
