"""The assignment of optimizers to the models that they update."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.optimizer import engines_of


def optimizers_of(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Select those ``optimizers`` that update parameters of ``model`` (flat ones too), in the given order.

    Raises:
        StateError: The model is not parallelized.
    """
    engine = engine_of(model, "optimizers_of")
    return [each for each in optimizers if engine in engines_of(each)]
