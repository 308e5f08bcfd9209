"""Weights of linear layers get the very gradients that autograd gives, when they are asked for."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.utils.parametrize
from torch import nn

from shardwise.parallel.pipeline.weight_grad_store import WeightGradStore


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(requires_grad=False)
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return self.second(self.norm(self.frozen(self.first(x)))).square().sum()


def test_weights_come_later_and_are_the_same_to_the_last_bit():
    plain, model = Twice(), Twice()
    store = WeightGradStore(model.modules())
    microbatches = [torch.randn(2, 3, 6, requires_grad=True) for _ in range(3)]
    for index, x in enumerate(microbatches):
        mine = x.detach().requires_grad_()
        with store.store_for((0, index)):
            loss = model(mine)
        loss.backward()
        plain(x).backward()
        assert torch.equal(mine.grad, x.grad)
    assert model.first.weight.grad is None
    assert model.first.bias.grad is None
    assert torch.equal(model.norm.weight.grad, plain.norm.weight.grad)
    for index in range(3):
        store.compute((0, index))
    assert torch.equal(model.first.weight.grad, plain.first.weight.grad)
    assert torch.equal(model.first.bias.grad, plain.first.bias.grad)
    assert not store._terms


def test_a_bias_that_is_added_after_the_layer_comes_later():
    store = WeightGradStore(())
    weight, bias = torch.randn(6, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    x = torch.randn(2, 3, 6, requires_grad=True)
    with store.store_for((0, 0)):
        total = store.linear(x, weight, None, is_transposed=True).clone()
        y = store.add(total, bias)
    y.square().sum().backward()
    found, x.grad = x.grad, None
    assert weight.grad is None
    assert bias.grad is None
    store.compute((0, 0), [bias, weight])
    late = weight.grad, bias.grad
    weight.grad = bias.grad = None
    ((x.reshape(-1, 6) @ weight).view(2, 3, 4) + bias).square().sum().backward()
    assert torch.equal(found, x.grad)
    assert torch.equal(late[0], weight.grad)
    assert torch.equal(late[1], bias.grad)


def test_a_model_may_write_to_what_a_layer_gives():
    layer, x = nn.Linear(6, 4), torch.randn(2, 3, 6, requires_grad=True)
    expected = torch.autograd.grad(layer(x).mul_(2).relu_().sum(), (x, layer.weight, layer.bias))
    store = WeightGradStore([layer])
    with store.store_for((0, 0)):
        loss = layer(input=x).mul_(2).relu_().sum()
    loss.backward()
    store.compute((0, 0))
    for found, wanted in zip((x.grad, layer.weight.grad, layer.bias.grad), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("computed", ["weight", "bias"])
def test_what_is_computed_from_other_parameters_gets_its_gradient_from_autograd(computed):
    class Half(nn.Module):
        def forward(self, parameter):
            return parameter / 2

    layer = nn.Linear(4, 4)
    torch.nn.utils.parametrize.register_parametrization(layer, computed, Half())
    store = WeightGradStore([layer])
    with store.store_for((0, 0)):
        loss = layer(torch.randn(2, 4)).square().sum()
    loss.backward()
    store.compute((0, 0))
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_without_a_key_gradients_are_autograds():
    plain = Twice()
    model = copy.deepcopy(plain)
    store = WeightGradStore(model.modules())
    x = torch.randn(4, 6)
    for each in (plain, model):
        each(x).backward()
    assert torch.equal(model.first.weight.grad, plain.first.weight.grad)
    assert not store._terms
