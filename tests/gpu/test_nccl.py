"""Two ranks over NCCL: on two GPUs, or on one, where each process says that it is another machine.

NCCL refuses two ranks on one GPU of one machine. With a ``NCCL_HOSTID`` of its own each takes the other for a rank far
away; whether NCCL then works is not documented. Where it does not, tests on one GPU are skipped as unverified.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm import stall
from shardwise.comm.axes import open_comms
from shardwise.launch.world import World, init_process_group
from shardwise.spec.errors import CommTimeout, RankDisagreement
from shardwise.testing import RankFailure, run_on_ranks
from tests.launch.test_join import free_port


def join(device_name: str, port: int) -> torch.device:
    rank = int(os.environ["RANK"])
    device = torch.device("cpu")
    if device_name == "cuda":
        num_gpus = torch.cuda.device_count()
        if num_gpus < 2:
            os.environ["NCCL_HOSTID"] = f"shardwise-{rank}"
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        device = torch.device("cuda", rank % num_gpus)
        torch.cuda.set_device(device)
    init_process_group(World(rank, 2, rank, 2, 1, "127.0.0.1", port, "variables"), device, timeout_s=60)
    return device


def first_sum(device_name: str, port: int) -> float:
    device = join(device_name, port)
    comm, _ = open_comms(device)
    value = torch.ones(1, device=device)
    comm.all_reduce(value, unit="first").wait()
    return value.item()


@pytest.fixture(scope="module", autouse=True)
def _nccl_connects() -> None:
    try:
        assert run_on_ranks(first_sum, 2, "cuda", free_port(), process_group=False, timeout_s=90) == [2.0, 2.0]
    except RankFailure as failure:
        if torch.cuda.device_count() < 2:
            pytest.skip(f"unverified: NCCL does not connect two processes on one GPU: {str(failure).splitlines()[0]}")
        raise


def build(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return sw.models.gpt("gpt-nano", device=device)


def batch(step: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(100 * step + rank)).to(device)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def train(device_name: str, port: int) -> dict[str, tuple[float, float]]:
    """By strategy, the largest difference of losses and of parameters from one process that takes both batches."""
    device = join(device_name, port)
    rank, found = dist.get_rank(), {}
    plain = build(device)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = []
    for step in range(4):
        losses = [plain(*batch(step, other, device)) for other in range(2)]
        (sum(losses) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(losses[rank].item())
    for strategy in ("ddp", "zero2", "zero3"):
        model = sw.parallelize(build(device), sw.ParallelPlan(strategy=strategy))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        got = []
        for step in range(4):
            loss = model(*batch(step, rank, device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            got.append(loss.item())
        with sw.full_parameters(model):
            pairs = zip(model.parameters(), plain.parameters(), strict=True)
            off = max(float((a - b).detach().abs().max()) for a, b in pairs)
        found[strategy] = max(abs(a - b) for a, b in zip(got, expected, strict=True)), off
    return found


def test_two_ranks_train_as_one_process_does() -> None:
    for found in run_on_ranks(train, 2, "cuda", free_port(), process_group=False, timeout_s=120):
        for strategy, (loss, parameters) in found.items():
            assert loss < 1e-4, strategy
            assert parameters < 1e-4, strategy


def go_wrong(device_name: str, port: int, what: str) -> str:
    """Ranks issue different collectives, or one of them none; the host goes on until it is told."""
    device = join(device_name, port)
    stall.STALL_S, stall.INTERVAL_S, stall.IDLE_INTERVAL_S = 0.6, 0.1, 0.2
    rank = dist.get_rank()
    comm, _ = open_comms(device)
    comm.barrier()
    stall.StallWatch.of(dist.group.WORLD).limit_s = 3.0 if what == "silent" else 60.0
    size = 1 << 20
    kinds: dict[str, Any] = {
        "blocks.1": lambda: comm.all_gather(torch.zeros(2 * size, device=device), unit="blocks.1"),
        # NCCL does not compare kinds: the rank that asks for more waits for ever, the other one may be done.
        "blocks.2": lambda: comm.all_reduce(torch.zeros(64 * size, device=device), unit="blocks.2"),
    }
    for kind in kinds.values():  # NCCL connects ranks in the first call of a kind, and the host waits in it
        kind().wait()
    torch.cuda.synchronize()
    handles = []
    if what == "differ" or rank == 0:
        handles.append(kinds["blocks.1" if rank == 0 else "blocks.2"]())
    start, told = time.monotonic(), "never told"
    while time.monotonic() - start < 30 and told == "never told":
        time.sleep(0.2)
        try:
            if time.monotonic() - start > 8:
                handles.append(kinds["blocks.1"]())
        except (RankDisagreement, CommTimeout) as error:
            told = f"{type(error).__name__}: {error}"
    time.sleep(4)  # the other one is told before this one leaves
    return told


@pytest.mark.parametrize(("what", "kind"), [("differ", "RankDisagreement"), ("silent", "CommTimeout")])
def test_ranks_whose_devices_wait_for_ever_are_told(what: str, kind: str) -> None:
    for text in run_on_ranks(go_wrong, 2, "cuda", free_port(), what, process_group=False, timeout_s=90):
        assert text.startswith(kind)
        assert "blocks.1" in text
