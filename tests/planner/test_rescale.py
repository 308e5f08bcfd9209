"""Runs that were measured move the constant that explains them, and the planner predicts what was measured."""

from __future__ import annotations

import dataclasses
import json

import pytest

from shardwise import ConfigError, ModelShape, ParallelPlan
from shardwise.cost.hardware import Gpu, find_gpu
from shardwise.cost.measured import LinkTime, Measured
from shardwise.cost.software import PYTORCH
from shardwise.planner import Cluster, Estimate, Workload, estimate, rescale, search
from shardwise.planner.rescale import ranking

LLAMA, MEDIUM = (ModelShape.from_config(name) for name in ("llama-3-8b", "gpt2-medium"))


def made(
    gpus: int = 8, batch: int = 64, *, micro: int = 1, network: float | None = None, shape: ModelShape = LLAMA,
    seq: int = 8192, gpu: str | Gpu = "H100-80GB-SXM", precision: str = "bf16",
) -> Estimate:  # fmt: skip
    cluster = Cluster(gpu=gpu, num_gpus=gpus, inter_gbits_per_s_per_node=network)
    workload = Workload(seq_len=seq, global_batch=batch, micro_batch=micro, precision=precision)
    return estimate(shape, ParallelPlan(strategy="zero3"), cluster, workload)


def slower(run: Estimate, factor: float) -> tuple[Estimate, float]:
    """The run as it is measured where a step takes ``factor`` times as long as predicted."""
    return run, run.workload.global_batch * run.workload.seq_len / (factor * run.step_time_s)


def on(run: Estimate, gpu: Gpu) -> Estimate:
    return run.again(cluster=dataclasses.replace(run.cluster, gpu=gpu))


PRODUCTS = PYTORCH.products["Hopper"]
COMPUTING, LAUNCHING = made(), made(1, 1, shape=MEDIUM, seq=64)
SENDING = made(64, 128, network=100)
CASES = {"products": (COMPUTING, 1.2), "network": (SENDING, 1.3), "launch": (LAUNCHING, 1.3)}


@pytest.mark.parametrize("name", CASES)
def test_one_run_moves_the_constant_that_its_step_depends_on_and_is_then_predicted(name):
    run, factor = CASES[name]
    gpu, lines = rescale(slower(run, factor))
    assert list(gpu.speeds) == [name]
    assert gpu.speeds[name] < 1
    assert on(run, gpu).step_time_s == pytest.approx(factor * run.step_time_s, rel=1e-5)
    assert len(lines) == 2
    assert "A second run of this plan would tell most with " in lines[1]


def test_the_value_before_and_after_is_that_of_the_planner():
    gpu, (line, _) = rescale(slower(COMPUTING, 1.2))
    assert line.startswith("Measured: 9.34 s a step of zero3 (1x8), predicted 7.79 s.")
    assert f"Products and attention: {PRODUCTS * gpu.speeds['products']:.3g} of the card's peak, before 0.803." in line
    gpu, (line, _) = rescale(slower(LAUNCHING, 1.3))
    assert f"Launches of kernels: {62.5 * gpu.speeds['launch']:.3g} a ms, before 62.5." in line
    assert f"before {PYTORCH.network:.3g}." in rescale(slower(SENDING, 1.3))[1][0]


def test_a_run_as_predicted_moves_nothing_and_a_faster_one_the_other_way():
    gpu, _ = rescale(slower(COMPUTING, 1))
    assert gpu.speeds["products"] == 1
    gpu, _ = rescale(slower(COMPUTING, 0.95))
    assert 1.05 < gpu.speeds["products"] < 1.1


def test_two_runs_move_two_constants_and_both_are_predicted():
    gpu, lines = rescale(slower(SENDING, 1.3), slower(made(8, 16), 1.1))
    assert set(gpu.speeds) == {"network", "products"}
    assert on(SENDING, gpu).step_time_s == pytest.approx(1.3 * SENDING.step_time_s, rel=1e-5)
    assert on(made(8, 16), gpu).step_time_s == pytest.approx(1.1 * made(8, 16).step_time_s, rel=1e-5)
    assert len(lines) == 2


def test_figures_that_were_moved_are_moved_further_by_the_next_run():
    once, _ = rescale(slower(COMPUTING, 1.2))
    twice, (line, _) = rescale(slower(on(COMPUTING, once), 1.1))
    assert twice.speeds["products"] < once.speeds["products"]
    assert f"before {PRODUCTS * once.speeds['products']:.3g}." in line
    assert on(COMPUTING, twice).step_time_s == pytest.approx(1.32 * COMPUTING.step_time_s, rel=1e-5)


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (0.6, "products and attention at 0.923 of the card's peak do not explain that"),  # 1.15 of the best product
        (3.1, "do not explain that"),
        (8.0, "those of all GPUs"),
    ],
)
def test_a_value_that_no_honest_constant_explains_is_refused_with_what_to_check(factor, words):
    with pytest.raises(ConfigError, match="Check that the run had this plan") as error:
        rescale(slower(COMPUTING, factor))
    assert words in str(error.value)


def test_runs_that_say_the_same_are_refused_with_one_that_would_not():
    with pytest.raises(ConfigError, match="depend on the same constants") as error:
        rescale(slower(COMPUTING, 1.1), slower(COMPUTING, 1.3))
    assert "A second run of this plan would tell most with micro_batch=1,global_batch=8." in str(error.value)
    for runs in ((), [slower(COMPUTING, 1)] * 3, [(COMPUTING, 0.0)]):
        with pytest.raises(ConfigError, match="one run or two"):
            rescale(*runs)


def test_the_run_that_is_said_to_tell_most_is_one_that_tells_two_constants_apart():
    _, (_, further) = rescale(slower(LAUNCHING, 1.3))
    assert further == "A second run of this plan would tell most with micro_batch=2,global_batch=2."
    gpu, _ = rescale(slower(LAUNCHING, 1.3), slower(made(1, 16, micro=16, shape=MEDIUM, seq=1024), 1.1))
    assert set(gpu.speeds) == {"launch", "products"}


def test_a_slow_network_changes_the_first_plan_for_the_reason_that_is_given():
    cluster, workload = Cluster(gpu="H100-80GB-SXM", num_gpus=16), Workload(seq_len=8192, global_batch=64)
    before = search(LLAMA, cluster, workload, cp=1, tp=1, micro_batch=1, recompute="selective")
    gpu = dataclasses.replace(find_gpu("H100-80GB-SXM"), speeds={"network": 0.02})
    after = search(
        LLAMA, dataclasses.replace(cluster, gpu=gpu), workload, cp=1, tp=1, micro_batch=1, recompute="selective"
    )
    said = ranking(before[0], after[0])
    assert before[0].plan != after[0].plan
    assert before[0].plan.strategy == "zero2"
    assert said.startswith("Plan 1 was zero2 (")
    assert "It would take" in said
    assert "exposed" in said
    assert ranking(before[0], before[0]).startswith("Plan 1 stays zero2 (")


def test_a_calibrated_machine_is_scaled_beside_its_tables(tmp_path):
    tables = Measured(links={"all_gather": (LinkTime(2, 1, 1e-3), LinkTime(2, 1e9, 1.0))})
    gpu = dataclasses.replace(find_gpu("L4"), measured=tables, speeds={"link": 0.5})
    moved = dataclasses.replace(tables, speeds=gpu.speeds)
    assert moved.link_s("all_gather", 2, 1e9) == 2 * tables.link_s("all_gather", 2, 1e9)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(gpu.as_dict()))
    assert find_gpu(str(path)) == gpu


def test_figures_without_tables_are_read_from_a_file_as_they_were(tmp_path):
    gpu, _ = rescale(slower(COMPUTING, 1.2))
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(gpu.as_dict()))
    assert find_gpu(str(path)) == gpu
    assert made(gpu=str(path)).step_time_s == on(COMPUTING, gpu).step_time_s
