"""The model and the optimizer that a configuration describes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.checkpoint.weights import WeightFiles
from shardwise.engine.unit import attachment_of
from shardwise.launch.notice import tell_once
from shardwise.spec.errors import StateError
from shardwise.spec.text import printable
from shardwise.train.config import Config, OptimizerSection
from shardwise.train.data import Part, RandomPart
from shardwise.train.pretrained import NotNamedError, deferred_from_folder, model_from_folder
from shardwise.train.resolve import RunConfig

#: ``loss(model, inputs_BT, targets_BT)``: the mean loss over the tokens of a microbatch.
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


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


def loss_of(config: Config) -> Loss:
    """How the model's loss is taken."""
    if config.model.hf is None:
        return _own_loss
    return _labels_loss if config.parallel.cp > 1 else _logits_loss  # logits of whole sequences would be gathered


def call_of(config: Config) -> Callable[[nn.Module, tuple[Tensor, Tensor]], Any]:
    """How the model is called with inputs and targets, where only a later pipeline stage has a loss."""
    if config.model.hf is not None:
        return lambda model, part: model(input_ids=part[0])
    return lambda model, part: model(*part)


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


def _own_loss(model: nn.Module, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    return model(inputs_BT, targets_BT)


def _logits_loss(model: nn.Module, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    return logits_loss(model(input_ids=inputs_BT).logits, targets_BT)


def _labels_loss(model: nn.Module, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    return model(input_ids=inputs_BT, labels=targets_BT, shift_labels=targets_BT).loss


def logits_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """The mean cross entropy, in fp32, of a language model's logits."""
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())


def to_tensors(part: Part | RandomPart, samples: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a microbatch, both (B, T), int64."""
    tokens = torch.from_numpy(np.stack([part.sample(index) for index in samples]))
    if device.type == "cuda":
        tokens = tokens.pin_memory().to(device, non_blocking=True)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
