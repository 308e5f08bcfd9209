"""One training run beside one plain process, with the models of this folder and every way to accumulate and to clip."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing import Comparison, Waiting, compare_with_one_process, gradient_sync, same_bits
from tests.parity import models


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
    """Rates at which five steps change every bit."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def train(
    name: str,
    preset: str,
    variant: Variant,
    *,
    is_debugging: bool = False,
    is_flat: bool = False,
    is_in_backward: bool = False,
    **options: Any,
) -> Comparison:
    """On a rank: train under a strategy, with further fields of the plan, and compare everything to the last bit."""
    plan = sw.ParallelPlan(
        strategy=preset, accumulation=variant.accumulation, auto_wrap_policy=models.wrap_policy(name), **options
    )

    def script(model: nn.Module, reader: int, step: int) -> Iterator[Tensor | Waiting]:
        for microbatch in range(variant.num_microbatches):
            is_last = microbatch == variant.num_microbatches - 1
            with gradient_sync(model, is_last):
                loss = model(*models.batch(step, microbatch, reader)) / variant.num_microbatches
                loss.backward()
            yield loss if is_last else Waiting([loss])

    result = compare_with_one_process(
        lambda: models.build(name),
        script,
        lambda model: sw.parallelize(model, plan),
        steps=5,
        optimizer=make_optimizer,
        given=sw.flat_parameters if is_flat else None,
        max_norm=None if is_in_backward else variant.max_norm,
        in_backward=is_in_backward,
        is_checked=is_debugging,
        where=f"{name}, {preset}, {variant.name}, {options}",
    )
    if preset == "ddp":  # whole on every rank, under every name of a tied parameter
        plain = result.plain.state_dict()
        for key, value in result.model.state_dict().items():
            assert same_bits(value, plain[key]), f"{key} of the state dict"
    return result
