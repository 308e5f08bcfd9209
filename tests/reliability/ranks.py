"""Loops of one's own for scenarios: ``python -m tests.reliability.ranks ACT NPROC [FOLDER]``.

Starts itself on NPROC ranks with the launcher of ``shardwise train``, which returns the code of the rank that is the
cause. Each act is what a user's script does with ``sw.parallelize``, ``sw.save`` and ``sw.load``, or with a Comm.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.axes import open_comms
from shardwise.launch.elastic import launch
from shardwise.launch.world import joined_world, read_world

MODULE = "tests.reliability.ranks"


class Odd(nn.Module):
    """Shapes that no number of ranks divides, a scalar, tied weights, and a part that is frozen."""

    def __init__(self, width: int = 7, *, with_more: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 13), nn.Tanh(), nn.Linear(13, width)) for _ in range(2)
        )
        self.frozen = nn.Linear(width, width).requires_grad_(requires_grad=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        if with_more:
            self.more = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.embed(x))
        for block in self.blocks:
            x = x + block(x) * self.scale
        if hasattr(self, "more"):
            x = x + self.more.sum()
        return self.head(x)


class Wanders(nn.Module):
    """A model whose ranks may take different paths."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, way: tuple[int, ...]) -> Tensor:
        for index in way:
            x = self.blocks[index](x)
        return x


def made(width: int = 7, *, dtype: torch.dtype = torch.float32, with_more: bool = False, name: str = "AdamW") -> Any:
    """A model under ZeRO-3 with its optimizer, the same numbers on every number of ranks."""
    torch.manual_seed(0)
    model = sw.parallelize(Odd(width, with_more=with_more).to(dtype), sw.ParallelPlan(strategy="zero3"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, getattr(torch.optim, name)(trained, lr=1e-2)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """The loss of each step: one row a rank of twelve rows over all."""
    rank, size, losses = torch.distributed.get_rank(), torch.distributed.get_world_size(), []
    for step in steps:
        rows = torch.randint(11, (12, 5), generator=torch.Generator().manual_seed(step))
        own = rows[rank * 12 // size : (rank + 1) * 12 // size]
        loss = nn.functional.cross_entropy(model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(float(total) / size)
    return losses


def saved(folder: Path) -> Path:
    """Train for three steps, and save."""
    path = folder / "step-00000003"
    if not path.exists():
        model, optimizer = made()
        trained(model, optimizer, range(3))
        sw.save(path, model, optimizer, state={"step": 3})
    return path


# -- acts: what a rank does with a folder


def saves(folder: Path) -> None:
    """Train for six steps; save after three; the losses go to whole.json."""
    model, optimizer = made()
    losses = trained(model, optimizer, range(3))
    sw.save(folder / "step-00000003", model, optimizer, state={"step": 3})
    losses += trained(model, optimizer, range(3, 6))
    _write(folder / "whole.json", losses, model)


def goes_on(folder: Path) -> None:
    """Load what was saved after three steps, on this number of ranks, and train three more."""
    torch.manual_seed(99)
    model, optimizer = made()
    sw.load(folder / "step-00000003", model, optimizer)
    size = torch.distributed.get_world_size()
    _write(folder / f"resumed-{size}.json", trained(model, optimizer, range(3, 6)), model)


def _write(path: Path, losses: list[float], model: nn.Module) -> None:
    values = {name: value.tolist() for name, value in sw.full_state_dict(model).items()}
    if torch.distributed.get_rank() == 0:
        path.write_text(json.dumps({"losses": losses, "values": values}))


def other_shape(folder: Path) -> None:
    """Load into a wider model."""
    sw.load(saved(folder), *made(width=8))


def other_names(folder: Path) -> None:
    """Load what has a parameter less, and, on the way, one that the model has not."""
    path = saved(folder)
    model, optimizer = made(with_more=True)
    sw.save(folder / "step-00000004", model, optimizer, state={"step": 4})
    try:
        sw.load(folder / "step-00000004", *made())
    except sw.CheckpointError as error:
        print(f"unexpected: {error}", flush=True)
    sw.load(path, *made(with_more=True))


def other_dtype(folder: Path) -> None:
    """Load into a model in bf16."""
    sw.load(saved(folder), *made(dtype=torch.bfloat16))


def other_optimizer(folder: Path) -> None:
    """Load the state of AdamW into Adam's; before that, without the optimizer, which is allowed."""
    path = saved(folder)
    model, optimizer = made(name="Adam")
    sw.load(path, model)
    print(f"reset: {len(optimizer.state)} parameters have state", flush=True)
    sw.load(path, model, optimizer)


def other_collective(folder: Path) -> None:
    """Rank 1 runs the blocks in another order, which training and ``sw.eval_step`` may: here neither is told."""
    del folder
    torch.manual_seed(0)
    plan = sw.ParallelPlan(strategy="zero3", auto_wrap_policy=sw.wrap_by_class(nn.Linear))
    model = sw.parallelize(Wanders(), plan)
    with torch.no_grad():
        model(torch.ones(2, 8), (0, 2, 1) if torch.distributed.get_rank() == 1 else (0, 1, 2))


def other_operation(folder: Path) -> None:
    """Rank 1 reduces what the others gather."""
    del folder
    comm, _ = open_comms(torch.device("cpu"), "control")
    buffer = torch.zeros(10 * comm.size)
    (comm.all_reduce if comm.rank == 1 else comm.all_gather)(buffer, unit="weights").wait()


def other_sizes(folder: Path) -> None:
    """Rank 1 has twice as many elements."""
    del folder
    comm, _ = open_comms(torch.device("cpu"), "control")
    comm.all_reduce(torch.ones(20 if comm.rank == 1 else 10), unit="weights").wait()


def other_dtypes(folder: Path) -> None:
    """Rank 1 has integers of as many bytes."""
    comm, _ = open_comms(torch.device("cpu"), "control")
    numbers = torch.ones(10, dtype=torch.int32 if comm.rank == 1 else torch.float32)
    comm.all_reduce(numbers, unit="weights").wait()
    (folder / f"garbage-{comm.rank}").write_text(str(numbers.tolist()))


def more_batches(folder: Path) -> None:
    """Rank 1 has one batch less."""
    del folder
    model, optimizer = made()
    steps = 3 - (torch.distributed.get_rank() == 1)
    for step in range(steps):
        model(torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


ACTS: dict[str, Callable[[Path], None]] = {
    act.__name__: act
    for act in (
        *(saves, goes_on, other_shape, other_names, other_dtype, other_optimizer),
        *(other_collective, other_operation, other_sizes, other_dtypes, more_batches),
    )
}


def main() -> int:
    """The launcher, or one of its ranks."""
    world = read_world()
    name, num_ranks, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    if world.source == "alone":
        return launch(MODULE, sys.argv[1:], num_ranks, log_dir=folder / "logs", advice="look at the rank's log")
    begin = time.monotonic()
    with joined_world(world, timeout_s=60):
        try:
            ACTS[name](folder)
        finally:
            (folder / f"seconds-{os.environ['RANK']}").write_text(str(time.monotonic() - begin))
    return 0


if __name__ == "__main__":
    sys.exit(main())
