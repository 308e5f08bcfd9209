"""Norms and checks of gradients that see one rank's part only: refused with the call to make, never a number."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.spec.errors import StateError
from shardwise.testing import run_on_ranks
from tests.common.oracle import Chain, sample
from tests.common.ranks import on_ranks

SPLIT = ("zero1", "zero2", "shard_grad_op", "zero3")


def model_with_gradients(strategy: str = "zero3", **fields: object) -> nn.Module:
    torch.manual_seed(0)
    model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy, **fields))
    model(sample(torch.distributed.get_rank(), 0)).square().mean().backward()
    return model


def clip_by_torch(strategy):
    model = model_with_gradients(strategy)
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for clip in (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False),
        lambda: [torch.nn.utils.clip_grad_norm_(p, 1.0) for p in list(model.parameters())[:0:-1]],
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=math.inf),
        lambda: torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]),
        lambda: [p.grad.norm() for p in model.parameters() if p.grad is not None],
    ):
        with pytest.raises(StateError, match=r"sw\.clip_grad_norm\(model, max_norm\)"):
            clip()
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    norm = sw.clip_grad_norm(model, 1.0)
    torch.optim.AdamW(model.parameters()).step()
    for p in model.parameters():  # also after a step, which sees plain tensors
        if p.grad is not None:
            with pytest.raises(StateError, match=r"sw\.clip_grad_norm\(model, max_norm\)"):
                torch.nn.utils.clip_grad_norm_(p, 1.0)
    return float(norm)


@pytest.mark.parametrize("strategy", SPLIT)
def test_torchs_clipping_is_refused_on_every_rank_and_changes_nothing(strategy):
    norms = run_on_ranks(clip_by_torch, 3, strategy)
    assert len(set(norms)) == 1


@on_ranks(2)
def test_torchs_clipping_of_flat_parameters_is_refused():
    torch.manual_seed(0)
    model = sw.parallelize(Chain(), sw.ParallelPlan(strategy="zero3"))
    optimizer = torch.optim.AdamW(sw.flat_parameters(model))
    model(sample(torch.distributed.get_rank(), 0)).square().mean().backward()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    with pytest.raises(StateError, match=r"sw\.clip_grad_norm"):
        torch.nn.utils.clip_grad_norm_(held, 1.0)
    optimizer.step()


@pytest.mark.parametrize("how", [{}, {"fused": True}], ids=["plain", "fused"])
@on_ranks(2)
def test_torchs_gradient_scaler_is_refused_before_it_decides_for_one_rank(how):
    model = model_with_gradients()
    optimizer = torch.optim.AdamW(model.parameters(), **how)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for p in model.parameters()]
    for call in (scaler.unscale_, scaler.step):
        scaler.scale(torch.ones(()))  # makes the scaler's tensors
        with pytest.raises(StateError, match=r"sw\.GradScaler\(\)"):
            call(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    scaler = sw.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("axis", ["tp", "pp"])
@on_ranks(2)
def test_replicas_of_parts_of_a_model_are_not_clipped_by_torch(axis):
    torch.manual_seed(0)
    model = sw.models.gpt("gpt-tiny", num_layers=2)
    model = sw.parallelize(model, sw.ParallelPlan(strategy="ddp", **{axis: 2}))
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    sw.train_step(model, (tokens, tokens))
    with pytest.raises(StateError, match=r"sw\.clip_grad_norm"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


class Lars(torch.optim.SGD):
    """Reads norms inside its step, of parameters that are whole on their rank."""

    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad / p.grad.norm().clamp(min=1e-6), alpha=-0.01)


@on_ranks(2)
def test_an_optimizer_may_look_at_norms_of_what_its_rank_has_whole():
    sw.declare_granularity(Lars, "tensor")
    model = model_with_gradients(granularity="tensor")
    optimizer = Lars(model.parameters(), lr=0.1)
    optimizer.step()
    with pytest.raises(StateError, match=r"sw\.clip_grad_norm"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def closure():  # as Lightning's: it clips inside of the optimizer's step
        model(sample(torch.distributed.get_rank(), 0)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    with pytest.raises(StateError, match=r"sw\.clip_grad_norm"):
        optimizer.step(closure)


@on_ranks(2)
def test_what_works_element_by_element_passes_and_gives_plain_tensors():
    model = model_with_gradients()
    for p in model.parameters():
        if p.grad is None:
            continue
        for made in (p.grad.clone(), p.grad * 2, p.grad.detach(), torch.zeros_like(p.grad), copy.deepcopy(p.grad)):
            assert type(made) is torch.Tensor
        stored = io.BytesIO()
        torch.save(p.grad, stored)
        stored.seek(0)
        assert torch.equal(torch.load(stored), p.grad)
        p.grad.mul_(0.5)
        p.grad.clamp_(-1, 1)
        repr(p.grad)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
    compiled = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled.step()
    compiled.zero_grad(set_to_none=False)
