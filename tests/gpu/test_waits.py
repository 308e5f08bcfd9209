"""Steps in which the host must not wait for the device: parameters that are not used, experts, tensor parallelism."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.launch.world import World, init_process_group
from shardwise.testing import run_on_ranks
from tests.launch.test_join import free_port


class Branches(nn.Module):
    """Every step leaves out another branch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 64)
        self.ways = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor, left_out: int) -> Tensor:
        x = self.stem(x)
        for index, way in enumerate(self.ways):
            if index != left_out:
                x = x + way(x)
        return x.square().mean()


def steps_without_waits(model: nn.Module, batches: list[tuple[Any, ...]], device: torch.device) -> int:
    """Steps that ran with every wait an error, after three that warmed up."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device.type == "cuda")
    num_steps = 0
    for index, batch in enumerate(batches):
        if index == 3 and device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        num_steps += index >= 3
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    return num_steps


def unused(device_name: str) -> int:
    device = torch.device(device_name)
    torch.manual_seed(0)
    model = sw.parallelize(Branches().to(device), sw.ParallelPlan(strategy="zero3"))
    x = torch.randn(8, 64, device=device)
    return steps_without_waits(model, [(x, step % 4) for step in range(8)], device)


def test_parameters_that_are_not_used_cost_no_wait() -> None:
    assert run_on_ranks(unused, 1, "cuda", process_group=False) == [5]


def tokens(device: torch.device) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(0)).to(device)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def experts(device_name: str) -> int:
    """Steps of a GPT whose feed-forwards are mixtures of experts."""
    device = torch.device(device_name)
    torch.manual_seed(0)
    model = sw.models.gpt("gpt-nano", num_experts=4, device=device)
    return steps_without_waits(sw.parallelize(model), [tokens(device)] * 6, device)


@pytest.mark.xfail(reason="a mixture reads once how many tokens go to each expert", strict=False)
def test_experts_cost_no_wait() -> None:
    assert run_on_ranks(experts, 1, "cuda", process_group=False) == [3]


def tensor_parallel(device_name: str, port: int) -> int:
    rank = int(os.environ["RANK"])
    device = torch.device(device_name, rank) if device_name == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    init_process_group(World(rank, 2, rank, 2, 1, "127.0.0.1", port, "variables"), device, timeout_s=60)
    torch.manual_seed(0)
    model = sw.parallelize(sw.models.gpt("gpt-nano", device=device), sw.ParallelPlan(strategy="zero3", tp=2))
    return steps_without_waits(model, [tokens(device)] * 6, device)


def test_tensor_parallelism_costs_no_wait() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert run_on_ranks(tensor_parallel, 2, "cuda", free_port(), process_group=False) == [3, 3]
