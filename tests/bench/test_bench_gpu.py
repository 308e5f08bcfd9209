"""The script that measures on GPUs: it refuses where there is none, and reads profiles right."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from bench import gpu
from tests.common.ranks import on_ranks


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.slow
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "bench.gpu", "--out", str(tmp_path / "results")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("bench.gpu measures on CUDA devices, and ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "results").exists()


def event(name: str, start: float, end: float, device: DeviceType = DeviceType.CPU) -> SimpleNamespace:
    return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end))


def test_only_waits_inside_of_steps_count():
    events = [event(gpu.STEP, 0, 10), event(gpu.STEP, 10, 20), event("cudaLaunchKernel", 1, 2)]
    assert gpu.waits([*events, event("cudaDeviceSynchronize", 21, 30)]) == {}
    assert gpu.waits([*events, event("cudaStreamSynchronize", 3, 4)]) == {"cudaStreamSynchronize": 1}
    on_device = event("cudaStreamSynchronize", 12, 13), event(gpu.STEP, 30, 40, DeviceType.CUDA)
    assert gpu.waits([*events, *on_device, event("cudaMemcpy", 33, 34)]) == {"cudaStreamSynchronize": 1}


def test_copies_are_hidden_where_kernels_run_however_many_at_once():
    spans = [
        ("Memcpy HtoD (Pinned -> Device)", 0.0, 10.0),
        ("gemm", 2.0, 6.0),
        ("gemm on another stream", 3.0, 7.0),
        ("Memset (Device)", 0.0, 10.0),
        ("Memcpy DtoH (Device -> Pinned)", 20.0, 25.0),
    ]
    assert gpu.overlap(spans) == (15.0, 5.0)
    assert gpu.device_spans([event("gemm", 1, 2, DeviceType.CUDA), event("aten::mm", 0, 3)]) == [("gemm", 1, 2)]


def test_what_a_link_takes_is_hidden_where_kernels_compute():
    spans = [
        ("ncclDevKernel_AllGather_RING_LL", 0.0, 10.0),
        ("spin_kernel(long)", 20.0, 24.0),
        ("gemm", 5.0, 22.0),
        ("Memcpy DtoD", 0.0, 30.0),
    ]
    assert gpu.overlap(spans, gpu.MOVING) == (14.0, 7.0)
    assert gpu.overlap([*spans, ("Memcpy HtoD", 0.0, 6.0)]) == (6.0, 1.0)
    assert gpu.num_kernels(spans) == 1.0
    labels = [event("shardwise::gather [blocks.0]", 0, 1, DeviceType.CUDA), event(gpu.STEP, 0, 9, DeviceType.CUDA)]
    assert gpu.device_spans([*labels, event("gemm", 1, 2, DeviceType.CUDA)]) == [("gemm", 1, 2)]


@pytest.mark.parametrize(
    ("memory", "parameters", "sample", "batch"),
    [
        (80e9, 350e6, 1e9, 32),
        (80e9, 1.3e9, 2e9, 8),
        (24e9, 1.3e9, 2e9, 0),
        (24e9, 350e6, 20e9, 0),
        (1e9, 1, 1, 1 << 29),
    ],
)
def test_the_batch_is_the_largest_power_of_two_that_fits(memory, parameters, sample, batch):
    assert gpu.batch_that_fits(int(memory), int(parameters), int(sample)) == batch


def test_a_model_that_does_not_fit_is_said_to():
    text = gpu.report([gpu.Measured("gpt-1.3b", 0)], {"device": "small"}, "today")
    assert "## gpt-1.3b\n\nThe device has too little memory for it.\n" in text


def test_the_page_says_how_the_tests_ended(tmp_path):
    junit = tmp_path / "tests.xml"
    junit.write_text(
        '<testsuites><testsuite><testcase classname="tests.gpu.a" name="one"/><testcase classname="tests.gpu.a" '
        'name="two"><failure message="boom&#10;more">trace</failure></testcase><testcase classname="b" name="three">'
        '<skipped message="unverified: NCCL refused"/></testcase></testsuite></testsuites>'
    )
    lines = gpu.outcomes(junit)
    assert lines == [
        "1 of 3 passed",
        "failure: tests.gpu.a.two: boom",
        "skipped: b.three: unverified: NCCL refused",
    ]
    assert gpu.report([], {}, "today", lines).endswith("\n- skipped: b.three: unverified: NCCL refused\n")
    assert gpu.outcomes(None) == ["not run"]


def test_a_row_says_what_is_reserved_and_not_allocated_and_what_the_host_takes_for_a_unit():
    turn = gpu.Turn([0.5, 0.2, 0.3], 10_000_000_000, 10_100_000_000, 10_000_000_000, [2.0, 1.5])
    found = gpu.Measured("small", 8, {engine: [turn] for engine in gpu.ENGINES}, dict.fromkeys(gpu.ENGINES, 321.4))
    found.host_us = dict.fromkeys(gpu.ENGINES, 9_000.0) | {"plain": 7_000.0}
    found.num_units, found.collectives_us = 20, (4_000.0, 3_000.0)
    text = gpu.report([found], {}, "today")
    row = "| 300.0 ms | 1.00 (1.00 to 1.00) | 10.00 GB | 1.000 | 10.10 GB | 1.0% | 9.0 ms | 321 | 1.500000 |"
    assert f"| zero3 {row}" in text
    assert "The host takes 100 us for each unit of zero3 (20) beyond the plain model's 7.0 ms." in text
    assert "Gathers and reductions of zero3, of 4.0 ms hidden behind computation: 75%." in text
    assert "Copies with offload_policy=cpu, none were seen." in text


@pytest.mark.slow
@on_ranks(1, timeout_s=120)
def test_the_engines_train_alike_and_every_one_has_its_row() -> None:
    """The whole measurement on the CPU, where there is nothing to allocate or to wait for."""
    found = gpu.measure("gpt-nano", torch.device("cpu"), 1, 2)
    assert all(found.turns[engine][0].predicted_bytes for engine in gpu.OURS)
    assert found.num_units > 5
    folder = Path(tempfile.mkdtemp())
    gpu.write(folder, [found], {"device": "none"})
    (page,) = folder.glob("*.md")
    assert json.loads(page.with_suffix(".json").read_text())["models"][0]["name"] == "gpt-nano"
    (text, losses) = page.read_text(), {engine: turns[0].losses for engine, turns in found.turns.items()}
    for engine in gpu.ENGINES:
        assert losses[engine] == pytest.approx(losses["torch-fsdp2"], abs=2e-2)
        assert f"| {engine} | " in text
    assert f"The host waits for the device in {gpu.PROFILED_STEPS} steady steps of zero3: nowhere." in text


def test_the_page_sets_each_way_to_treat_activations_beside_keeping_them():
    """Steps of 100, 101 and 130 ms; of the last way 200 ms in the second round."""
    turns = {"kept": (0.1, 0.1), "on the host": (0.101, 0.101), "recomputed": (0.13, 0.2)}
    ways = {
        way: [gpu.Turn([time_s] * 3, 2_000_000_000, 0, None, [1.5]) for time_s in times] for way, times in turns.items()
    }
    lines = gpu._lines_of_ways(ways)
    assert lines[2:5] == [
        "| kept | 100.0 ms | 1.000 (1.000 to 1.000) | 2.00 GB | 1.500000 |",
        "| on the host | 101.0 ms | 1.010 (1.010 to 1.010) | 2.00 GB | 1.500000 |",
        "| recomputed | 165.0 ms | 1.650 (1.300 to 2.000) | 2.00 GB | 1.500000 |",
    ]
    assert gpu._lines_of_ways({}) == []
