"""The engine on one CUDA device, a world of one over NCCL."""

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.api.summary import predict
from shardwise.engine.storage.attachment import engine_of
from shardwise.testing import run_on_ranks

STRATEGIES = ("ddp", "zero1", "zero2", "shard_grad_op", "zero3", "hsdp")


def build(hidden: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return sw.models.gpt("gpt-nano", hidden=hidden).cuda()


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 64, (2, 17), generator=generator).cuda() for _ in range(count)]
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]


def train(strategy: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = build()
    if strategy is not None:
        sw.parallelize(model, sw.ParallelPlan(strategy=strategy))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches(5):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = model.state_dict() if strategy is None else sw.full_state_dict(model)
    return losses, {name: value.cpu() for name, value in state.items()}


def compare_all() -> dict[str, bool]:
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    expected_losses, expected = train(None)
    verdict = {}
    for strategy in STRATEGIES:
        losses, state = train(strategy)
        verdict[strategy] = losses == expected_losses and all(torch.equal(state[k], expected[k]) for k in expected)
    return verdict


def test_every_strategy_equals_one_process_on_a_world_of_one() -> None:
    (verdict,) = run_on_ranks(compare_all, 1, process_group=False)
    assert verdict == dict.fromkeys(STRATEGIES, True)


def syncs_in_steady_state() -> int:
    model = sw.parallelize(build(), sw.ParallelPlan(strategy="zero3"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    steps = batches(6)
    for index, batch in enumerate(steps):
        if index == 3:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    return 0


def test_the_host_does_not_wait_for_the_device_in_the_steady_state() -> None:
    assert run_on_ranks(syncs_in_steady_state, 1, process_group=False) == [0]


def forget_workspaces() -> None:
    """Free what torch has given cuBLAS: 32 MiB for each thread that multiplies on a Hopper GPU."""
    if torch.version.cuda:
        torch._C._cuda_clearCublasWorkspaces()


def held_and_predicted(strategy: str) -> tuple[int, int]:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = sw.parallelize(build(hidden=512), sw.ParallelPlan(strategy=strategy))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches(3):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    del batch
    torch.cuda.synchronize()
    forget_workspaces()
    return torch.cuda.memory_allocated() - before, predict(engine_of(model, "test")).total


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_bytes_held_between_steps_are_those_of_the_formula(strategy: str) -> None:
    ((held, predicted),) = run_on_ranks(held_and_predicted, 1, strategy, process_group=False)
    assert held == pytest.approx(predicted, rel=0.02)
