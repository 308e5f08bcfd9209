"""What is told to the user, once."""

from __future__ import annotations

import copy

import pytest
import torch

import shardwise as sw
from shardwise.launch import log_once
from shardwise.testing import run_on_ranks
from tests.common.ranks import on_ranks


@pytest.mark.parametrize(("device", "num_gpus"), [("cpu", 0), ("cuda", 8), ("meta", 8)])
def test_a_model_where_it_belongs_is_nothing_to_tell(device: str, num_gpus: int) -> None:
    assert log_once.cpu_warning(device, num_gpus) is None


def test_a_model_left_on_the_cpu_of_a_machine_with_gpus_is_told() -> None:
    assert "this machine has 1 GPU: it is" in (log_once.cpu_warning("cpu", 1) or "")
    assert "this machine has 8 GPUs: it is" in (log_once.cpu_warning("cpu", 8) or "")


def left_on_the_cpu() -> list[str]:
    messages: list[str] = []
    torch.cuda.device_count = lambda: 2
    sw.api.parallelize.log_once = messages.append
    sw.parallelize(torch.nn.Linear(2, 2), sw.ParallelPlan(strategy="ddp"))
    return messages


@pytest.mark.parametrize(
    ("dtype", "master_dtype", "count"),
    [(torch.bfloat16, None, 1), (torch.bfloat16, "bf16", 0), (torch.bfloat16, "fp32", 0), (torch.float32, None, 0)],
)
@on_ranks(1)
def test_updates_in_16_bit_are_told_once_unless_they_are_asked_for(dtype, master_dtype, count):
    """On a rank: what is told before the optimizer's first step, at it, and at its second."""
    messages: list[str] = []
    sw.engine.extensions.precision.log_once = messages.append
    plan = sw.ParallelPlan(mp_policy=sw.PrecisionPolicy("bf16", master_dtype=master_dtype))
    model = sw.parallelize(torch.nn.Linear(2, 2, dtype=dtype), plan)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 2)).sum().backward()
    found = [list(messages)]
    for _ in range(2):
        optimizer.step()
        found.append(list(messages))
    before, first, second = found
    assert (len(before), len(first), len(second)) == (0, count, count)
    assert all("updated in bf16, in which small updates are lost" in text for text in first)


def test_parallelize_tells_it() -> None:
    assert any("it is trained on the CPU" in text for text in run_on_ranks(left_on_the_cpu, 1)[0])


@on_ranks(1)
def test_a_large_model_without_blocks_is_said_to_be_one_unit():
    messages = []
    sw.api.parallelize.log_once = messages.append
    model = torch.nn.Sequential(torch.nn.Linear(3200, 3200), torch.nn.ReLU())
    for strategy, policy in (("ddp", "auto"), ("zero3", "none"), ("zero3", "auto")):
        messages.clear()
        sw.parallelize(copy.deepcopy(model), sw.ParallelPlan(strategy=strategy, auto_wrap_policy=policy))
        is_said = [message.startswith("Sequential (10M parameters) has no chain") for message in messages]
        assert any(is_said) is (strategy == "zero3" and policy == "auto")
