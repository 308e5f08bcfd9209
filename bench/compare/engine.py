"""A model under some engine, and its optimizer: every engine makes its steps by the same lines."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

import shardwise as sw
from bench.compare.peer import BUILDS
from bench.compare.request import OURS, Entrant
from bench.compare.trainee import LEARNING_RATE, Trainee
from bench.compare.variant import parse
from bench.compare.workload import Workload
from shardwise.api import data_parallel
from shardwise.features.wrap import find_units
from shardwise.spec.policies import WrapPolicy


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
        if entrant.engine == OURS:
            variant = parse(entrant.strategy)
            sharded = sw.parallelize(model, variant.applied_to(workload.plan))
            if variant.is_threaded:
                data_parallel.install(sharded, workload.devices)  # a thread for each, on the CPU too
            parameters = sw.flat_parameters(sharded) if variant.is_flat else sharded.parameters()
            optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
            self.trainee = Trainee.with_optimizer(sharded, optimizer)
        else:
            units = list(find_units(model, cast("str | WrapPolicy", workload.plan.auto_wrap_policy)).values())
            self.trainee = BUILDS[entrant.engine](model, units, workload.device)

    @property
    def model(self) -> nn.Module:
        """The model, as the engine has it."""
        return self.trainee.model

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """One training step on this rank's batch. Returns its loss, detached."""
        loss = self.workload.loss(self.model, *batch)
        self.trainee.backward(loss)
        self.trainee.update()
        return loss.detach()

    def step_for_all(self, batches: list[tuple[Tensor, Tensor]], group_size: int) -> list[Tensor]:
        """What ``len(batches)`` ranks do in a step, in one process.

        Gradients are added in rank order inside each group of ``group_size`` ranks, then over the groups, then divided.
        """
        losses = []
        totals: dict[nn.Parameter, Tensor] = {}
        for rank, batch in enumerate(batches):
            loss = self.workload.loss(self.model, *batch)
            loss.backward()
            losses.append(loss.detach())
            if (rank + 1) % group_size == 0:
                for parameter in self.model.parameters():
                    grad, parameter.grad = parameter.grad, None
                    if grad is not None:
                        totals[parameter] = totals[parameter].add_(grad) if parameter in totals else grad
        count = torch.tensor(len(batches), device=self.workload.device)
        for parameter, total in totals.items():
            parameter.grad = total.div_(count)
        self.trainee.update()
        return losses
