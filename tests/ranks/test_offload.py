"""Offload beside other things that one does with a model: units by hand, frozen parts, changes, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing import run_on_ranks
from tests.parity import models
from tests.parity.training import PRESETS
from tests.ranks.oracle import Block, Chain, compare, plain_loss, sample


def shard_by_hand(model: nn.Module) -> nn.Module:
    """Every second block is on the host, of one its optimizer's part alone."""
    policies: list[sw.OffloadPolicy | str] = ["cpu", "none", sw.OffloadPolicy(parameters=False), "none", "cpu"]
    for block, policy in zip(model.blocks, policies, strict=True):
        sw.fully_shard(block, offload_policy=policy)
    return sw.fully_shard(model)


def by_hand():
    trained = compare(Chain, plain_loss, parallelize=shard_by_hand)
    groups = [group for unit in sw.summary(trained.model).units for group in unit.groups]
    assert [group.is_offloaded for group in groups] == [False, True, False, True, False, True]
    shown = str(sw.summary(trained.model))
    assert shown.count(", on the host") == 3
    assert "before activations; " in shown
    assert len({id(group.transfers) for group in trained.runtime.groups if group.offload}) == 1


@pytest.mark.parametrize("world", [1, 2])
def test_fully_shard_offloads_unit_by_unit(world):
    run_on_ranks(by_hand, world)


class Adapted(Chain):
    """Three frozen blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[:3].requires_grad_(requires_grad=False)


def frozen_alone():
    policy = sw.OffloadPolicy(gradients=False, optimizer=False)
    trained = compare(Adapted, plain_loss, "zero3", offload_policy=policy)
    assert [bool(group.offload) for group in trained.runtime.groups] == [False, True, True, True, False, False]
    with pytest.raises(sw.PlanError, match="nothing to offload: there are no frozen parameters"):
        sw.parallelize(Chain(), sw.ParallelPlan(offload_policy=policy))


def test_frozen_shards_can_be_on_the_host_alone():
    run_on_ranks(frozen_alone, 2)


def double(model: nn.Module, _step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)


def look_then_train(model: nn.Module, rank: int, step: int) -> Tensor:
    """An evaluation between steps, and two forwards before one backward."""
    with torch.no_grad():
        model(sample(rank, step, salt=7))
    return (model(sample(rank, step)) * model(sample(rank, step, salt=1))).mean()


def change_between_steps():
    for strategy in PRESETS:
        for policy in ("cpu", sw.OffloadPolicy(parameters=False)):
            compare(Chain, look_then_train, strategy, steps=3, between=double, offload_policy=policy)


def test_changes_of_masters_on_the_host_are_seen_at_the_next_forward():
    run_on_ranks(change_between_steps, 2)


def measure_and_scale() -> list[list[Tensor]]:
    """With fp16 and a scaler, which reads gradients where they are."""
    found = []
    for policy in ("none", "cpu"):
        precision = sw.PrecisionPolicy(param_dtype="fp16", reduce_dtype="fp16")
        model = sw.parallelize(models.build("tied"), sw.ParallelPlan(mp_policy=precision, offload_policy=policy))
        optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-3), sw.GradScaler("cpu", growth_interval=2)
        for step in range(4):
            scaler.scale(model(*models.batch(step, 0, 0))).backward()
            scaler.unscale_(optimizer)
            sw.clip_grad_norm(model, 0.3)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append([*sw.full_state_dict(model).values(), torch.tensor(scaler.get_scale())])
    return found


def test_a_gradient_scaler_works_on_gradients_on_the_host():
    for plain, offloaded in run_on_ranks(measure_and_scale, 2):
        assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))


def refuse():
    with pytest.raises(sw.PlanError, match=r"parameters=True\) needs sharded parameters"):
        sw.parallelize(
            Chain(), sw.ParallelPlan(strategy="zero2", offload_policy=sw.OffloadPolicy(parameters=True, ratio=0.5))
        )
    with pytest.raises(sw.PlanError, match=r"ratio=0\.5: a ratio chooses among the units of a model"):
        sw.fully_shard(Block(), offload_policy=sw.OffloadPolicy(ratio=0.5))
    with pytest.raises(sw.PlanError, match="offload_policy='disk'"):
        sw.fully_shard(Block(), offload_policy="disk")
    with pytest.raises(sw.PlanError, match="nothing to offload: there are no parameters"):
        sw.fully_shard(nn.Sequential(nn.GELU()), offload_policy="cpu")


def test_what_means_nothing_is_refused():
    run_on_ranks(refuse, 1)


def fail_and_go_on():
    """A backward that raises on every rank leaves nothing under way."""
    model = sw.parallelize(Chain(), sw.ParallelPlan(offload_policy="cpu"))
    states = []
    for fails in (True, False):
        output = model(sample(0, 0))
        if fails:
            model.zero_grad()
            hook = output.register_hook(_raise)
            with pytest.raises(RuntimeError, match="in backward"):
                (output * 1.0).sum().backward()
            hook.remove()
        else:
            output.sum().backward()
            states = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    fresh = sw.parallelize(Chain(), sw.ParallelPlan(offload_policy="cpu"))
    fresh(sample(0, 0)).sum().backward()
    grads = [parameter.grad for parameter in fresh.parameters() if parameter.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(states, grads, strict=True))


def _raise(_grad: Tensor) -> None:
    raise RuntimeError("in backward")


def test_an_interrupted_backward_can_be_repeated():
    run_on_ranks(fail_and_go_on, 2)
