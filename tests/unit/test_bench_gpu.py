"""The script that measures on GPUs: it refuses where there is none, and reads profiles right."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from bench import gpu
from shardwise.testing import run_on_ranks


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.slow
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "bench.gpu", "--out", str(tmp_path / "results")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("bench.gpu measures on CUDA devices, and ")
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


def measure() -> tuple[str, list[float], list[float]]:
    """The whole measurement on the CPU, where there is nothing to allocate or to wait for."""
    turns, found = gpu.measure("gpt-nano", torch.device("cpu"), 1, 2)
    text = gpu.report(turns, found, {"device": "none"}, "today")
    ours, theirs = (turns[name][0].losses for name in ("zero3", "torch-fsdp2"))
    assert turns["zero3"][0].predicted_bytes
    return text, ours, theirs


@pytest.mark.slow
def test_the_engines_train_alike_and_every_one_has_its_row():
    ((text, ours, theirs),) = run_on_ranks(measure, 1, timeout_s=120)
    assert ours == pytest.approx(theirs, abs=2e-2)
    for engine in gpu.ENGINES:
        assert f"| {engine} | " in text
    assert "The host waits for the device in three steady steps of zero3: nowhere." in text
