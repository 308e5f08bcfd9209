"""Model, loss and batches, the same for every engine."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from bench.compare.case import SEED, Case
from bench.compare.request import Request
from shardwise.models import gpt, gpt_config
from shardwise.spec.plan import ParallelPlan
from shardwise.train import build
from shardwise.train.build import to_tensors
from shardwise.train.config import read_config
from shardwise.train.data import RandomPart, open_data
from shardwise.train.resolve import RunConfig, resolve


class Workload:
    """What one rank's engine trains on.

    Attributes:
        plan: Of a configuration; for named cases the default one. Its strategy is the entrant's.
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
        self._objective = build.objective(is_from_hf=False, cp=1)
        if self.case.config is None:
            self._part = RandomPart(SEED, 0, self.case.model["vocab_size"], self.case.seq_len)
            return
        resolved = self._resolved = resolve(
            read_config(Path(self.case.config), []), request.num_ranks, raises_masters=False
        )
        self.plan, config = resolved.plan, resolved.config
        self._objective = build.objective_of(config)
        self._part = open_data(
            resolved.source,
            seq_len=self.case.seq_len,
            held_out=config.data.held_out,
            vocab_size=resolved.vocab_size,
            seed=config.train.seed,
        ).train

    def model(self) -> nn.Module:
        """The model, with the same weights at every call and on every rank."""
        torch.manual_seed(SEED)
        if self._resolved is not None:
            return build.build_model(self._resolved, self.device)
        return gpt(gpt_config("gpt-tiny", **self.case.model), device=self.device)

    def loss(self, model: nn.Module, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """The mean loss over the tokens of a batch."""
        return self._objective.loss(model, (inputs_BT, targets_BT))

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
        return to_tensors(self._part, samples, self.device)
