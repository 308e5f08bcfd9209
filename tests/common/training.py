"""One training run beside one plain process, with the models of this folder and every way to accumulate and to clip."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing import Comparison, Waiting, compare_each_with_one_process, gradient_sync, same_bits
from tests.common import models


@dataclass(frozen=True)
class Variant:
    """What a step does besides forward, backward and update. ``accumulation`` is also that of the plan."""

    name: str
    num_microbatches: int = 1
    accumulation: str = "auto"
    max_norm: float = math.inf


VARIANTS = (
    Variant("plain"),
    Variant("accumulates sharded", 2, "sharded"),
    Variant("accumulates unsharded", 2, "unsharded"),
    Variant("clips", max_norm=0.3),
)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Rates at which three steps change every bit."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def train(name: str, preset: str, variant: Variant, *, is_flat: bool = False, **options: Any) -> Comparison:
    """On a rank: train under a strategy, with further fields of the plan, and compare everything to the last bit."""
    return train_each(name, (preset,), variant, flat=(preset,) if is_flat else (), **options)[preset]


def train_each(
    name: str,
    presets: Sequence[str],
    variant: Variant,
    *,
    flat: Collection[str] = (),
    is_debugging: bool = False,
    is_in_backward: bool = False,
    steps: int = 3,
    **options: Any,
) -> dict[str, Comparison]:
    """The same under several strategies, step by step; the optimizers of those in ``flat`` see flat tensors."""

    def script(model: nn.Module, reader: int, step: int) -> Iterator[Tensor | Waiting]:
        for microbatch in range(variant.num_microbatches):
            is_last = microbatch == variant.num_microbatches - 1
            with gradient_sync(model, is_last):
                loss = model(*models.batch(step, microbatch, reader)) / variant.num_microbatches
                loss.backward()
            yield loss if is_last else Waiting([loss])

    def loss_of(model: nn.Module, reader: int, step: int) -> Tensor:
        return model(*models.batch(step, 0, reader))

    plans = {
        preset: sw.ParallelPlan(
            strategy=preset, accumulation=variant.accumulation, auto_wrap_policy=models.wrap_policy(name), **options
        )
        for preset in presets
    }
    at = {preset: f"{name}, {preset}, {variant.name}, {options}" for preset in presets}
    found = compare_each_with_one_process(
        lambda: models.build(name),
        script if variant.num_microbatches > 1 else loss_of,
        {at[preset]: lambda model, plan=plan: sw.parallelize(model, plan) for preset, plan in plans.items()},
        steps=steps,
        optimizer=make_optimizer,
        given={at[preset]: sw.flat_parameters for preset in flat},
        max_norm=None if is_in_backward else variant.max_norm,
        in_backward=is_in_backward,
        is_checked=is_debugging,
    )
    if "ddp" in presets:  # whole on every rank, under every name of a tied parameter
        result = found[at["ddp"]]
        plain = result.plain.state_dict()
        for key, value in result.model.state_dict().items():
            assert same_bits(value, plain[key]), f"{key} of the state dict"
    return {preset: found[at[preset]] for preset in presets}
