"""A user's own parts: two towers, pairs of vectors, a contrastive loss, a metric, a schedule and a callback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.launch import heartbeat
from shardwise.spec.run_files import LOGS

WIDTH, LEFT, RIGHT = 32, 12, 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return F.normalize(x, dim=-1)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Tower(LEFT), Tower(RIGHT)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, left: Tensor, right: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.scale * self.left(left), self.right(right)


class Pairs(torch.utils.data.Dataset):
    """Vectors and their images under one map; each pair counts by its own weight."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.left = torch.randn(count, LEFT, generator=generator)
        self.right = self.left @ torch.randn(LEFT, RIGHT, generator=torch.Generator().manual_seed(7))
        self.weight = torch.rand(count, generator=generator)

    def __len__(self) -> int:
        return len(self.left)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"left": self.left[index], "right": self.right[index], "weight": self.weight[index]}


def scores(output: tuple[Tensor, Tensor]) -> Tensor:
    return output[0] @ output[1].T


def loss(output: tuple[Tensor, Tensor], batch: Mapping[str, Tensor]) -> sw.Mean:
    """Weighted: the mean over all ranks and microbatches is none of means."""
    each = F.cross_entropy(scores(output), torch.arange(len(output[0]), device=output[0].device), reduction="none")
    return sw.Mean((each * batch["weight"]).sum(), batch["weight"].sum())


def accuracy(output: tuple[Tensor, Tensor], batch: Mapping[str, Tensor]) -> sw.Mean:
    found = scores(output).argmax(1)
    return sw.Mean((found == torch.arange(len(found), device=found.device)).sum(), len(found))


class Note(sw.Callback):
    """Prints what it is told."""

    def on_start(self, run: Any) -> None:
        run.progress.say(f"told: start at {run.step}")

    def on_step(self, run: Any, record: Any) -> None:
        if record.step == 12 and run.control.is_first:
            run.progress.say(f"told: step 12 has loss {record.loss:.5f}")

    def on_evaluation(self, run: Any, values: Mapping[str, float]) -> None:
        run.progress.say(f"told: {sorted(values)} at {run.step}")

    def on_save(self, run: Any) -> None:
        if run.control.is_first:
            beat = heartbeat.read(run.directory / LOGS, 0)  # which says what is safe if this raises
            run.progress.say(f"told: saved {beat and beat.saved_step}")

    def on_end(self, run: Any) -> None:
        run.progress.say("told: end")


def halved(step: int, steps: int) -> float:
    return 1.0 if step < steps // 2 else 0.5


def optimizer(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """Two peak rates, the second group's ten times smaller."""
    groups[1]["lr"] = lr / 10
    return torch.optim.NAdam(groups, lr=lr)


spec = sw.TrainSpec(
    model=Towers,
    data=Pairs(256, 0),
    eval_data=Pairs(64, 1),
    loss=loss,
    metrics={"accuracy": accuracy},
    optimizer=optimizer,
    schedule=halved,
    callbacks=[Note()],
)
