"""Norms and checks of gradients that see one rank's part only: refused with the call to make, never a number."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import shardwise as sw
from shardwise.engine.storage.attachment import attachment_of
from shardwise.engine.storage.part import Part
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
    before = [p.grad.clone() for p in model.parameters()]
    for clip in (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False),
        lambda: [torch.nn.utils.clip_grad_norm_(p, 1.0) for p in list(model.parameters())[:0:-1]],
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=math.inf),
        lambda: torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]),
        lambda: [p.grad.norm() for p in model.parameters()],
    ):
        with pytest.raises(StateError, match=r"sw\.clip_grad_norm\(model, max_norm\)"):
            clip()
    after = [p.grad for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    norm = sw.clip_grad_norm(model, 1.0)
    torch.optim.AdamW(model.parameters()).step()
    for p in model.parameters():  # also after a step, which sees plain tensors
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
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    with pytest.raises(StateError, match=r"sw\.clip_grad_norm"):
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
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
def test_a_step_with_a_closure_is_the_backward_and_then_the_step():
    makers = (
        lambda model: torch.optim.AdamW(model.parameters(), fused=True),
        lambda model: torch.optim.AdamW(model.parameters(), foreach=True),
        lambda model: sw.Muon(sw.muon_groups(model)),
    )

    def two_steps(make: Callable[[nn.Module], torch.optim.Optimizer], *, by_keyword: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = sw.parallelize(Chain(), sw.ParallelPlan(strategy="zero3"))
        optimizer = make(model)

        def closure() -> float:
            optimizer.zero_grad()
            loss = model(sample(torch.distributed.get_rank(), 0)).square().mean()
            loss.backward()
            assert all(isinstance(p, Part) for p in model.parameters())
            assert all(isinstance(p.grad, Part) for p in model.parameters() if p.grad is not None)
            sw.clip_grad_norm(model, 0.1)
            return loss.item()

        for _ in range(2):
            if by_keyword:
                assert optimizer.step(closure=closure) > 0
            else:
                closure()
                optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    for make in makers:
        assert all(map(torch.equal, two_steps(make, by_keyword=True), two_steps(make, by_keyword=False)))


@on_ranks(2)
def test_hooks_around_a_step_see_parts_wherever_they_are_registered():
    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        (parameter,) = (p for p in optimizer.param_groups[0]["params"][:1])
        with pytest.raises(StateError, match=r"sw\.clip_grad_norm"):
            parameter.grad.norm()
        norms.append(sw.clip_grad_norm([parameter], float("inf")))  # as the message says

    for flat in (False, True):
        norms: list[torch.Tensor] = []
        model = model_with_gradients()
        optimizer = torch.optim.AdamW(sw.flat_parameters(model) if flat else model.parameters())
        trained = [p for p in optimizer.param_groups[0]["params"] if p.grad is not None]
        optimizer.param_groups[0]["params"] = trained
        hooks = [
            register(look)
            for register in (
                optimizer.register_step_pre_hook,
                optimizer.register_step_post_hook,
                register_optimizer_step_pre_hook,
                register_optimizer_step_post_hook,
            )
        ]
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for _ in range(2):  # in the first step the hooks are older than ours
            optimizer.step()
        for hook in hooks:
            hook.remove()
        assert len(norms) == 8
        assert min(norms) == max(norms) > 0


class Raises(torch.optim.SGD):
    """Raises inside its step."""

    def step(self, closure=None):
        raise ZeroDivisionError


@on_ranks(2)
def test_nothing_of_parts_keeps_a_deleted_model_alive():
    sw.declare_elementwise(Raises)
    model = model_with_gradients()
    shards = list(model.parameters())
    engine, alive = weakref.ref(attachment_of(model).engine), weakref.ref(model)
    parts, average = [p.grad * 2 for p in shards], torch.zeros(64)
    average[: parts[0].shape.numel()] = parts[0].view(-1)
    with contextlib.suppress(StateError):
        parts[0].norm()
    optimizers = [torch.optim.AdamW(shards), Raises(shards)]
    optimizers[0].step()
    with contextlib.suppress(ZeroDivisionError):
        optimizers[1].step()  # its parameters stay plain
    parameters = [weakref.ref(p) for p in shards]
    del model, shards
    gc.collect()
    assert alive() is None
    assert engine() is None
    del optimizers
    gc.collect()
    assert not any(parameter() is not None for parameter in parameters)
    with pytest.raises(StateError, match="a part of gradients"):  # of nobody any more
        parts[0].norm()


@on_ranks(2)
def test_parameters_are_parts_again_in_the_forward_after_a_step_that_raised():
    model = model_with_gradients()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer._init_group = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    with torch.no_grad():
        model(sample(torch.distributed.get_rank(), 0))
    for p in model.parameters():
        for made in (p, p.grad):
            with pytest.raises(StateError, match=r"sw\.(clip_grad_norm|full_parameters)"):
                made.norm()


@on_ranks(2)
def test_what_works_element_by_element_passes_and_parts_stay_parts():
    model = model_with_gradients()
    for p in model.parameters():
        for made in (p.grad.clone(), p.grad * 2, p.grad.detach(), p.grad.data, copy.deepcopy(p.grad), p.data, p * 2):
            with pytest.raises(StateError, match=r"of .*'.*' \(logical shape \["):
                made.norm()
        with pytest.raises(StateError, match="pickling"):
            torch.save(p.grad, io.BytesIO())
        p.grad.mul_(0.5)
        p.grad.clamp_(-1, 1)
        p.grad.masked_fill_(p.grad.abs() < 1e-3, 0.0)
        repr(p.grad)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
    compiled = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled.step()
    compiled.zero_grad(set_to_none=False)


def logged_by_others(model: nn.Module) -> dict[str, object]:
    """What trainers and scripts compute of gradients and parameters, as in reports of their users."""
    grads = [p.grad for p in model.parameters()]
    return {
        "Lightning's grad_norm": lambda: torch.stack([g.data.norm(2) for g in grads]).norm(2),
        "joined": lambda: torch.cat([g.detach().flatten() for g in grads]).norm(),
        "squares": lambda: sum((g**2).sum() for g in grads) ** 0.5,
        "largest": lambda: max(g.abs().max() for g in grads),
        "finite": lambda: all(torch.isfinite(g).all() for g in grads),
        "centralized": lambda: [g.add_(-g.mean(dim=tuple(range(1, g.dim())), keepdim=True)) for g in grads],
        "weights": lambda: [p.norm() for p in model.parameters()],
        "adaptive": lambda: [p.detach().norm() / p.grad.norm() for p in model.parameters()],
        "initialised": lambda: [nn.init.xavier_uniform_(p) for p in model.parameters() if p.dim() > 1],
    }


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
@on_ranks(2)
def test_numbers_and_decisions_of_one_rank_are_the_plain_models_or_refused(strategy):
    model, plain = model_with_gradients(strategy), Chain()
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    for what, call in logged_by_others(model).items():
        if strategy == "ddp":  # this rank has all of it
            assert type(next(model.parameters())) is nn.Parameter
            call()
        else:
            with pytest.raises(StateError, match=r"sw\.(clip_grad_norm|full_parameters)"):
                call()
            assert what
    if strategy != "ddp":
        with sw.full_parameters(model, writeback=True):
            weights = [p for p in model.parameters() if p.dim() > 1]
            assert all(type(p) is nn.Parameter for p in weights)
            torch.manual_seed(1)
            for p in weights:
                nn.init.xavier_uniform_(p)
            norms = [p.norm() for p in weights]
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())
        with sw.full_parameters(model):
            assert torch.equal(torch.stack([p.norm() for p in model.parameters() if p.dim() > 1]), torch.stack(norms))


@on_ranks(2)
def test_what_users_do_to_shards_by_hand_trains_as_on_whole_parameters():
    model, plain, rank = model_with_gradients(), Chain(), torch.distributed.get_rank()
    torch.manual_seed(0)
    plain = Chain()
    averages = [p.detach().clone() for p in model.parameters()]
    expected = [p.detach().clone() for p in plain.parameters()]
    for p, average in zip(model.parameters(), averages, strict=True):
        p.data.mul_(0.5)
        p.data.add_(torch.where(p.data > 0, torch.ones_like(p), -torch.ones_like(p)), alpha=0.1)
        average.lerp_(p.detach(), 0.25)
    torch._foreach_lerp_(averages, [p.detach() for p in model.parameters()], 0.25)
    for p, average in zip(plain.parameters(), expected, strict=True):
        p.data.mul_(0.5)
        p.data.add_(torch.where(p.data > 0, 1.0, -1.0), alpha=0.1)
        average.lerp_(p.detach(), 0.25).lerp_(p.detach(), 0.25)
    with torch.no_grad():
        assert torch.allclose(model(sample(rank, 0)), plain(sample(rank, 0)))
    for p, average in zip(model.parameters(), averages, strict=True):
        p.data.copy_(average.cpu())
    with sw.full_parameters(model):
        for p, average in zip(model.parameters(), expected, strict=True):
            assert torch.allclose(p, average)


def double(gradient: torch.Tensor) -> None:
    gradient.mul_(2)


def replace(gradient: torch.Tensor) -> None:
    gradient.data = gradient.data * 2


@on_ranks(2)
def test_a_gradient_that_is_pointed_at_other_memory_counts_as_one_changed_in_place():
    """``p.grad.data = x``, in microbatches that are added up, with zero_grad() after forward, and with flat tensors."""

    def train(change: Callable[[torch.Tensor], None], strategy: str, *, is_flat: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))
        optimizer = torch.optim.SGD(sw.flat_parameters(model) if is_flat else model.parameters(), lr=0.1)
        found = []
        for step in range(4):
            for salt in range(2):
                loss = model(sample(torch.distributed.get_rank(), step, salt=salt)).square().mean()
                if not salt:
                    optimizer.zero_grad(set_to_none=step != 2)
                loss.backward()
                for parameter in list(model.parameters())[::2]:
                    if parameter.grad is not None:
                        change(parameter.grad)
            found.append(sw.clip_grad_norm(model, 1.0))
            optimizer.step()
        return [*found, *sw.full_state_dict(model).values()]

    for strategy in ("ddp", "zero3"):
        for is_flat in (False, True):
            expected, found = (train(change, strategy, is_flat=is_flat) for change in (double, replace))
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), (strategy, is_flat)
