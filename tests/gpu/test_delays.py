"""NCCL that is slow, on one GPU: every collective begins late and ends late, on its stream, while the host goes on.

In bf16 with fp32 masters a world of one gathers and reduces through buffers that are freed. What is released is
filled with NaN. A result that is used too early, or memory that is given away too early, shows as other losses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.nccl import NcclComm
from shardwise.engine.extensions import safety
from shardwise.testing import run_on_ranks

#: About a millisecond: a step of this model computes for less.
CYCLES = 2_000_000
PLANS: dict[str, dict[str, Any]] = {
    "zero3": {"strategy": "zero3"},
    "zero2": {"strategy": "zero2"},
    "ddp": {"strategy": "ddp"},
    "hsdp": {"strategy": "hsdp"},
    "recomputed": {"strategy": "zero3", "activation_checkpointing": "full"},
    "offloaded": {"strategy": "zero3", "offload_policy": "cpu"},
    "one slot of gradients": {"strategy": "zero3", "gradient_buffers": 1},
}


def build(device: torch.device, **overrides: Any) -> nn.Module:
    torch.manual_seed(0)
    return sw.models.gpt("gpt-nano", device=device, **overrides)


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(step)).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@contextlib.contextmanager
def slow_nccl() -> Iterator[None]:
    plain = NcclComm._on_stream

    @contextlib.contextmanager
    def slow(self: NcclComm, *given: Any) -> Iterator[Any]:
        with plain(self, *given) as handle:
            torch.cuda._sleep(CYCLES)
            yield handle
            torch.cuda._sleep(CYCLES)

    with mock.patch.object(NcclComm, "_on_stream", slow), safety.checks():
        yield


def train(plan: dict[str, Any], device: torch.device) -> tuple[list[float], list[Tensor]]:
    precision = sw.PrecisionPolicy(param_dtype="bf16", reduce_dtype="fp32")
    layers = {"auto_wrap_policy": sw.wrap_by_class({sw.models.Block}), "merge_units": False}
    model = sw.parallelize(build(device), sw.ParallelPlan(**plan, **layers, mp_policy=precision))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(4):
        loss = model(*batch(step, device))
        loss.backward()
        sw.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses], [value.cpu() for value in sw.full_state_dict(model).values()]


def compare(name: str, device_name: str) -> tuple[list[float], list[float], bool]:
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    device = torch.device(device_name)
    quick_losses, quick = train(PLANS[name], device)
    with slow_nccl():
        slow_losses, slow = train(PLANS[name], device)
    return quick_losses, slow_losses, all(torch.equal(a, b) for a, b in zip(quick, slow, strict=True))


@pytest.mark.parametrize("name", PLANS)
def test_late_collectives_change_nothing(name: str) -> None:
    ((quick, slow, is_same),) = run_on_ranks(compare, 1, name, "cuda", process_group=False)
    assert slow == quick
    assert is_same
