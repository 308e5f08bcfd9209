"""What looks at a part of a model, or at parameters outside of forward: the plain model's number, or an error."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.spec.errors import StateError
from shardwise.testing import run_on_ranks
from tests.common.ranks import on_ranks

STRATEGIES = ("ddp", "zero2", "zero3")


class Scaled(nn.Module):
    """A block with a one-dimensional parameter that a method reads outside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.rescale(self.inner(x).relu())

    def rescale(self, x: Tensor) -> Tensor:
        return x * self.scale


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Scaled() for _ in range(5)))


def batch(rank: int) -> Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))


def gradients_of_plain() -> nn.Sequential:
    plain = build()
    for rank in range(dist.get_world_size()):
        (plain(batch(rank)).square().mean() / dist.get_world_size()).backward()
    return plain


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_the_norm_of_a_unit_is_that_of_its_own_gradients_which_alone_are_clipped(strategy):
    plain = gradients_of_plain()
    wrap = sw.wrap_by_class({Scaled})
    model = sw.parallelize(build(), sw.ParallelPlan(strategy=strategy, auto_wrap_policy=wrap, merge_units=False))
    model(batch(dist.get_rank())).square().mean().backward()
    whole = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert torch.allclose(sw.clip_grad_norm(model, float("inf")), whole, rtol=1e-6)
    limit = 0.5 * float(torch.nn.utils.clip_grad_norm_(plain[1].parameters(), float("inf")))
    before = [p.grad.clone() for p in model[0].parameters() if p.grad is not None]
    norm = sw.clip_grad_norm(model[1], limit)
    assert torch.allclose(norm, torch.nn.utils.clip_grad_norm_(plain[1].parameters(), limit), rtol=1e-6)
    assert all(
        torch.equal(a, p.grad) for a, p in zip(before, model[0].parameters(), strict=False) if p.grad is not None
    )
    whole = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert torch.allclose(sw.clip_grad_norm(model, float("inf")), whole, rtol=1e-6)


@on_ranks(2)
def test_sums_that_wait_are_not_clipped():
    model = sw.parallelize(build(), sw.ParallelPlan(strategy="ddp"))
    with sw.gradient_sync(model, False):
        model(batch(0)).square().mean().backward()
    with pytest.raises(StateError, match=r"sw.clip_grad_norm\(\) came before .* were reduced"):
        sw.clip_grad_norm(model, 1.0)


def penalise(strategy):
    model = sw.parallelize(build(), sw.ParallelPlan(strategy=strategy))
    loss = model(batch(dist.get_rank())).square().mean() + sum(p.square().sum() for p in model.parameters())
    if strategy == "ddp":
        loss.backward()
        return float(loss.detach())
    with pytest.raises(StateError, match=r"a gradient came for this rank's shard of '.*' \(logical shape"):
        loss.backward()
    model.zero_grad()
    model(batch(dist.get_rank())).square().mean().backward()  # the step after it is like any other
    norm = torch.nn.utils.get_total_norm([p.grad for p in gradients_of_plain().parameters()])
    assert torch.allclose(sw.clip_grad_norm(model, 1.0), norm, rtol=1e-6)
    return None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_penalty_on_shards_is_refused_in_its_backward(strategy):
    losses = run_on_ranks(penalise, 2, strategy)
    if strategy == "ddp":
        plain = build()
        with torch.no_grad():
            expected = [
                float(plain(batch(rank)).square().mean() + sum(p.square().sum() for p in plain.parameters()))
                for rank in range(2)
            ]
        assert losses == expected


@on_ranks(2)
def test_a_method_that_computed_with_a_shard_is_refused_in_its_backward():
    model = sw.parallelize(build(), sw.ParallelPlan(strategy="zero3"))
    x = batch(dist.get_rank())[:, : model[2].scale.shape[-1]]
    with pytest.raises(StateError, match=r"shard of '2.scale' \(logical shape \[64\]\)"):
        model[2].rescale(x).sum().backward()
