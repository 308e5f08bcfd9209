"""Seconds of a step: what they add up to, which way they move, and how far they are from published ones."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from bench.predictions import (
    FITTED,
    Errors,
    by_regime,
    choices,
    compare_times,
    constant_rate,
    held_out,
    left_out,
    resolved,
)
from bench.published import published_rows
from shardwise import ConfigError, ParallelPlan
from shardwise.cost.hardware import Cluster, find_gpu
from shardwise.cost.kernels import alignment, attention_seconds, product_seconds, unit_seconds
from shardwise.cost.links import axis_links
from shardwise.cost.software import find_software
from shardwise.cost.work import Product
from shardwise.cost.workload import Workload
from shardwise.planner import estimate
from shardwise.planner.estimate import Estimate, simulated
from shardwise.planner.explain import BANDS
from shardwise.planner.time import timing
from shardwise.spec.policies import PrecisionPolicy
from shardwise.spec.schedule import PipelinePolicy
from shardwise.spec.shape import ModelShape
from shardwise.spec.shape.gpt import gpt_config

SHAPE = ModelShape.from_config("llama-3-8b")
CLUSTER = Cluster(gpu="H100-80GB-SXM", num_gpus=16)
WORKLOAD = Workload(seq_len=4096, global_batch=64)

PLANS = {
    "ddp": ParallelPlan(strategy="ddp"),
    "zero1": ParallelPlan(strategy="zero1"),
    "zero2": ParallelPlan(strategy="zero2"),
    "zero3": ParallelPlan(strategy="zero3"),
    "hsdp": ParallelPlan(strategy="hsdp"),
    "tp": ParallelPlan(strategy="zero3", tp=4),
    "cp": ParallelPlan(strategy="zero3", cp=4),
    "pp": ParallelPlan(strategy="zero1", pp=4, pipeline=PipelinePolicy("1f1b", 16)),
    "3d": ParallelPlan(strategy="zero1", pp=2, tp=4, pipeline=PipelinePolicy("interleaved-1f1b", 32)),
    "offload": ParallelPlan(strategy="zero3", offload_policy="cpu"),
}


def made(plan: ParallelPlan | str = "zero3", **changes: object) -> Estimate:
    cluster = {name: changes.pop(name) for name in tuple(changes) if hasattr(CLUSTER, name)}
    return estimate(
        SHAPE,
        PLANS[plan] if isinstance(plan, str) else plan,
        dataclasses.replace(CLUSTER, **cluster),
        dataclasses.replace(WORKLOAD, **changes),
    )


def test_categories_come_in_one_order_so_that_every_process_adds_them_up_alike() -> None:
    assert list(made("zero3").time.by_category) == ["compute", "exposed gather", "exposed reduce", "optimizer"]


@pytest.mark.parametrize("name", PLANS)
def test_categories_add_up_and_none_is_negative(name):
    time = made(name).time
    assert sum(time.by_category.values()) == pytest.approx(time.step_time_s)
    assert min(time.by_category.values()) >= 0
    known = {"compute", "exposed gather", "exposed reduce", "tp", "pp bubble", "cp", "ep", "optimizer", "offload"}
    assert set(time.by_category) <= known | {"host"}


def small_work(tokens: int, samples: int = 1, *, model: str = "gpt2-medium", **changes: object) -> Estimate:
    """A step of one H100 under zero3."""
    workload = Workload(seq_len=tokens, global_batch=samples, micro_batch=samples, **changes)
    cluster = Cluster(gpu="H100-80GB-SXM", num_gpus=1)
    return estimate(ModelShape.from_config(model), ParallelPlan(strategy="zero3"), cluster, workload)


def test_a_step_is_no_faster_than_the_host_launches_it():
    # 24 blocks of 10 kernels, a root whose forward launches 1 and whose backward 2 * 5, 42 launches' time for each unit
    few = small_work(64)
    launches = 24 * 3 * (10 + 42) + (1 + 42) + 2 * (5 + 42)
    assert few.step_time_s - few.time.by_category["optimizer"] == pytest.approx(launches * 16e-6, rel=1e-3)
    assert few.step_time_s == pytest.approx(0.0664, rel=0.02)  # bench/results/2026-11-26-gpu.md
    assert few.time.by_category["host"] > 0.85 * few.step_time_s
    assert small_work(128).step_time_s == pytest.approx(few.step_time_s, rel=1e-3)
    assert small_work(1024, 32).step_time_s == pytest.approx(0.2652, rel=0.02)  # the same page


def test_compiled_units_are_launched_faster():
    assert small_work(64, compile=True).step_time_s < 0.4 * small_work(64).step_time_s


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_blocks_cost_the_host_two_forwards_more(recompute):
    more = small_work(64, recompute=recompute).step_time_s - small_work(64).step_time_s
    assert more == pytest.approx(24 * 2 * 52 * 16e-6, rel=1e-3)


#: Of a step on an H100, milliseconds of the kernels of products, of attention, and of the rest without the optimizer
#: (bench/results/2026-11-27-gpu-3.md).
KERNELS = {
    "gpt2-medium": ({"seq_len": 1024, "vocab_size": 50304}, 32, (91.9, 20.0, 78.1)),
    "gpt-1.3b": ({"seq_len": 1024, "vocab_size": 50304, "hidden": 2048}, 16, (173.5, 15.7, 65.6)),
    "long": ({"seq_len": 8192, "vocab_size": 50304, "hidden": 2048, "num_layers": 12}, 2, (93.7, 46.9, 41.1)),
}


@pytest.mark.parametrize("name", KERNELS)
def test_each_kind_of_kernel_takes_what_it_took_on_an_h100(name):
    """Not only their sum, in which errors cancel."""
    overrides, batch, measured = KERNELS[name]
    shape = ModelShape.from_config(gpt_config("gpt2-medium", **overrides))
    workload = Workload(seq_len=overrides["seq_len"], global_batch=batch, micro_batch=batch)
    found = timing(shape, ParallelPlan(tp=1, pp=1), Cluster(gpu="H100-80GB-SXM", num_gpus=1), workload)
    gpu, software = found.cluster.device, found.software
    products = attention = whole = 0.0
    for work in found.works:
        products += work.count * sum(sum(product_seconds(each, gpu, software, "bf16")) for each in work.products)
        attention += work.count * sum(sum(attention_seconds(each, gpu, software, workload)) for each in work.attention)
        spent = unit_seconds(work, gpu, software, workload)
        whole += work.count * (spent.forward_s + spent.backward_s)
    predicted = products, attention, whole - products - attention
    assert [1e3 * seconds for seconds in predicted] == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("name", PLANS)
def test_a_faster_network_is_never_slower(name):
    steps = [made(name, inter_gbits_per_s_per_node=gbits).step_time_s for gbits in (100, 400, 1600, 6400)]
    assert steps == sorted(steps, reverse=True)


def test_a_slow_network_makes_zero3_wait_and_hybrid_sharding_less():
    slow = {"inter_gbits_per_s_per_node": 50}
    assert made("zero3", **slow).step_time_s > 1.5 * made("zero3").step_time_s
    assert made("hsdp", **slow).step_time_s < 0.8 * made("zero3", **slow).step_time_s


def test_recomputing_costs_up_to_a_third_and_some_blocks_in_proportion():
    none, some, full = (made(recompute=what).step_time_s for what in ("none", 16, "full"))
    assert 1.2 < full / none < 1.34
    assert (some - none) / (full - none) == pytest.approx(0.5, rel=0.02)


def test_adapters_need_no_gradients_of_frozen_weights():
    whole, adapters = made().step_time_s, made(lora_rank=16).step_time_s
    assert 0.6 < adapters / whole < 0.85


def test_frozen_weights_cost_no_operations_of_their_gradients():
    full, adapted = made("ddp"), made("ddp", lora_rank=8)
    attention = 12 * SHAPE.num_layers * SHAPE.hidden * WORKLOAD.seq_len**2 * WORKLOAD.global_batch
    products = full.time.model_flops - attention
    assert adapted.time.model_flops == pytest.approx(attention + products * 2 / 3, rel=0.01)


def test_selective_recomputation_of_torchtitan_repeats_half_of_the_products():
    every = [
        estimate(SHAPE, PLANS["zero3"], CLUSTER, dataclasses.replace(WORKLOAD, recompute=what), software=software)
        for software in ("pytorch-2024", "torchtitan")
        for what in ("none", "selective", "full")
    ]
    (none, ours, full), (_, titan, _) = [[each.step_time_s for each in every[place : place + 3]] for place in (0, 3)]
    assert none < ours < titan < full


def test_gradients_that_are_reduced_in_fp32_take_longer_on_a_slow_network():
    steps = [
        made(dataclasses.replace(PLANS["zero3"], mp_policy=policy), inter_gbits_per_s_per_node=100).step_time_s
        for policy in ({"param_dtype": "bf16", "reduce_dtype": dtype} for dtype in ("bf16", "fp32"))
    ]
    assert steps[1] > 1.1 * steps[0]


@pytest.mark.parametrize("change", [{"num_gpus": 32}, {"num_gpus": 64}])
def test_more_gpus_with_the_same_batch_are_not_slower(change):
    assert made("zero3", **change).step_time_s < made("zero3").step_time_s


def test_compiling_fuses_element_wise_work():
    assert 0.7 < made(compile=True).step_time_s / made().step_time_s < 0.95


def test_more_microbatches_shrink_the_bubble():
    shares = []
    for count in (4, 16, 64):
        plan = ParallelPlan(strategy="zero1", pp=4, pipeline=PipelinePolicy("1f1b", count))
        got = made(plan, global_batch=4 * count)
        shares.append(got.time.by_category["pp bubble"] / got.step_time_s)
    assert shares[0] > 0.3  # (p - 1) / (m + p - 1) = 3 / 7, and stages are not quite equal
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize("layers", [20, 80])
def test_blocks_that_are_not_simulated_take_the_time_of_those_that_are(layers, monkeypatch):
    shape = ModelShape.decoder(layers=layers, hidden=4096, heads=32, vocab=32000, seq_len=4096)
    plan = ParallelPlan(strategy="zero3", dp_shard=16)
    steps = []
    for blocks in (3, layers):
        monkeypatch.setattr("shardwise.planner.timing._SIMULATED", blocks)
        for gbits in (50, 3200):
            cluster = dataclasses.replace(CLUSTER, inter_gbits_per_s_per_node=gbits)
            steps.append(estimate(shape, plan, cluster, WORKLOAD).step_time_s)
    assert steps[:2] == pytest.approx(steps[2:], rel=0.01)


def test_software_that_nobody_knows_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="Did you mean 'megatron-core'"):
        estimate(SHAPE, PLANS["zero3"], CLUSTER, WORKLOAD, software="megatron-cor")


def test_every_published_row_with_a_known_configuration_has_a_plan_that_its_cluster_can_run():
    rows = published_rows()
    assert len(rows) > 500
    for row in rows:
        assert resolved(row).mesh(row.cluster.num_gpus).world_size == row.cluster.num_gpus


def test_fitted_and_held_out_sources_are_as_far_off_as_the_page_says_and_ahead_of_one_rate_for_each_gpu():
    compared = compare_times()
    fitted = Errors.of(each.error for each in compared if each.row.source in FITTED)
    unseen = held_out(compared)
    errors = Errors.of(each.error for each in unseen)
    rates = Errors.of(constant_rate(unseen))
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    for each in (fitted, errors, rates):
        shown = " | ".join(f"{100 * value:.1f}%" for value in (each.median, each.mean, each.p90, each.worst))
        assert f"| {each.count} | {shown} |" in page
    assert errors.mean < rates.mean
    assert all(len(group.rows) > 1 and -1 <= group.tau <= 1 for group in choices(compared))


def test_each_regimes_band_holds_8_of_10_rows_whose_source_was_left_out() -> None:
    found = {kind: Errors.of(each.error for each in rows) for kind, rows in by_regime(left_out()).items()}
    assert found.keys() == {*BANDS, *(kind for kind, errors in found.items() if errors.count < 8)}
    for kind, band in BANDS.items():
        assert band == math.ceil(100 * found[kind].p80) / 100
    rows = published_rows()
    for each in left_out():
        assert each.measured == each.row.step_time_s
        assert each.row in rows


def test_a_card_without_rows_reaches_a_share_of_its_best_measured_product() -> None:
    mi300x, a100 = (find_gpu(name) for name in ("MI300X", "A100-80GB-SXM"))
    assert (mi300x.best_product, a100.best_product) == (0.514, 0.869)  # hardware.csv, mamf_pct
    product = Product(1 << 16, 1 << 14, 1 << 14, is_trained=False)
    forward, _ = product_seconds(product, mi300x, find_software("pytorch", mi300x), "bf16")
    assert product.flops / forward / mi300x.peaks["bf16"] == pytest.approx(0.85 * 0.514, rel=0.05)


def test_products_of_an_odd_vocabulary_take_what_they_took_on_one_h100() -> None:
    h100, a100 = (find_gpu(name) for name in ("H100-80GB-SXM", "A100-80GB-SXM"))
    seconds = {
        (gpu.arch, columns, precision): sum(
            product_seconds(Product(32 * 1024, 1024, columns), gpu, find_software("pytorch", gpu), precision)
        )
        for gpu in (h100, a100)
        for columns in (50_257, 50_304)
        for precision in ("bf16", "fp32")
    }
    # bench/results/2026-11-27-gpu-2.md: forward and both products of backward, beside 14 ms at the speed of others
    assert seconds["Hopper", 50_257, "bf16"] == pytest.approx(84e-3, rel=0.15)
    slower = {key: seconds[key] / seconds[key[0], 50_304, key[2]] for key in seconds if key[1] == 50_257}
    assert slower["Hopper", 50_257, "bf16"] == pytest.approx(1 / 0.17, rel=0.01)
    for key in (("Ampere", 50_257, "bf16"), ("Hopper", 50_257, "fp32"), ("Ampere", 50_257, "fp32")):
        assert slower[key] == pytest.approx(2, rel=0.01)
    # Two ranks of tp have 25,129 and 25,128 columns: the first one counts.
    assert alignment(50_257 / 2, "Hopper") == alignment(25_129, "Hopper") == 0.17
    assert alignment(25_128, "Hopper") == 0.75


def test_an_odd_number_of_tokens_aligns_no_row_and_costs_nothing() -> None:
    gpu = find_gpu("H100-80GB-SXM")
    odd, even = (
        sum(product_seconds(Product(rows, 4096, 4096), gpu, find_software("pytorch", gpu), "bf16"))
        for rows in (16_351, 16_384)
    )
    assert 0.97 * even < odd < even


def test_a_mesh_of_links_gives_few_ranks_their_own_links_only() -> None:
    """Eight MI300X: 448 GB/s to all the others together, 64 GB/s to each."""
    cluster = Cluster(gpu="MI300X", num_gpus=8)
    software = find_software("pytorch", cluster.device)
    rates = {
        tp: axis_links(ParallelPlan(tp=tp, dp_shard=8 // tp), cluster, software)["tp"].bandwidth / software.link
        for tp in (2, 4, 8)
    }
    assert rates == pytest.approx({2: 64e9, 4: 192e9, 8: 448e9})


def test_experts_on_more_ranks_leave_the_update_as_long_as_it_was():
    shape = ModelShape.from_config("qwen3-30b-a3b")
    times = [
        estimate(
            shape, ParallelPlan(strategy="zero3", ep=ep, offload_policy=offload), CLUSTER, WORKLOAD
        ).time.by_category
        for offload in ("none", "cpu")
        for ep in (1, 8)
    ]
    updates = [time["optimizer"] for time in times]
    assert updates[0] == pytest.approx(updates[1])
    assert updates[2] == pytest.approx(updates[3])


def test_updates_inside_backward_take_their_time_there():
    plain, inside = (made(global_batch=16, micro_batch=1, in_backward=value) for value in (False, True))
    assert inside.time.by_category["optimizer"] == 0
    assert inside.step_time_s == pytest.approx(plain.step_time_s, rel=0.02)


def test_on_the_host_updates_inside_backward_run_beside_it():
    """Only the last microbatch's: of the step's time what is hidden goes, no more than all of the update."""
    plan = ParallelPlan(strategy="zero3", offload_policy="cpu")
    for microbatches in (1, 4):
        batch = {"global_batch": 16 * microbatches, "micro_batch": 1}
        after, inside = (made(plan, num_gpus=16, in_backward=value, **batch) for value in (False, True))
        update_s = after.time.by_category["optimizer"]
        assert 0.3 * update_s < after.step_time_s - inside.step_time_s < update_s
        assert inside.time.by_category["optimizer"] < 0.7 * update_s
        assert inside.memory.by_category == after.memory.by_category


def test_gradients_are_sent_in_the_dtype_that_memory_counts():
    dtypes = {None: 4, "fp32": 4, "bf16": 2}
    plans = [ParallelPlan(strategy="ddp")]
    plans += [ParallelPlan(strategy="ddp", mp_policy=PrecisionPolicy(reduce_dtype=name)) for name in dtypes]
    sent = [made(plan, num_gpus=16, global_batch=16).time.sent_bytes["dp_shard"] for plan in plans]
    assert sent == pytest.approx([2 * size * SHAPE.num_parameters * 15 / 16 for size in (4, *dtypes.values())])


def test_accumulation_decides_how_often_gradients_are_sent():
    plans = [ParallelPlan(strategy=s, accumulation=a) for s in ("ddp", "zero2") for a in ("sharded", "unsharded")]
    sent = [made(plan, global_batch=64).time.sent_bytes["dp_shard"] for plan in plans]
    whole = 4 * SHAPE.num_parameters * 15 / 16
    gathered = 2 * SHAPE.num_parameters * 15 / 16
    assert sent == pytest.approx([4 * 2 * whole, 2 * whole, 4 * whole + gathered, whole + gathered])


@pytest.mark.parametrize("gpu", ["A100-80GB-SXM", "H100-80GB-SXM", "MI300X", "RTX4090", "V100-32GB-SXM2"])
def test_no_precision_computes_faster_than_its_peak(gpu):
    for precision in ("fp32", "fp16"):
        made_ = made(gpu=gpu, precision=precision)
        assert made_.mfu is not None
        assert made_.mfu < 1


def test_a_dtype_without_units_is_computed_in_fp32_or_refused():
    half, emulated, full = (made(gpu="V100-32GB-SXM2", precision=p).step_time_s for p in ("fp16", "bf16", "fp32"))
    assert half * 3 < emulated
    assert emulated == pytest.approx(full, rel=0.25)
    with pytest.raises(ConfigError, match="A100-80GB-SXM has no units"):
        made(gpu="A100-80GB-SXM", precision="fp8")


def test_a_drawing_is_of_the_software_that_was_assumed():
    plan = ParallelPlan(strategy="zero1", pp=4, pipeline=PipelinePolicy("1f1b", 16))
    found = estimate(SHAPE, plan, CLUSTER, WORKLOAD, software="megatron-core")
    assert simulated(found).seconds == pytest.approx(found.step_time_s, rel=1e-6)


def test_an_update_moves_each_state_twice_and_the_gradient_once():
    adamw, momentum, plain = (
        made(optimizer=name).time.by_category["optimizer"] for name in ("adamw", "sgd-momentum", "sgd")
    )
    assert momentum == pytest.approx(5 / 7 * adamw)
    assert plain == pytest.approx(3 / 7 * adamw)
