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


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_norms_of_models_modules_and_parameters_are_those_of_the_plain_ones(strategy):
    plan = sw.ParallelPlan(strategy=strategy)
    plains = [gradients_of_plain(), gradients_of_plain()]
    for p in plains[1].parameters():
        p.grad *= 3
    models = [sw.parallelize(build(), plan), sw.parallelize(build(), plan)]
    for factor, model in zip((1, 3), models, strict=True):
        (factor * model(batch(dist.get_rank())).square().mean()).backward()
    parts = {
        "two models": lambda both: both,
        "a module that is not a unit": lambda both: both[0][1].inner,
        "parameters": lambda both: [p for p in both[0].parameters() if p.dim() > 1],
        "one parameter": lambda both: both[1][4].scale,
        "modules of two models": lambda both: [both[0][0], both[1][2]],
    }
    for what, part_of in parts.items():
        for order in (2.0, 1.0, 3.0, float("inf")):
            part = part_of(plains)
            listed = [part] if isinstance(part, (nn.Module, Tensor)) else part
            grads = [p.grad for each in listed for p in (each.parameters() if isinstance(each, nn.Module) else [each])]
            expected = torch.nn.utils.get_total_norm(grads, norm_type=order)
            norm = sw.clip_grad_norm(part_of(models), float("inf"), norm_type=order)
            assert torch.allclose(norm, expected, rtol=1e-5), (what, order)
    optimizer = torch.optim.SGD(sw.flat_parameters(models[0], decay=lambda _, p: p.dim() > 1), lr=0.1)
    matrices = torch.nn.utils.get_total_norm([p.grad for p in plains[0].parameters() if p.dim() > 1])
    assert torch.allclose(sw.clip_grad_norm(optimizer.param_groups[0]["params"], float("inf")), matrices, rtol=1e-5)
    limit = 0.5 * float(torch.nn.utils.get_total_norm([p.grad for p in both_parameters(plains)]))
    torch.nn.utils.clip_grad_norm_(both_parameters(plains), limit)
    sw.clip_grad_norm(models, limit)
    for model, plain in zip(models, plains, strict=True):
        expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        assert torch.allclose(sw.clip_grad_norm(model, float("inf")), expected, rtol=1e-5)
    with pytest.raises(StateError, match=r"norm_type=0\): expected"):
        sw.clip_grad_norm(models, 1.0, norm_type=0)
    with pytest.raises(StateError, match="shape \\[3\\] that is in no parallelized model"):
        sw.clip_grad_norm([nn.Parameter(torch.ones(3))], 1.0)
    with pytest.raises(StateError, match="a Linear that is a part of a parallelized model"):
        sw.full_state_dict(models[0][1].inner)
    first = next(p for p in models[0].parameters() if p.grad is not None and p.grad.numel())
    if dist.get_rank() == 0 or strategy == "ddp":  # of which every rank has the same
        first.grad.fill_(float("nan"))
    with pytest.raises(StateError, match="norm of the gradients is nan; nothing was scaled"):
        sw.clip_grad_norm(models, 1.0, error_if_nonfinite=True)
    assert sw.clip_grad_norm(models[0], float("inf"), norm_type=float("inf")).isnan()


def both_parameters(models: list[nn.Sequential]) -> list[nn.Parameter]:
    return [p for model in models for p in model.parameters()]


@on_ranks(2)
def test_sums_that_wait_are_not_clipped():
    model = sw.parallelize(build(), sw.ParallelPlan(strategy="ddp"))
    with sw.gradient_sync(model, False):
        model(batch(0)).square().mean().backward()
    with pytest.raises(StateError, match=r"sw.clip_grad_norm\(\) came before .* were reduced"):
        sw.clip_grad_norm(model, 1.0)


def penalise(strategy):
    model = sw.parallelize(build(), sw.ParallelPlan(strategy=strategy))
    loss = model(batch(dist.get_rank())).square().mean()
    if strategy == "ddp":
        loss = loss + sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return float(loss.detach())
    with pytest.raises(StateError, match=r"(?s)sum of '.*' \(logical shape .*full_parameters"):
        sum(p.square().sum() for p in model.parameters())
    penalty = sum(_Sum.apply(p) for p in model.parameters())  # hidden from what a part refuses
    with pytest.raises(StateError, match=r"a gradient came for this rank's shard of '.*' \(logical shape"):
        (loss + penalty).backward()
    model.zero_grad()
    model(batch(dist.get_rank())).square().mean().backward()  # the step after it is like any other
    norm = torch.nn.utils.get_total_norm([p.grad for p in gradients_of_plain().parameters()])
    assert torch.allclose(sw.clip_grad_norm(model, 1.0), norm, rtol=1e-6)
    return None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter: Tensor) -> Tensor:
        ctx.like = parameter.detach()
        return torch.zeros(())

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return torch.ones_like(ctx.like)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_penalty_on_shards_is_refused(strategy):
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
def test_a_method_that_computes_with_a_shard_is_refused():
    model = sw.parallelize(build(), sw.ParallelPlan(strategy="zero3"))
    for x in (batch(dist.get_rank()), batch(dist.get_rank())[:, : model[2].scale.shape[-1]]):
        with pytest.raises(StateError, match=r"(?s)'2.scale' \(logical shape \[64\]\).*sw\.") as caught:
            model[2].rescale(x)
        assert "\n  Comput" in str(caught.value)
