"""Two to four ranks on one CUDA device over Gloo, by way of host memory: equal to one process on that device.

``tests/comm/test_staged.py`` runs the same function on the CPU, where nothing is staged.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, distributed, nn

import shardwise as sw
from shardwise.comm.staged import StagedComm
from shardwise.engine.storage.attachment import engine_of
from shardwise.testing import run_on_ranks

STRATEGIES = ("ddp", "zero1", "zero2", "shard_grad_op", "zero3")
STEPS = 4


def build(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return sw.models.gpt("gpt-nano").to(device)


def batch(step: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(100 * step + rank)).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def one_process(world: int, device: torch.device) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Gradients are added up and divided on the CPU, in rank order: that is where Gloo's sums are."""
    model = build(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        total: list[Tensor] = []
        losses.append([])
        for rank in range(world):
            loss = model(*batch(step, rank, device))
            loss.backward()
            losses[-1].append(loss.item())
            grads = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
            total = [a + b for a, b in zip(total, grads, strict=True)] if total else grads
            optimizer.zero_grad()
        for parameter, grad in zip(model.parameters(), total, strict=True):
            parameter.grad = (grad / world).to(device)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


def train(strategy: str, device: torch.device) -> tuple[list[float], dict[str, Tensor]]:
    model = sw.parallelize(build(device), sw.ParallelPlan(strategy=strategy))
    is_staged = {isinstance(comm, StagedComm) for comm in engine_of(model, "test").comms}
    assert is_staged == {device.type == "cuda"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        loss = model(*batch(step, distributed.get_rank(), device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.cpu() for name, value in sw.full_state_dict(model).items()}


def differing(device_name: str) -> dict[str, list[str]]:
    """By strategy, what differs from one process; parameters are looked at on rank 0."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    device, rank = torch.device(device_name), distributed.get_rank()
    expected_losses, expected = one_process(distributed.get_world_size(), device)
    verdict = {}
    for strategy in STRATEGIES:
        losses, state = train(strategy, device)
        found = [] if losses == [each[rank] for each in expected_losses] else ["losses"]
        verdict[strategy] = found + [name for name, value in state.items() if not torch.equal(value, expected[name])]
        assert bool(state) == (rank == 0)
    return verdict


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_that_share_a_gpu_over_gloo_equal_one_process(world: int) -> None:
    for found in run_on_ranks(differing, world, "cuda", timeout_s=280):
        assert set(found) == set(STRATEGIES)
        assert not any(found.values()), found
