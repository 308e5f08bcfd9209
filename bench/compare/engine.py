"""A model under some engine: model, loss, batches and steps by the same lines for every engine."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

import shardwise as sw
from bench.compare.peer import BUILDS, LEARNING_RATE, Trainee
from bench.compare.request import OURS, SEED, Case, Entrant, Request, parse
from shardwise.api import data_parallel
from shardwise.engine.extensions.wrap import find_units
from shardwise.models import gpt, gpt_config
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.policies import WrapPolicy
from shardwise.train.config.resolve import RunConfig, resolve
from shardwise.train.config.sections import read_config
from shardwise.train.data.samples import RandomPart, open_data
from shardwise.train.model import build
from shardwise.train.model.build import to_tensors


class Workload:
    """What one rank's engine trains on.

    Attributes:
        plan: Of a configuration; for named cases the default one. Its strategy is the entrant's.
        objective: Forward and loss.
    """

    def __init__(self, request: Request, device: torch.device) -> None:
        """Open the data.

        Args:
            request: Names the case.
            device: Where models and batches are made.
        """
        self.case: Case = request.case
        self.num_ranks = request.num_ranks
        self.device = device
        self._resolved: RunConfig | None = None
        self.plan = ParallelPlan()
        self.objective = build.objective(is_from_hf=False, cp=1)
        if self.case.config is None:
            self._part = RandomPart(SEED, 0, self.case.model["vocab_size"], self.case.seq_len)
            return
        resolved = self._resolved = resolve(
            read_config(Path(self.case.config), []), request.num_ranks, raises_masters=False
        )
        self.plan, config = resolved.plan, resolved.config
        self.objective = build.objective_of(resolved)
        self._part = open_data(
            resolved.source,
            seq_len=self.case.seq_len,
            held_out=config.data.held_out,
            vocab_size=resolved.vocab_size,
            seed=config.train.seed,
        ).train

    def model(self, device: torch.device | None = None) -> nn.Module:
        """The model, with the same weights at every call and on every rank."""
        torch.manual_seed(SEED)
        if self._resolved is not None:
            return build.build_model(self._resolved, device or self.device)
        return gpt(gpt_config("gpt-tiny", **self.case.model), device=device or self.device)

    def loss(self, model: nn.Module, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """The mean loss over the tokens of a batch."""
        return self.objective.loss(model, build.TokenBatch(inputs_BT, targets_BT))

    def whole_batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The batches of all ranks at a step, in the order of ranks, as one."""
        inputs, targets = zip(*(self.batch(step, rank) for rank in range(self.num_ranks)), strict=True)
        return torch.cat(inputs), torch.cat(targets)

    @property
    def devices(self) -> list[torch.device]:
        """A device for each rank, for one process that has them all."""
        return [torch.device(self.device.type, index) for index in range(self.num_ranks)]

    def batch(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a rank at a step, both (B, T)."""
        first = (step * self.num_ranks + rank) * self.case.batch
        samples = [index % self._part.num_samples for index in range(first, first + self.case.batch)]
        return to_tensors(self._part, samples, self.device)[:2]


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
