"""What every engine of a comparison offers: a model to call, a backward, an update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Trainee:
    """A model under an engine.

    Attributes:
        model: Called for the loss.
        backward: From the loss to gradients, reduced over the ranks.
        update: From gradients to new parameters; gradients are cleared.
    """

    model: nn.Module
    backward: Callable[[Tensor], None]
    update: Callable[[], None]

    @classmethod
    def with_optimizer(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> Trainee:
        """A model whose loss runs backward by itself, and torch's kind of optimizer."""

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return cls(model, backward=Tensor.backward, update=update)
