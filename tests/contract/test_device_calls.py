"""How many operations a step asks the device for, and how often the host waits for one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.fsdp import attach, clip
from shardwise.testing import run_on_ranks

PRESETS = ("ddp", "zero1", "zero3")


class Calls(TorchDispatchMode):
    """Counts aten calls by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def blocks(count: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 8), nn.Linear(8, 1024)) for _ in range(count))
    )


def calls_of_clipping(preset: str, count: int) -> tuple[int, int]:
    """Aten calls of ``sw.clip_grad_norm``, and the groups of the model."""
    policy = sw.wrap_by_size(1 << 20)
    model = sw.parallelize(blocks(count), sw.ParallelPlan(strategy=preset, auto_wrap_policy=policy, merge_units=False))
    model(torch.ones(2, 1024)).sum().backward()
    with Calls() as calls:
        sw.clip_grad_norm(model, 1.0)
    return calls.counts.total(), len(list(attach.runtime_of(model, "test").groups))


def clipping() -> dict[str, list[tuple[int, int]]]:
    return {preset: [calls_of_clipping(preset, count) for count in (2, 6)] for preset in PRESETS}


def test_clipping_takes_few_calls_for_each_further_group():
    for found in run_on_ranks(clipping, 2):
        for preset, ((few_calls, few_groups), (calls, groups)) in found.items():
            assert groups - few_groups == 4
            # On the CPU a large gradient is cut into chunks that fit the cache: a view and a split.
            assert calls - few_calls <= 2 * (groups - few_groups), preset
            assert calls <= 30 + 2 * groups, preset


def test_off_the_cpu_the_calls_of_the_norm_do_not_grow_with_the_model():
    found = []
    for count in (1, 1000):
        grads = [torch.empty(1 << 20, device="meta") for _ in range(count)]
        with Calls() as calls:
            clip._sum_of_squares(grads, torch.device("meta"))
        found.append(calls.counts.total())
    assert found[0] == found[1] <= 8
