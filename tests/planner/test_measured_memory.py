"""The bytes of tensors that ranks really hold are those that the planner predicts from the model's shape, within 2%."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from torch import distributed

import shardwise as sw
from shardwise.cost.workload import Workload
from shardwise.planner.memory import memory_on
from shardwise.testing import StorageCount, run_on_ranks

pytestmark = pytest.mark.slow

MODEL = {"num_layers": 6, "hidden": 128, "num_heads": 4, "vocab_size": 512, "seq_len": 64}

#: Model, plan, samples of a microbatch, microbatches.
CASES = [
    *((MODEL, {"strategy": strategy}, 2, 1) for strategy in ("ddp", "zero1", "zero2", "shard_grad_op", "zero3")),
    (MODEL, {"strategy": "zero2"}, 2, 2),
    (MODEL, {"strategy": "zero3", "tp": 2}, 2, 1),
    (MODEL, {"strategy": "zero1", "pp": 2}, 2, 4),
    (MODEL, {"strategy": "zero3", "activation_checkpointing": "full"}, 8, 1),
]


def measure(overrides: dict, options: dict, micro: int, count: int) -> tuple[int, int]:
    """The peak of the third step on this rank, and the prediction for the fullest one."""
    model = sw.models.gpt("gpt-tiny", **overrides)
    config, plan = model.config, sw.ParallelPlan(**options)
    model = sw.parallelize(model, plan)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens_BT = torch.randint(0, config.vocab_size, (micro * count, config.seq_len))

    def step() -> None:
        sw.train_step(model, (tokens_BT, tokens_BT.clone()), num_microbatches=count)
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    gc.collect()
    seen = StorageCount("cpu")
    seen.see_all_objects()
    with seen:
        step()
    seen.forget()
    mesh = plan.mesh(distributed.get_world_size())
    resolved = dataclasses.replace(plan, dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard)
    workload = Workload(
        seq_len=config.seq_len,
        global_batch=micro * count * mesh.data_parallel_size,
        micro_batch=micro,
        precision="fp32",
        recompute=options.get("activation_checkpointing", "none"),
    )
    return seen.peak_bytes, memory_on("cpu", sw.ModelShape.from_config(config), resolved, workload).allocated_bytes


def measure_all() -> list[tuple[int, int]]:
    return [measure(*case) for case in CASES]


def test_the_fullest_rank_holds_what_the_planner_says():
    ranks = run_on_ranks(measure_all, 2)
    for case, found in zip(CASES, zip(*ranks, strict=True), strict=True):
        measured = max(peak for peak, _ in found)
        assert found[0][1] == pytest.approx(measured, rel=0.02), case
