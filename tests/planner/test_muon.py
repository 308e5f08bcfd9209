"""Muon in the planner: state and traffic are those of the engine's dry run, and its work takes time."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import shardwise as sw
from shardwise.planner import Cluster, Workload, estimate
from shardwise.planner.memory import memory_on
from shardwise.planner.time import estimate_time
from shardwise.spec.traffic.matrices import exchanged_bytes

SIZES = {"num_layers": 4, "hidden": 256, "num_heads": 4, "vocab_size": 512, "seq_len": 32, "tied": False}
PLANS = [
    {"strategy": "ddp"},
    {"strategy": "zero1"},
    {"strategy": "zero3"},
    {"strategy": "hsdp", "dp_replicate": 2},
    {"strategy": "zero3", "tp": 2},
    {"strategy": "zero3", "pp": 2},
    {"strategy": "zero3", "offload_policy": "cpu"},
    {"strategy": "zero3", "ep": 2},
]


def sent(events: list[sw.CollectiveEvent]) -> int:
    return sum(event.sent_bytes for event in events if event.unit == "matrices")


@pytest.mark.parametrize("fields", PLANS)
def test_state_and_exchanged_bytes_are_those_of_the_dry_run(fields):
    plan, world = sw.ParallelPlan(**fields), 4
    sizes = SIZES | ({"num_experts": 4} if plan.ep > 1 else {})
    config = sw.models.gpt("gpt-tiny", device="meta", **sizes).config
    runs = [
        sw.dry_run(lambda: sw.models.gpt(config), plan, world_size=world, rank=rank, optimizer="muon", backend="nccl")
        for rank in range(world)
    ]
    mesh = plan.mesh(world)
    resolved = dataclasses.replace(plan, dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard)
    count = plan.pipeline_policy.microbatches(plan.pp) if plan.pipeline_policy is not None else 1
    workload = Workload(seq_len=32, global_batch=mesh.data_parallel_size * count, precision="fp32", optimizer="muon")
    shape = sw.ModelShape.from_config(config)
    states = [held["host"] if plan.offload else held["optimizer"] for held in (run.bytes_by_category for run in runs)]
    adamw = sw.dry_run(lambda: sw.models.gpt(config), plan, world_size=world, optimizer="adamw", backend="nccl")
    before = adamw.bytes_by_category["host" if plan.offload else "optimizer"]
    found = memory_on("cuda", shape, resolved, workload)
    predicted = found.host_bytes or min(held["optimizer"] for _, held in found.timeline)  # before the update
    assert predicted == pytest.approx(max(states), rel=0.02)
    assert max(states) < (0.9 if plan.offload else 0.7) * before
    made = estimate_time(shape, resolved, Cluster(gpu="H100-80GB-SXM", num_gpus=world), workload)
    mean = sum(sent(run.events) for run in runs) / world
    if plan.strategy == "ddp":
        assert made.sent_bytes["world"] == mean
    assert 0 < mean <= made.sent_bytes["world"]


def dry(world: int, rank: int, hidden: int) -> tuple[sw.DryRun, sw.Muon, sw.models.GPT]:
    """A dry run under zero3 with two blocks, its optimizer and its model."""
    models: list[sw.models.GPT] = []
    made: list[sw.Muon] = []

    def build() -> sw.models.GPT:
        models.append(sw.models.gpt("gpt-tiny", num_layers=2, hidden=hidden, num_heads=32, vocab_size=8192))
        return models[-1]

    def optimizer(_parameters: object) -> sw.Muon:
        made.append(sw.Muon(sw.muon_groups(models[-1])))
        return made[-1]

    tokens_BT = torch.empty(1, 16, dtype=torch.int64, device="meta")
    plan = sw.ParallelPlan(strategy="zero3")
    batch = tokens_BT, tokens_BT
    run = sw.dry_run(build, plan, world_size=world, rank=rank, optimizer=optimizer, batch=batch, backend="nccl")
    return run, made[0], models[-1]


def test_on_64_ranks_each_has_its_share_of_the_state():
    """The vectors of a block, of which there are two states, lie on its last rank: 1.7% of its share at this width."""
    whole = dry(1, 0, 4096)[0].bytes_by_category["optimizer"]
    for rank in (0, 42, 63):
        held = dry(64, rank, 4096)[0].bytes_by_category["optimizer"]
        assert abs(held * 64 / whole - 1) < 0.02, rank


def test_where_a_matrix_lies_on_many_ranks_they_send_what_the_closed_form_says():
    run, optimizer, _model = dry(64, 5, 256)
    (matrices,) = optimizer._owners.values()
    total = own = held = 0
    for matrix in matrices.values():
        held += matrix.full.numel
        away = {rank: extent.numel for rank, extent in matrix.holders.items() if rank != matrix.owner}
        there = {rank: away[rank] for rank in matrix.senders() if rank != matrix.owner}
        total += sum(there.values()) + sum(away.values())
        own += sum(away.values()) if matrix.owner == 5 else there.get(5, 0)
    assert held == 2 * 12 * 256 * 256
    assert sent(run.events) == 2 * own
    assert sum(exchanged_bytes(held / 64, 64, 1)) == pytest.approx(2 * total / 64, rel=0.15)


def test_its_time_is_that_of_its_products_and_shrinks_with_the_ranks():
    shape = sw.ModelShape.from_config("llama-3-8b")

    def optimizer_s(optimizer: str, ranks: int) -> float:
        cluster = Cluster(gpu="H100-80GB-SXM", num_gpus=ranks)
        workload = Workload(seq_len=2048, global_batch=ranks, optimizer=optimizer)
        return estimate(shape, sw.ParallelPlan(strategy="zero3"), cluster, workload).time.by_category["optimizer"]

    layer = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(4096, 14336)] * 3
    flops = 32 * 5 * sum(4 * short**2 * long + 2 * short**3 for short, long in layer)  # Newton-Schulz in five steps
    least = flops / 989e12
    assert least < optimizer_s("muon", 1) - optimizer_s("adamw", 1) < 3 * least
    assert optimizer_s("muon", 64) < optimizer_s("muon", 1) / 16


def test_experts_count_as_matrices_where_muon_knows_them():
    known, plan = sw.ModelShape.from_config("qwen3-30b-a3b"), sw.ParallelPlan(strategy="zero3", dp_shard=64)
    other = dataclasses.replace(known, family="other")

    def state(shape: sw.ModelShape, optimizer: str) -> int:
        found = memory_on("cuda", shape, plan, Workload(seq_len=2048, global_batch=64, optimizer=optimizer))
        return min(held["optimizer"] for _, held in found.timeline)

    assert state(known, "muon") < 0.53 * state(known, "adamw")
    assert state(other, "muon") > 0.9 * state(other, "adamw")  # which trains its stacks


def test_the_closed_form_counts_what_each_way_sends():
    assert exchanged_bytes(100, 1, 1) == (0, 0)
    assert exchanged_bytes(100, 4, 1) == (150, 150)  # three of four slices there, and three back
    assert exchanged_bytes(400, 1, 4) == (0, 600)  # whole on every rank: the owner has it, the others get results
    assert exchanged_bytes(200, 2, 2) == (100, 300)
