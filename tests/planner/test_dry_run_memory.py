"""What the planner computes from a model's shape is what the engine's dry run allocates: one predictor, within 2%."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import shardwise as sw
from shardwise.cost.workload import Workload
from shardwise.planner.memory import memory_on

MODEL = {"num_layers": 6, "hidden": 256, "num_heads": 4, "vocab_size": 2048, "seq_len": 256, "tied": False}
FEW_WORDS = {**MODEL, "vocab_size": 64}
WORLD = 8

#: Model, plan, samples of a microbatch, microbatches, dtype.
CASES = [
    (MODEL, {"strategy": "ddp"}, 1, 1, "bf16"),
    (MODEL, {"strategy": "zero1"}, 1, 2, "bf16"),
    (MODEL, {"strategy": "zero2"}, 1, 1, "fp32"),
    (MODEL, {"strategy": "shard_grad_op"}, 1, 1, "bf16"),
    (MODEL, {"strategy": "hsdp", "dp_shard": 4}, 1, 1, "bf16"),
    (FEW_WORDS, {"strategy": "zero3"}, 4, 1, "bf16"),
    (FEW_WORDS, {"strategy": "zero3", "activation_checkpointing": "full"}, 4, 1, "bf16"),
    (FEW_WORDS, {"strategy": "zero3", "activation_checkpointing": "selective"}, 4, 1, "bf16"),
    (MODEL, {"strategy": "zero3", "offload_policy": "cpu"}, 1, 1, "bf16"),
    (MODEL, {"strategy": "zero3", "reshard_after_forward": 2}, 1, 1, "bf16"),
    (FEW_WORDS, {"strategy": "zero3", "tp": 2, "sequence_parallel": True}, 4, 1, "bf16"),
    (FEW_WORDS, {"strategy": "zero3", "cp": 2}, 4, 1, "bf16"),
    (FEW_WORDS, {"strategy": "zero1", "pp": 2, "pipeline": "1f1b"}, 4, 4, "bf16"),
    ({**FEW_WORDS, "num_layers": 8}, {"strategy": "zero3", "pp": 2, "pipeline": "interleaved-1f1b"}, 4, 4, "bf16"),
    ({**FEW_WORDS, "num_experts": 4}, {"strategy": "zero3", "ep": 2}, 2, 1, "bf16"),
]


@pytest.mark.parametrize(("overrides", "options", "micro", "count", "dtype"), CASES)
def test_the_peak_from_the_shape_is_that_of_the_dry_run(overrides, options, micro, count, dtype):
    config = sw.models.gpt("gpt-tiny", device="meta", **overrides).config
    policy = None if dtype == "fp32" else sw.PrecisionPolicy(param_dtype=dtype)
    options = dict(options)
    if "pipeline" in options:
        options["pipeline"] = {"schedule": options["pipeline"], "num_microbatches": count}
    plan = sw.ParallelPlan(mp_policy=policy, **options)
    tokens_BT = torch.empty(micro, config.seq_len, dtype=torch.int64, device="meta")
    mesh = plan.mesh(WORLD)
    peaks = [
        sw.dry_run(
            lambda: sw.models.gpt(config),
            plan,
            world_size=WORLD,
            rank=stage * WORLD // plan.pp,
            batch=(tokens_BT, tokens_BT),
            backend="nccl",
            num_microbatches=count,
        ).peak_bytes
        for stage in range(plan.pp)
    ]  # of forward and backward; a dry run does not watch the update
    workload = Workload(
        seq_len=config.seq_len,
        global_batch=micro * count * mesh.data_parallel_size,
        micro_batch=micro,
        precision=dtype,
        recompute=options.get("activation_checkpointing", "none"),
    )
    resolved = dataclasses.replace(plan, dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard)
    found = memory_on("cuda", sw.ModelShape.from_config(config), resolved, workload)
    predicted = max(sum(held.values()) for moment, held in found.timeline if moment != "optimizer")
    assert predicted == pytest.approx(max(peaks), rel=0.02), found.by_category
