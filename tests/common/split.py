"""Degrees that split sums (``tp``, ``cp``, ``ep``) beside one plain process, by the oracle of ``shardwise.testing``.

float64, where only the order of sums differs, and fp32.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.spec.slice import slice_of
from shardwise.spec.tolerances import Tolerance, tolerance
from shardwise.testing import (
    Comparison,
    Waiting,
    compare_with_one_process,
    gradient_sync,
    run_on_ranks,
    train_step,
)
from tests.common.dropout import draw_as_ranks

LR = 1e-3
VOCAB, SEQ = 31, 6  # a vocabulary that no degree divides
DTYPES = {torch.float64: "fp64", torch.float32: "fp32"}


@dataclass(frozen=True)
class Case:
    """What is trained, and how it is distributed.

    Attributes:
        tp: Degree of tensor parallelism, unless ``plan`` has another.
        strategy: Strategy of the data-parallel axes.
        dtype: Dtype of the model.
        num_microbatches: Backwards of a step, or microbatches of its ``sw.train_step``.
        accumulation: Field of the plan.
        max_norm: Gradients are clipped to it; ``None``: their norms are only compared.
        model: Changes of the model's sizes.
        plan: Further fields of the plan.
        by_train_step: A step is one ``sw.train_step``; so it is in pipelines.
    """

    tp: int = 2
    strategy: str = "zero3"
    dtype: torch.dtype = torch.float64
    num_microbatches: int = 1
    accumulation: str = "auto"
    max_norm: float | None = None
    model: tuple[tuple[str, Any], ...] = ()
    plan: tuple[tuple[str, Any], ...] = ()
    by_train_step: bool = False

    @property
    def exactness(self) -> torch.dtype:
        """The narrowest dtype in which the model computes."""
        return self.dtype

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the plan."""
        return {"tp": self.tp, "strategy": self.strategy, "accumulation": self.accumulation} | dict(self.plan)

    def build(self) -> nn.Module:
        torch.manual_seed(7)
        sizes = {"num_layers": 3, "hidden": 24, "num_heads": 4, "vocab_size": VOCAB, "seq_len": SEQ, "tied": False}
        return sw.models.gpt("gpt-tiny", **(sizes | dict(self.model))).to(self.dtype)

    def batch(self, step: int, microbatch: int, reader: int) -> Any:
        return batch(step, microbatch, reader)

    def loss(self, model: nn.Module, step: int, microbatch: int, reader: int) -> Tensor:
        return model(*self.batch(step, microbatch, reader))

    def prepare_plain(self, model: nn.Module) -> None:
        """What one process does to the model before it trains."""

    def inspect(self, model: nn.Module) -> None:
        """What must be true of the parallelized model."""
        assert self.fields["tp"] == 1 or any(slice_of(parameter) is not None for parameter in model.parameters())

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Both sides train in it."""
        return contextlib.nullcontext()


def batch(step: int, microbatch: int, reader: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 100 * microbatch + reader)
    tokens_BT = torch.randint(0, VOCAB, (2, SEQ + 1), generator=generator)
    targets_BT = tokens_BT[:, 1:].clone()
    targets_BT[0, reader] = -100
    return tokens_BT[:, :-1].contiguous(), targets_BT


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.1)


def compare(case: Case, *, steps: int = 3, limits: Tolerance | None = None) -> Comparison:
    """On a rank: train the case in both ways; ``limits`` instead of the tolerance of its dtype."""
    fields, count = case.fields, case.num_microbatches

    def script(model: nn.Module, reader: int, step: int) -> Any:
        if case.by_train_step or fields.get("pp", 1) > 1:
            parts = [case.batch(step, microbatch, reader) for microbatch in range(count)]
            yield train_step(model, _joined(parts), num_microbatches=count)
            return
        for microbatch in range(count):
            is_last = microbatch == count - 1
            with gradient_sync(model, is_last):
                torch.manual_seed(10_000 * step + 100 * microbatch + reader)  # for dropout
                loss = case.loss(model, step, microbatch, reader) / count
                loss.backward()
            yield loss if is_last else Waiting([loss])

    def prepare_plain(model: nn.Module) -> None:
        draw_as_ranks(model, sw.ParallelPlan(**fields))
        case.prepare_plain(model)

    with case.context():
        found = compare_with_one_process(
            case.build,
            script,
            lambda model: sw.parallelize(model, sw.ParallelPlan(**fields)),
            prepare_plain=prepare_plain,
            steps=steps,
            optimizer=optimizer_of,
            max_norm=math.inf if case.max_norm is None else case.max_norm,
            tolerance=limits or tolerance(DTYPES[case.exactness], LR),
            where=str(case),
        )
        case.inspect(found.model)
    return found


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], dict):
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def run_all(cases: tuple[Case, ...]) -> None:
    warnings.filterwarnings("ignore", module="transformers")
    for case in cases:
        compare(case)


def check(world: int, *cases: Case) -> None:
    """Every case equals one process within the tolerance of its dtype."""
    run_on_ranks(run_all, world, cases, timeout_s=250)


#: A fault must show in losses or norms alone, and in parameters alone, though 10,000 times the tolerance is allowed.
BLIND = (Tolerance(1e-5, math.inf), Tolerance(math.inf, 1e-4))
