"""Other libraries' spellings of a plan and of a unit: the same training, said once."""

from __future__ import annotations

import contextlib
import functools
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

import shardwise as sw
from shardwise.fsdp import attach, notice
from shardwise.spec.errors import PlanError
from shardwise.testing import run_on_ranks
from tests.ranks.oracle import Block, Chain, sample


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(sample(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return sw.full_state_dict(model)


def build() -> nn.Module:
    torch.manual_seed(0)
    return Chain()


def spell_plans():
    fsdp1 = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    spellings = {
        "ddp": [("ddp", {}), (None, {"strategy": "NO_SHARD"}), (fsdp.ShardingStrategy.NO_SHARD, {})],
        "zero3": [
            ("zero3", {"auto_wrap_policy": fsdp1}),
            (None, {"strategy": fsdp.ShardingStrategy.FULL_SHARD, "auto_wrap_policy": sw.wrap_by_class({Block})}),
        ],
    }
    for strategy, given in spellings.items():
        policy = sw.wrap_by_class({Block}) if strategy == "zero3" else "auto"
        expected = trained(sw.parallelize(build(), sw.ParallelPlan(strategy=strategy, auto_wrap_policy=policy)))
        for plan, fields in given:
            model = sw.parallelize(build(), plan, **fields)
            assert attach.runtime_of(model, "test").row == sw.ParallelPlan(strategy=strategy).placements
            for name, tensor in trained(model).items():
                assert torch.equal(tensor, expected[name])
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        notice._told.clear()
        for _ in range(2):
            sw.parallelize(build(), strategy="zero3", auto_wrap_policy=fsdp1)
    for wrong, message in (
        (lambda: sw.parallelize(build(), sw.ParallelPlan(), strategy="ddp"), "got a plan and strategy beside it"),
        (lambda: sw.parallelize(build(), "zero3", strategy="ddp"), "got a plan and strategy beside it"),
        (lambda: sw.parallelize(build(), strateg="ddp"), "Did you mean 'strategy'"),
    ):
        with pytest.raises(PlanError, match=message):
            wrong()
    return said.getvalue()


def test_a_plan_may_be_a_name_or_fields_and_hold_objects_of_torchs_fsdp():
    said, _ = run_on_ranks(spell_plans, 2)
    assert said.count("torch's transformer_auto_wrap_policy is wrap_by_class({Block}) here") == 1
    assert said.count("the plan is sw.ParallelPlan(strategy='zero3', auto_wrap_policy=") == 1


def spell_units():
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for mp_policy in (policy, sw.PrecisionPolicy(param_dtype="bf16", reduce_dtype="fp32")):
        model = build()
        for child in model.modules():
            if isinstance(child, Block):
                sw.fully_shard(child, mp_policy=mp_policy, offload_policy=fsdp.OffloadPolicy())
        found.append(trained(sw.fully_shard(model, mp_policy=mp_policy)))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_units_take_the_policies_of_fsdp2():
    run_on_ranks(spell_units, 2)
