"""What is told to the user, once."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from shardwise.launch import notice
from shardwise.testing import run_on_ranks


@pytest.mark.parametrize(("device", "num_gpus"), [("cpu", 0), ("cuda", 8), ("meta", 8)])
def test_a_model_where_it_belongs_is_nothing_to_tell(device: str, num_gpus: int) -> None:
    assert notice.cpu_notice(device, num_gpus) is None


def test_a_model_left_on_the_cpu_of_a_machine_with_gpus_is_told() -> None:
    assert "this machine has 1 GPU: it is" in (notice.cpu_notice("cpu", 1) or "")
    assert "this machine has 8 GPUs: it is" in (notice.cpu_notice("cpu", 8) or "")


def left_on_the_cpu() -> list[str]:
    told: list[str] = []
    torch.cuda.device_count = lambda: 2
    sw.api.parallelize.tell_once = told.append
    sw.parallelize(torch.nn.Linear(2, 2), sw.ParallelPlan(strategy="ddp"))
    return told


def test_parallelize_tells_it() -> None:
    assert any("it is trained on the CPU" in text for text in run_on_ranks(left_on_the_cpu, 1)[0])
