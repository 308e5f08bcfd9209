"""A step on a calibrated machine, by hand: what is looked up, and how it adds up."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.cost.measured import (
    FORMAT,
    AttentionTime,
    LinkTime,
    Measured,
    OperationTime,
    ProductTime,
    UpdateTime,
)
from shardwise.cost.software import PYTORCH, SOFTWARE
from shardwise.planner import Cluster, Workload, estimate, rescale
from shardwise.planner.explain import why
from shardwise.planner.screen import heading

LAYERS, HIDDEN, VOCAB, SEQ, BATCH = 4, 64, 128, 32, 2
TOKENS = SEQ * BATCH
#: Every operation of a product takes 1 ns forward and 2 ns backward; others so many ns an element, a byte, a parameter.
PRODUCT, ATTENTION, NORM, ACTIVATION, ADD, LOSS, COPY, UPDATE, LINK = (
    1e-9,
    3e-9,
    5e-9,
    7e-9,
    11e-9,
    13e-9,
    17e-9,
    19e-9,
    23e-9,
)


def shape_with(vocab: int) -> sw.ModelShape:
    return sw.ModelShape.from_config(
        sw.models.gpt_config(
            "gpt-tiny", num_layers=LAYERS, hidden=HIDDEN, num_heads=4, vocab_size=vocab, seq_len=SEQ, tied=False
        )
    )


SHAPE = shape_with(VOCAB)


def straight(seconds: float) -> tuple[OperationTime, ...]:
    return tuple(OperationTime("fp32", numel, seconds * numel, 2 * seconds * numel) for numel in (1, 1e9))


def machine(tmp_path, shared: float = 0.0, device_type: str = "cpu") -> str:
    product = ProductTime("fp32", 64, 64, 64, PRODUCT * 2 * 64**3, 2 * PRODUCT * 2 * 64**3)
    pairs = TOKENS * SEQ * HIDDEN
    tables = Measured(
        num_ranks=2,
        shared=shared,
        products=(product,),
        attention=(AttentionTime("fp32", TOKENS, SEQ, 4, HIDDEN, ATTENTION * pairs, 2 * ATTENTION * pairs),),
        operations={
            "norm": straight(NORM),
            "activation": straight(ACTIVATION),
            "add": straight(ADD),
            "loss": straight(LOSS),
            "copy": straight(COPY),
        },
        optimizers={"adamw": (UpdateTime(1, UPDATE), UpdateTime(1e9, 1e9 * UPDATE))},
        links={
            kind: (LinkTime(2, 1, LINK), LinkTime(2, 1e12, 1e12 * LINK))
            for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_reduce_out", "message")
        },
    )
    fields = {"name": "made up", "device_type": device_type, "peaks": {"fp32": 1e9}, "memory_bytes": 1 << 34}
    fields |= {
        "memory_bandwidth": 1e10,
        "link_bandwidth": 1e9,
        "link_domain": 2,
        "host_bandwidth": 1e10,
        "node_gbits": 0,
    }
    path = tmp_path / f"machine-{shared}-{device_type}.json"
    path.write_text(json.dumps({"format": FORMAT, **fields, "measured": tables.as_dict()}))
    return str(path)


def step(gpu: str, *, batch: int = 2 * BATCH, world: int = 2, optimizer: str = "adamw", **plan) -> sw.planner.Estimate:
    workload = Workload(seq_len=SEQ, global_batch=batch, micro_batch=BATCH, precision="fp32", optimizer=optimizer)
    return estimate(SHAPE, sw.ParallelPlan(**plan), Cluster(gpu=gpu, num_gpus=world, gpus_per_node=world), workload)


BLOCK = 12 * HIDDEN**2 + 13 * HIDDEN
ROOT = (2 * VOCAB + SEQ + 2) * HIDDEN


def computation() -> float:
    """Forward and backward of all units, and the copies of gradients."""
    stream = TOKENS * HIDDEN
    block = PRODUCT * 2 * TOKENS * 12 * HIDDEN**2 + ATTENTION * stream * SEQ
    block += 2 * NORM * stream + ACTIVATION * 4 * stream
    root = PRODUCT * 2 * TOKENS * HIDDEN * VOCAB + NORM * stream + LOSS * TOKENS * VOCAB
    added = 2 * ADD * stream * 2  # forward and backward of the two additions
    looked_up = COPY * (2 * stream + VOCAB * HIDDEN / 2)
    return 3 * (LAYERS * block + root) + LAYERS * added + looked_up + COPY * (LAYERS * BLOCK + ROOT)


def test_under_ddp_a_step_is_computation_the_last_sums_and_the_update(tmp_path):
    made = step(machine(tmp_path), strategy="ddp")
    parts = made.time.by_category
    assert SHAPE.num_parameters == LAYERS * BLOCK + ROOT
    assert parts["compute"] == pytest.approx(computation())
    assert parts["optimizer"] == pytest.approx(UPDATE * SHAPE.num_parameters)
    assert parts["exposed reduce"] >= LINK * 4 * ROOT * 0.999  # at the least the root's, which nothing hides
    assert made.step_time_s == pytest.approx(sum(parts.values()))


def test_on_a_gpu_the_host_launches_what_was_measured_without_its_launch(tmp_path, monkeypatch):
    monkeypatch.setitem(SOFTWARE, "pytorch", dataclasses.replace(PYTORCH, launch_s=1.0))
    cpu, gpu = (
        step(machine(tmp_path, device_type=kind), strategy="ddp", world=1, batch=BATCH).time.by_category
        for kind in ("cpu", "cuda")
    )
    assert "host" not in cpu
    assert gpu["compute"] == pytest.approx(cpu["compute"])
    # 10 kernels in a block's forward, 1 of the embedding's, 5 of the head's; 42 launches' time besides for each unit
    launches = LAYERS * 3 * (10 + 42) + (1 + 42) + 2 * (5 + 42)
    assert sum(gpu.values()) - gpu["optimizer"] == pytest.approx(launches, rel=1e-3)


def test_on_a_gpu_products_of_sizes_that_are_not_aligned_take_longer_than_measured(tmp_path):
    def compute(vocab: int, kind: str) -> float:
        workload = Workload(seq_len=SEQ, global_batch=BATCH, micro_batch=BATCH, precision="fp32")
        cluster = Cluster(gpu=machine(tmp_path, device_type=kind), num_gpus=1)
        return estimate(shape_with(vocab), sw.ParallelPlan(strategy="ddp"), cluster, workload).time.by_category[
            "compute"
        ]

    assert compute(VOCAB, "cuda") == pytest.approx(compute(VOCAB, "cpu"))
    head = 3 * PRODUCT * 2 * TOKENS * HIDDEN * (VOCAB + 1)  # an odd size: half the speed
    assert compute(VOCAB + 1, "cuda") - compute(VOCAB + 1, "cpu") == pytest.approx(head)


def test_on_a_gpu_an_odd_vocabulary_takes_what_an_odd_product_took_when_it_was_calibrated(tmp_path):
    path = Path(machine(tmp_path, device_type="cuda"))
    content = json.loads(path.read_text("utf-8"))
    (even,) = content["measured"]["products"]
    odd = even | {"columns": 63} | {key: 8 * even[key] for key in ("forward_s", "backward_s")}
    path.write_text(json.dumps(content | {"measured": content["measured"] | {"products": [even, odd]}}), "utf-8")
    workload = Workload(seq_len=SEQ, global_batch=BATCH, micro_batch=BATCH, precision="fp32")
    cluster, plan = Cluster(gpu=str(path), num_gpus=1), sw.ParallelPlan(strategy="ddp")
    odd_s, even_s = (estimate(shape_with(v), plan, cluster, workload).time.by_category["compute"] for v in (127, 128))
    # The product of 127 takes eight times as long; the loss and the lookup of 128 are what else differs.
    head = 3 * PRODUCT * 2 * TOKENS * HIDDEN
    less = 3 * LOSS * TOKENS + COPY * HIDDEN / 2 + COPY * 2 * HIDDEN
    assert odd_s - even_s == pytest.approx(head * (8 * 127 - 128) - less, rel=1e-3)


def test_a_core_that_both_share_computes_and_sends_one_after_the_other(tmp_path):
    made = step(machine(tmp_path, shared=1.0), strategy="ddp")
    sent = LINK * 4 * SHAPE.num_parameters
    assert made.step_time_s == pytest.approx(computation() + sent + UPDATE * SHAPE.num_parameters)


def test_measured_runs_scale_what_was_calibrated(tmp_path):
    alone = step(machine(tmp_path), strategy="ddp", world=1, batch=BATCH)
    sending = step(machine(tmp_path), strategy="zero3")
    gpu, lines = rescale(
        (sending, 2 * TOKENS / (1.2 * sending.step_time_s)), (alone, TOKENS / (1.1 * alone.step_time_s))
    )
    assert set(gpu.speeds) == {"link", "products"}
    assert f"Products and attention: {gpu.speeds['products']:.3g} of what was calibrated, before 1." in lines[1]
    for made, factor in ((sending, 1.2), (alone, 1.1)):
        again = made.again(cluster=dataclasses.replace(made.cluster, gpu=gpu))
        assert again.step_time_s == pytest.approx(factor * made.step_time_s)


def test_zero3_gathers_all_but_the_root_and_the_last_block_twice_and_updates_a_half(tmp_path):
    made = step(machine(tmp_path, shared=1.0), strategy="zero3")
    numel = SHAPE.num_parameters
    gathered = 4 * LINK + COPY / 2  # a rank copies its half into the buffer
    gathers = gathered * (2 * numel - ROOT - BLOCK)
    assert made.step_time_s == pytest.approx(computation() + 4 * LINK * numel + gathers + UPDATE * numel / 2)


def test_with_muon_a_rank_orthogonalizes_half_of_the_matrices_and_exchanges_them(tmp_path):
    adamw, muon = (
        step(machine(tmp_path), strategy="zero3", optimizer=name).time.by_category["optimizer"]
        for name in ("adamw", "muon")
    )
    # Newton-Schulz: five times two products of (s, s) by (s, l) and one of (s, s) by (s, s). Four square matrices, and
    # two that are four times as long.
    flops = 5 * HIDDEN**3 * (4 * (4 + 2) + 2 * (4 * 4 + 2))
    held = LAYERS * 12 * HIDDEN**2 / 2
    links = 2 * 2 * held * LINK  # there and back; of a whole buffer of two bytes for each element a rank sends half
    assert muon - adamw == pytest.approx(PRODUCT * LAYERS * flops / 2 + links)


def test_microbatches_compute_again_and_local_sums_are_reduced_once(tmp_path):
    gpu = machine(tmp_path, shared=1.0)
    once, thrice = step(gpu, strategy="ddp"), step(gpu, strategy="ddp", batch=6 * BATCH)
    assert thrice.step_time_s - once.step_time_s == pytest.approx(2 * computation())
    every = step(gpu, strategy="ddp", batch=6 * BATCH, accumulation="sharded")
    assert every.step_time_s - thrice.step_time_s == pytest.approx(2 * 4 * LINK * SHAPE.num_parameters)


def test_a_pipeline_of_two_halves_the_work_and_waits_for_its_bubble(tmp_path):
    gpu = machine(tmp_path)
    made = step(gpu, strategy="ddp", pp=2, batch=4 * BATCH)
    alone = step(gpu, strategy="ddp", world=1, batch=4 * BATCH)
    assert made.time.by_category["compute"] < 0.7 * alone.time.by_category["compute"]
    assert made.time.by_category["pp bubble"] > 0.2 * made.time.by_category["compute"]


def test_tensor_parallel_ranks_wait_for_sums_in_every_block(tmp_path):
    made = step(machine(tmp_path), strategy="ddp", tp=2, batch=BATCH)
    stream = 4 * TOKENS * HIDDEN
    assert made.time.by_category["tp"] == pytest.approx(LINK * stream * (4 * LAYERS + 2))


def test_every_microbatch_is_estimated_where_no_rough_time_orders_them(tmp_path) -> None:
    cluster, work = (
        Cluster(gpu=machine(tmp_path), num_gpus=2),
        Workload(seq_len=SEQ, global_batch=2048, precision="fp32"),
    )
    fixed = {"strategy": "ddp", "tp": 1, "pp": 1, "cp": 1, "recompute": "none"}
    every = [sw.planner.search(SHAPE, cluster, work, **fixed, micro_batch=1 << power)[0] for power in range(11)]
    best = min(made.step_time_s for made in every if made.fits and not made.is_tight)
    found = sw.planner.search(SHAPE, cluster, work, **fixed)
    assert min(made.step_time_s for made in found if made.fits) == best


def test_a_page_of_several_nodes_says_that_their_network_was_not_measured(tmp_path):
    gpu = machine(tmp_path)
    cluster = Cluster(gpu=gpu, num_gpus=4, gpus_per_node=2)
    workload = Workload(seq_len=SEQ, global_batch=4 * BATCH, micro_batch=BATCH, precision="fp32")
    lines = " ".join(why(estimate(SHAPE, sw.ParallelPlan(strategy="zero3"), cluster, workload)))
    assert "Links were measured between 2 ranks." in lines
    assert "GB/s a node" not in "".join([lines, *heading(SHAPE, cluster, workload)])
