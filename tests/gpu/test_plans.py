"""The plans of ``tests/streams`` on a GPU: ranks that share it over Gloo, and one rank over NCCL under the detector.

Numbers stand beside those of as many CPU ranks. Kernels of a GPU add up in other orders, so they are near, not equal.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.testing import run_on_ranks, streams
from tests.launch.test_join import free_port
from tests.streams import plans

#: Plans without another axis than data parallelism: they run on one rank too.
ALONE = [
    name
    for name, case in plans.CASES.items()
    if not {"tp", "pp", "cp", "ep", "dp_replicate"} & case.plan.keys() and name != "staged"
]
#: What else a program does with a model, on two ranks.
OTHERS = [name for name in plans.OTHERS if name not in plans.LONE and name != "deleted under way"]
#: What stands on CPUs for a case that is of a GPU alone.
ON_CPU = {"another stream": "zero3 in bf16"}
PARTS = 4


def drawn_on_cpu(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """The same weights on any device."""

    def build(**overrides: Any) -> nn.Module:
        where, plans.device = plans.device, lambda: torch.device("cpu")
        try:
            return make(**overrides).to(where())
        finally:
            plans.device = where

    return build


def losses_of(names: list[str], device_name: str) -> dict[str, list[float]]:
    device = torch.device(device_name)
    plans.device = lambda: device
    plans.build, plans.Branches = drawn_on_cpu(plans.build), drawn_on_cpu(plans.Branches)
    every = {**plans.OTHERS, **plans.WIDE, **plans.CASES}
    given = ON_CPU if device_name == "cpu" else {}
    return {name: every[given.get(name, name)](streams.Seen())[0] for name in names}


def check(names: list[str], world: int) -> None:
    on_gpu, on_cpu = (run_on_ranks(losses_of, world, names, device, timeout_s=280) for device in ("cuda", "cpu"))
    off = {}
    for rank, (got, expected) in enumerate(zip(on_gpu, on_cpu, strict=True)):
        for name in names:
            plan = getattr({**plans.WIDE, **plans.CASES}.get(name), "plan", plans.BF16)
            near = 1e-4 if "mp_policy" not in plan and "quantized_reduce" not in plan else 2e-2
            if got[name] != pytest.approx(expected[name], rel=0.0 if name.startswith("generated") else near):
                off[f"{name}, rank {rank}"] = got[name], expected[name]
    assert not off


@pytest.mark.parametrize("part", range(PARTS))
def test_two_ranks_that_share_the_gpu_have_the_numbers_of_cpus(part: int) -> None:
    check([*plans.CASES, *OTHERS][part::PARTS], 2)


@pytest.mark.parametrize("part", range(2))
def test_four_ranks_that_share_the_gpu_have_the_numbers_of_cpus(part: int) -> None:
    check(list(plans.WIDE)[part::2], 4)


def seen_by(names: list[str], port: int) -> dict[str, list[str]]:
    """Findings of the detector on the streams of the GPU, a world of one over NCCL."""
    from shardwise.launch.world import World, init_process_group

    torch.cuda.set_device(0)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    init_process_group(World(0, 1, 0, 1, 1, "127.0.0.1", port, "variables"), torch.device("cuda", 0), timeout_s=60)
    found: dict[str, Any] = {}
    for name in names:
        with streams.watched() as seen:
            plans.CASES[name](seen)
        found[name] = [str(finding) for finding in seen.findings]
    return found


def race() -> int:
    """Findings where a stream writes what another one reads without a wait."""
    side = torch.cuda.Stream()
    with streams.watched() as seen:
        x = torch.zeros(1 << 20, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            x.add_(1)
        x.sum()
    return len(seen.findings)


def test_the_detector_finds_a_race_on_the_gpu() -> None:
    assert run_on_ranks(race, 1, process_group=False) == [1]


@pytest.mark.parametrize("part", range(2))
def test_the_detector_finds_no_race_on_the_gpu(part: int) -> None:
    names = ALONE[part::2]
    (found,) = run_on_ranks(seen_by, 1, names, free_port(), process_group=False, timeout_s=280)
    assert found == {name: [] for name in names}
