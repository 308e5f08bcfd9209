"""Objects of torch's FSDP1 and FSDP2 in a plan."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import wrap

import shardwise as sw
from shardwise.spec.errors import PlanError


class Block(nn.Module):
    """A class to wrap."""


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (fsdp.ShardingStrategy.FULL_SHARD, "zero3"),
        (fsdp.ShardingStrategy.SHARD_GRAD_OP, "shard_grad_op"),
        (fsdp.ShardingStrategy.NO_SHARD, "ddp"),
        (fsdp.ShardingStrategy.HYBRID_SHARD, "hsdp"),
        (fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2, "hybrid_shard_grad_op"),
    ],
)
def test_sharding_strategies_are_the_strategies_of_their_names(given, meant):
    plan = sw.ParallelPlan(strategy=given)
    assert plan.strategy == meant
    assert plan.notes == (f"torch's ShardingStrategy is '{meant}' here",)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (
            functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
            sw.wrap_by_class({Block}),
        ),
        (wrap.ModuleWrapPolicy({Block}), sw.wrap_by_class({Block})),
        (functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=20_000), sw.wrap_by_size(20_000)),
        (wrap.size_based_auto_wrap_policy, sw.wrap_by_size(100_000_000)),
    ],
)
def test_wrap_policies_choose_the_same_modules(given, meant):
    plan = sw.ParallelPlan(auto_wrap_policy=given)
    assert plan.auto_wrap_policy == meant
    assert plan.notes[0].endswith(f"is {meant} here")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (fsdp.MixedPrecision(), sw.PrecisionPolicy(None, None)),
        (fsdp.MixedPrecision(param_dtype=torch.bfloat16), sw.PrecisionPolicy("bf16", "bf16")),
        (
            fsdp.MixedPrecision(torch.float16, torch.float32, torch.float16, cast_root_forward_inputs=False),
            sw.PrecisionPolicy("fp16", "fp32", buffer_dtype="fp16", cast_forward_inputs=False),
        ),
        (
            fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32),
            sw.PrecisionPolicy("bf16", "fp32", output_dtype="fp32"),
        ),
        (
            fsdp.MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False),
            sw.PrecisionPolicy("bf16", "bf16", cast_forward_inputs=False),
        ),
    ],
)
def test_precision_policies_keep_their_meaning(given, meant):
    assert sw.ParallelPlan(mp_policy=given).mp_policy == meant


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (fsdp.CPUOffload(offload_params=True), sw.OffloadPolicy()),
        (fsdp.CPUOffload(), None),
        (fsdp.CPUOffloadPolicy(pin_memory=False), sw.OffloadPolicy(pin_memory=False)),
        (fsdp.OffloadPolicy(), None),
    ],
)
def test_offload_policies_keep_their_meaning(given, meant):
    assert sw.ParallelPlan(offload_policy=given).offload == meant


def test_what_has_no_counterpart_is_refused_with_what_to_use():
    with pytest.raises(PlanError, match="torch's CustomPolicy has no counterpart here"):
        sw.ParallelPlan(auto_wrap_policy=wrap.CustomPolicy(lambda _: False))
    with pytest.raises(PlanError, match=r"lambda_auto_wrap_policy has no counterpart here.\n.*sw.wrap_by_name"):
        sw.ParallelPlan(auto_wrap_policy=functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda _: True))
    with pytest.raises(PlanError, match="keep_low_precision_grads=True"):
        sw.ParallelPlan(mp_policy=fsdp.MixedPrecision(keep_low_precision_grads=True))


def test_a_plan_without_them_has_nothing_to_say():
    assert sw.ParallelPlan(strategy="FULL_SHARD").notes == ()
