"""``ShardwiseAccelerator`` on two ranks beside ``Accelerator`` in one process: the same loop, losses and weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shardwise as sw
from shardwise.models import gpt
from shardwise.spec.errors import PlanError, StateError
from shardwise.testing import run_on_ranks
from tests.common.ranks import refusal

pytestmark = pytest.mark.integrations


def options() -> dict[str, Any]:
    from accelerate import DataLoaderConfiguration

    loading = DataLoaderConfiguration(split_batches=True)  # else accelerate steps schedulers once for each process
    return {"gradient_accumulation_steps": 2, "cpu": True, "dataloader_config": loading}


def train(accelerator: Any, folder: str, resume: str | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """A loop as accelerate's own examples have it."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(64, 8, generator=generator), torch.randn(64, 1, generator=generator))
    loader = DataLoader(data, batch_size=8)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if resume is not None:
        accelerator.load_state(resume)
    told = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                told.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.3)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            told.append(float(accelerator.gather(loss.detach()[None]).mean()))
    accelerator.save_state(folder)
    return told, accelerator.get_state_dict(model)


def plain(folder: str, resume: str | None = None) -> tuple[list[float], dict[str, Tensor]]:
    from accelerate import Accelerator

    return train(Accelerator(**options()), folder, resume)


def sharded(plan: str, folder: str, resume: str | None = None) -> tuple[list[float], dict[str, Tensor]]:
    from shardwise.integrations.accelerate import ShardwiseAccelerator

    return train(ShardwiseAccelerator(plan=plan, **options()), folder, resume)


@pytest.mark.parametrize("plan", ["zero3", "zero1"])
def test_the_loop_gives_the_plain_losses_norms_and_weights_and_goes_on_from_its_state(
    tmp_path: Path, plan: str
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    expected = run_on_ranks(plain, 1, first, timeout_s=60)[0]
    later = run_on_ranks(plain, 1, second, first, timeout_s=60)[0]
    found = run_on_ranks(sharded, 2, plan, f"{first}-{plan}", timeout_s=60)[0]
    moved = run_on_ranks(sharded, 1, "ddp", f"{second}-{plan}", f"{first}-{plan}", timeout_s=60)[0]
    for (told, state), (plain_told, plain_state) in ((found, expected), (moved, later)):
        assert told == pytest.approx(plain_told, rel=1e-5)
        for name, value in plain_state.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


def refuse() -> None:
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    from shardwise.integrations.accelerate import ShardwiseAccelerator
    from shardwise.spec.plan import ParallelPlan

    text = refusal(PlanError, ShardwiseAccelerator, plan=ParallelPlan(pp=2), cpu=True)
    assert "pp=2: ShardwiseAccelerator gives every rank different samples" in text
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    text = refusal(PlanError, ShardwiseAccelerator, cpu=True, kwargs_handlers=[hook])
    assert "got DistributedDataParallelKwargs(comm_hook=...): DistributedDataParallel is not used here" in text
    accelerator = ShardwiseAccelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert "in no parallelized" in refusal(StateError, accelerator.clip_grad_norm_, [torch.ones(3)], 1.0)
    assert "norm_type=-1.0" in refusal(StateError, accelerator.clip_grad_norm_, model.parameters(), 1.0, -1.0)
    divided = sw.parallelize(gpt("gpt-nano"), sw.ParallelPlan(strategy="ddp", tp=2))
    assert "tp=2: ShardwiseAccelerator gives every" in refusal(PlanError, accelerator.prepare, divided)
    os.environ["ACCELERATE_USE_FSDP"] = "true"  # as accelerate launch sets it
    assert "FSDP would shard the model of ShardwiseAccelerator too" in refusal(
        PlanError, ShardwiseAccelerator, cpu=True
    )


def test_what_the_accelerator_cannot_do_is_refused() -> None:
    run_on_ranks(refuse, 2, timeout_s=60)


def save_flat(folder: str) -> None:
    from shardwise.integrations.accelerate import ShardwiseAccelerator

    accelerator = ShardwiseAccelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = accelerator.prepare(torch.optim.AdamW(sw.flat_parameters(model), lr=1e-2))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    for _ in range(2):  # the second time over the first
        accelerator.save_state(folder)
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
    accelerator.load_state(folder)
    assert [state["exp_avg"].tolist() for state in optimizer.state.values()] == [each.tolist() for each in moments]


def test_the_state_of_flat_parameters_is_saved(tmp_path: Path) -> None:
    run_on_ranks(save_flat, 1, str(tmp_path / "flat"), timeout_s=60)
