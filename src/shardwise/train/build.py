"""The model and the optimizer that a configuration describes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.checkpoint.weights import WeightFiles
from shardwise.forms.attachment import attachment_of
from shardwise.launch.notice import tell_once
from shardwise.spec.errors import StateError
from shardwise.spec.text import printable
from shardwise.train.config import Config, OptimizerSection
from shardwise.train.data import Part, RandomPart
from shardwise.train.pretrained import NotNamedError, deferred_from_folder, model_from_folder
from shardwise.train.resolve import RunConfig

#: Inputs and targets of a microbatch, both (B, T), int64.
TokenBatch = tuple[Tensor, Tensor]


def build_model(resolved: RunConfig, device: torch.device, *, reads_weights: bool = True) -> nn.Module:
    """The whole model, on ``device``, with the weights that its folder has, or that the current random state draws.

    Args:
        resolved: Says which model.
        device: Where it is built.
        reads_weights: False draws weights even where the folder has some. On meta there are none either way.
    """
    section = resolved.config.model
    if section.hf is not None:
        folder = Path(section.hf).expanduser()
        model = model_from_folder(folder, reads_weights=reads_weights and device.type != "meta")
        return model if device.type == "cpu" else model.to(device)  # fake tensors cannot be moved, not even to the CPU
    from shardwise.models import gpt

    return gpt(section.preset or "gpt-tiny", device=device, **section.overrides)


def defer_model(resolved: RunConfig, device: torch.device) -> tuple[nn.Module, WeightFiles | None]:
    """The model on meta, for ``sw.parallelize``: every rank then makes or reads the values that it owns.

    The values are those of :func:`build_model` on the CPU under the same random state. A model whose construction
    cannot be recorded, and files that transformers rearranges when it loads them, are loaded whole; a line says so.

    Returns:
        The model, and the files of its weights (``init`` of ``sw.parallelize``), ``None`` where values are drawn.

    Raises:
        ConfigError: As :func:`build_model`.
    """
    section, generator = resolved.config.model, torch.get_rng_state()
    try:
        if section.hf is not None:
            return deferred_from_folder(Path(section.hf).expanduser())
        return sw.deferred_init(lambda: build_model(resolved, torch.device("cpu"))), None
    except (StateError, NotNamedError) as error:
        name = f"model.hf={section.hf}" if section.hf is not None else f"model {section.preset}"
        tell_once(f"every rank loads {printable(name)} whole, since {printable(str(error).splitlines()[0])}")
        torch.set_rng_state(generator)
        return build_model(resolved, device), None


@dataclass(frozen=True, slots=True)
class Objective:
    """How the model is called with inputs and targets, and what of its output is the loss, as for ``sw.train_step``.

    Attributes:
        forward: ``forward(model, (inputs_BT, targets_BT))`` gives the model's output.
        loss_fn: ``loss_fn(output, (inputs_BT, targets_BT))`` gives the mean loss over the tokens.
    """

    forward: Callable[[nn.Module, TokenBatch], Any]
    loss_fn: Callable[[Any, TokenBatch], Tensor]

    def loss(self, model: nn.Module, batch: TokenBatch) -> Tensor:
        """The loss of a plain model."""
        return self.loss_fn(self.forward(model, batch), batch)


def objective(*, is_from_hf: bool, cp: int) -> Objective:
    """Our GPT takes the targets itself; of a Hugging Face model the logits are compared with them in fp32.

    Under ``cp`` a Hugging Face model takes the loss itself: the logits of whole sequences would have to be gathered.
    """
    if not is_from_hf:
        return Objective(lambda model, batch: model(*batch), lambda output, _batch: output)
    if cp > 1:
        return Objective(
            lambda model, batch: model(input_ids=batch[0], labels=batch[1], shift_labels=batch[1]),
            lambda output, _batch: output.loss,
        )
    return Objective(
        lambda model, batch: model(input_ids=batch[0]),
        lambda output, batch: F.cross_entropy(output.logits.float().flatten(0, 1), batch[1].flatten()),
    )


def objective_of(config: Config) -> Objective:
    """The objective of a run."""
    return objective(is_from_hf=config.model.hf is not None, cp=config.parallel.cp)


def parameter_groups(section: OptimizerSection, model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: weight decay acts only where ``p.dim() >= 2``. Of a parallelized model as flat tensors, if wanted."""
    if section.flat and attachment_of(model) is not None:
        return sw.flat_parameters(model, decay=lambda _, p: p.dim() >= 2)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() >= 2]},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(section: OptimizerSection, groups: Iterable[Any]) -> torch.optim.Optimizer:
    """The optimizer over :func:`parameter_groups`."""
    decay = section.weight_decay
    if section.name == "sgd":
        return torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum or 0.0, weight_decay=decay)
    kind = torch.optim.AdamW if section.name == "adamw" else torch.optim.Adam
    betas, eps = section.betas or (0.9, 0.95), section.eps or 1e-8
    return kind(groups, lr=section.lr, betas=betas, eps=eps, weight_decay=decay)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The learning rate of the next step, for every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def to_tensors(part: Part | RandomPart, samples: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a microbatch, both (B, T), int64."""
    tokens = torch.from_numpy(np.stack([part.sample(index) for index in samples]))
    if device.type == "cuda":
        tokens = tokens.pin_memory().to(device, non_blocking=True)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
