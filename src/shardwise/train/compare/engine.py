"""A model under some engine, and its optimizer: every engine makes its steps by the same lines."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.fsdp.wrap import find_units
from shardwise.spec.wrap import WrapPolicy
from shardwise.train.compare.peer import BUILDS, LEARNING_RATE
from shardwise.train.compare.request import OURS, Entrant
from shardwise.train.compare.workload import Workload


class Engine:
    """A model that trains.

    Collective:
        Construction and :meth:`step` are those of the entrant. All of its ranks must call.
    """

    def __init__(self, entrant: Entrant, workload: Workload) -> None:
        """Build the model and put it under the engine.

        Args:
            entrant: Which engine, which strategy.
            workload: Model and loss.
        """
        self.workload = workload
        model = workload.model()
        model.train()
        self.model: nn.Module
        self.optimizer: torch.optim.Optimizer
        if entrant.engine == OURS:
            self.model = sw.parallelize(model, replace(workload.plan, strategy=entrant.strategy))
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        else:
            units = list(find_units(model, cast("str | WrapPolicy", workload.plan.auto_wrap_policy)).values())
            self.model, self.optimizer = BUILDS[entrant.engine](model, units, workload.device)

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """One training step on this rank's batch. Returns its loss, detached."""
        loss = self.workload.loss(self.model, *batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def step_for_all(self, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """What ``len(batches)`` ranks do in a step, in one process: gradients are added in rank order, then divided."""
        losses = []
        for batch in batches:
            loss = self.workload.loss(self.model, *batch)
            loss.backward()
            losses.append(loss.detach())
        count = torch.tensor(len(batches), device=self.workload.device)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(count)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses
