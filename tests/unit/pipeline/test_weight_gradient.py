"""Weights of linear layers get the very gradients that autograd gives, when they are asked for."""

from __future__ import annotations

import copy

import torch
from torch import nn

from shardwise.pipeline.weight_gradient import Deferral, WeightGradients


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
    deferral = Deferral(model.modules())
    microbatches = [torch.randn(2, 3, 6, requires_grad=True) for _ in range(3)]
    left = []
    for x in microbatches:
        mine = x.detach().requires_grad_()
        collects = WeightGradients()
        with deferral.to(collects):
            loss = model(mine)
        loss.backward()
        left.append(collects)
        plain(x).backward()
        assert torch.equal(mine.grad, x.grad)
    assert model.first.weight.grad is None
    assert torch.equal(model.first.bias.grad, plain.first.bias.grad)
    assert torch.equal(model.norm.weight.grad, plain.norm.weight.grad)
    for collects in left:
        collects.compute()
    assert torch.equal(model.first.weight.grad, plain.first.weight.grad)


def test_without_a_place_to_collect_gradients_are_autograds():
    plain = Twice()
    model = copy.deepcopy(plain)
    deferral = Deferral(model.modules())
    x = torch.randn(4, 6)
    for each in (plain, model):
        each(x).backward()
    assert torch.equal(model.first.weight.grad, plain.first.weight.grad)
    assert deferral.current is None
