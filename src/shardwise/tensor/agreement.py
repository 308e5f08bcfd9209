"""All ranks of ``tp`` must compute on the same batch, and drop the same of what they all hold. It is looked at once.

Different samples on the ranks of one model, or seeds by rank as data parallelism has them, would go unnoticed: every
shape is right, and what should be copies drifts apart.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from shardwise.comm.base import Comm
from shardwise.comm.control import all_gather_json, refuse_different


class Agreement:
    """Compares the ranks at the first call of a model with grad, and at the first such one that may drop something.

    Collective:
        Two small all-gathers on ``tp`` in each of those calls.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._seen: set[bool] = set()
        self._dropouts: list[Any] = []  # looked at in every step: a walk over all modules would take its time

    def install(self, model: nn.Module) -> None:
        """Look at the arguments of ``model`` from now on."""
        self._dropouts = [module for module in model.modules() if "Dropout" in type(module).__name__]
        model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return  # generation compares prompts by itself
        may_drop = model.training and any(_drops(module) for module in self._dropouts)
        if may_drop in self._seen:
            return
        self._seen.add(may_drop)
        batch = [_digest(leaf) for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        state = _digest(_random_state(self._comm.device)) if may_drop else 0
        told = all_gather_json(self._comm, [batch, state])
        refuse_different(
            self._comm,
            [batch for batch, _ in told],
            "the ranks of a tensor-parallel group, which compute one model together, got different batches",
            "Divide the samples by sw.data_parallel_rank(model) and sw.data_parallel_size(model), not by the world.",
        )
        refuse_different(
            self._comm,
            [state for _, state in told],
            "the ranks of a tensor-parallel group have different random states, so that dropout would make copies of"
            " the same values differ",
            "Seed by sw.data_parallel_rank(model), not by the rank of the world.",
        )


def _drops(module: nn.Module) -> bool:
    rate = getattr(module, "p", 0.0)
    return isinstance(rate, float) and rate > 0


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _digest(tensor: Tensor) -> int:
    held = tensor.detach().cpu().contiguous().view(-1)
    return zlib.crc32(held.view(torch.uint8).numpy().tobytes()) if held.numel() else 0
