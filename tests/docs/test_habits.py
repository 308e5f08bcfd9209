"""docs/migrating.md, "What you write today and what happens": every row, on two ranks beside one process."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.optim import lr_scheduler as schedules
from torch.profiler import ProfilerActivity, profile

import shardwise as sw
from shardwise.spec.errors import StateError
from tests.common.oracle import Chain, plain_loss
from tests.common.ranks import on_ranks, refusal
from tests.docs.test_migrating import PAGE

RANKS = 2


class Beside:
    """A parallelized model on every rank, and a plain one that sees the samples of all ranks."""

    def __init__(self, strategy: str) -> None:
        self.strategy = strategy
        self.plain = Chain(num_blocks=2)
        self.model = sw.parallelize(copy.deepcopy(self.plain), sw.ParallelPlan(strategy=strategy))

    @property
    def is_sharded(self) -> bool:
        return self.strategy != "ddp"

    def losses(self, model: nn.Module, step: int) -> Iterator[Tensor]:
        """What ``model`` has to call backward on: on a rank its own loss."""
        for rank in [dist.get_rank()] if model is self.model else range(RANKS):
            yield plain_loss(model, rank, step) / (1 if model is self.model else RANKS)

    def backward(self, step: int) -> None:
        for model in (self.plain, self.model):
            for loss in self.losses(model, step):
                loss.backward()

    def optimizers(self, *, is_flat: bool = False, lr: float = 1e-2) -> list[torch.optim.Optimizer]:
        ours = sw.flat_parameters(self.model) if is_flat else self.model.parameters()
        return [torch.optim.AdamW(params, lr=lr) for params in (self.plain.parameters(), ours)]

    def step(self) -> None:
        for optimizer in self.optimizers():
            optimizer.step()

    def assert_equal(self) -> None:
        ours = sw.full_state_dict(self.model)
        for name, value in ours.items():
            torch.testing.assert_close(value, self.plain.state_dict()[name], rtol=1e-6, atol=1e-7, msg=name)


def no_sync(beside: Beside) -> None:
    for micro in range(3):
        with (
            sw.record_collectives(beside.model) as events,
            beside.model.no_sync() if micro < 2 else contextlib.nullcontext(),
        ):
            beside.backward(micro)
        is_reduced = any("reduce" in event.kind for event in events)
        assert is_reduced == (micro == 2 or beside.strategy == "zero3")
    beside.step()
    beside.assert_equal()


def clip_by_method(beside: Beside) -> None:
    beside.backward(0)
    expected = nn.utils.clip_grad_norm_(beside.plain.parameters(), 0.1)
    torch.testing.assert_close(beside.model.clip_grad_norm_(0.1), expected)
    largest = nn.utils.clip_grad_norm_(beside.plain.parameters(), 1.0, math.inf)
    torch.testing.assert_close(beside.model.clip_grad_norm_(1.0, math.inf), largest)
    beside.step()
    beside.assert_equal()


def clip_by_torch(beside: Beside) -> None:
    beside.backward(0)
    chosen: list[Callable[[nn.Module], Any]] = [lambda model: model.head.parameters(), lambda model: model.parameters()]
    for parameters in chosen:
        if not beside.is_sharded:
            norms = [nn.utils.clip_grad_norm_(parameters(model), 0.1) for model in (beside.plain, beside.model)]
            assert torch.equal(*norms)
        elif any(parameter.grad is not None for parameter in parameters(beside.model)):
            told = refusal(StateError, nn.utils.clip_grad_norm_, parameters(beside.model), 0.1)
            assert "sw.clip_grad_norm(model, max_norm)" in told


def clip_values(beside: Beside) -> None:
    beside.backward(0)
    for model in (beside.plain, beside.model):
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    beside.step()
    beside.assert_equal()


def autocast(beside: Beside) -> None:
    for model, optimizer in zip((beside.plain, beside.model), beside.optimizers(lr=1e-3), strict=True):
        with torch.amp.autocast("cpu", dtype=torch.bfloat16):  # one context around steps and their backwards
            for step in range(2):
                for loss in beside.losses(model, step):
                    loss.backward()
                    torch.clear_autocast_cache()  # the plain process would add the ranks' gradients up in 16 bit
                optimizer.step()
                optimizer.zero_grad()
    beside.assert_equal()


def scale(beside: Beside) -> None:
    plain, ours = (torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2))
    for scaler, model, optimizer in zip((plain, ours), (beside.plain, beside.model), beside.optimizers(), strict=True):
        for loss in beside.losses(model, 0):
            scaler.scale(loss).backward()
        if scaler is ours and beside.is_sharded:
            assert "sw.GradScaler()" in refusal(StateError, scaler.step, optimizer)
            return
        scaler.step(optimizer)
        scaler.update()
    beside.assert_equal()


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda optimizer: schedules.LambdaLR(optimizer, lambda step: 0.9**step),
    "MultiplicativeLR": lambda optimizer: schedules.MultiplicativeLR(optimizer, lambda _: 0.9),
    "StepLR": lambda optimizer: schedules.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: schedules.MultiStepLR(optimizer, [1, 3]),
    "ConstantLR": lambda optimizer: schedules.ConstantLR(optimizer, 0.1, 2),
    "LinearLR": lambda optimizer: schedules.LinearLR(optimizer, 0.1, total_iters=3),
    "ExponentialLR": lambda optimizer: schedules.ExponentialLR(optimizer, 0.5),
    "PolynomialLR": lambda optimizer: schedules.PolynomialLR(optimizer, 4),
    "CosineAnnealingLR": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 3),
    "CosineAnnealingWarmRestarts": lambda optimizer: schedules.CosineAnnealingWarmRestarts(optimizer, 2),
    "CyclicLR": lambda optimizer: schedules.CyclicLR(optimizer, 1e-3, 1e-1, step_size_up=2),
    "OneCycleLR": lambda optimizer: schedules.OneCycleLR(optimizer, 1e-1, total_steps=6),
    "ReduceLROnPlateau": lambda optimizer: schedules.ReduceLROnPlateau(optimizer, patience=0),
    "SequentialLR": lambda optimizer: schedules.SequentialLR(
        optimizer, [schedules.LinearLR(optimizer, 0.1, total_iters=2), schedules.ExponentialLR(optimizer, 0.5)], [2]
    ),
    "ChainedScheduler": lambda optimizer: schedules.ChainedScheduler(
        [schedules.ConstantLR(optimizer, 0.1, 2), schedules.ExponentialLR(optimizer, 0.9)]
    ),
}


def schedule(beside: Beside) -> None:
    """One scheduler after the other over the same models; torch updates the plain one with the same numbers."""
    known = {name for name in schedules.__all__ if name not in {"LRScheduler", "SWALR"}}
    assert known == SCHEDULES.keys()
    for place, make in enumerate(SCHEDULES.values()):
        optimizers = beside.optimizers(is_flat=place % 2 == 0)
        with warnings.catch_warnings():  # SequentialLR itself steps the others in a deprecated way
            warnings.filterwarnings("ignore", "Detected call of", UserWarning)
            made = [make(optimizer) for optimizer in optimizers]
        for step in range(3):
            beside.backward(step)
            for optimizer, one in zip(optimizers, made, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                one.step(1.0) if isinstance(one, schedules.ReduceLROnPlateau) else one.step()
            plain, ours = ([group["lr"] for group in optimizer.param_groups] for optimizer in optimizers)
            assert set(ours) == set(plain)
    beside.assert_equal()


def profiled(beside: Beside) -> None:
    optimizer = beside.optimizers()[1]
    for step in range(2):
        with profile(activities=[ProfilerActivity.CPU]) as found:
            beside.backward(step)
            optimizer.step()
    names = {event.name for event in found.events()}
    assert "Optimizer.step#AdamW.step" in names
    gathers = beside.strategy == "zero3"
    for what in ("forward", "backward", "reduce", *(("gather", "wait") if gathers else ())):
        units = {unit.name for unit in sw.summary(beside.model).units}
        assert {unit for unit in units if f"shardwise::{what} [{unit}]" in names} == units, what


def compiled(beside: Beside) -> None:
    calls: list[Callable[[], object]] = [
        lambda: plain_loss(torch.compile(beside.model, backend="eager"), 0, 0),
        lambda: plain_loss(sw.parallelize(torch.compile(Chain(), backend="eager"), beside.strategy), 0, 0),
    ]
    for call in calls:
        assert "sw.ParallelPlan(compile=True)" in refusal(StateError, call)


def ask_for_state(beside: Beside) -> None:
    told = refusal(StateError, get_model_state_dict, beside.model)
    assert "sw.full_state_dict(model) or sw.save(path, model, optimizer)" in told


def unwrap(beside: Beside) -> None:
    refusal(AttributeError, getattr, beside.model, "module")


#: By the beginning of the first cell.
HABITS: dict[str, Callable[[Beside], None]] = {
    "with model.no_sync": no_sync,
    "model.clip_grad_norm_": clip_by_method,
    "torch.nn.utils.clip_grad_norm_": clip_by_torch,
    "torch.nn.utils.clip_grad_value_": clip_values,
    "torch.amp.autocast": autocast,
    "torch.amp.GradScaler": scale,
    "torch.optim.lr_scheduler": schedule,
    "torch.profiler.profile": profiled,
    "torch.compile": compiled,
    "get_model_state_dict": ask_for_state,
    "model.module": unwrap,
}


def first_cells() -> list[str]:
    table = PAGE.partition("## What you write today and what happens")[2].split("\n\n|", 1)[1].split("\n\n")[0]
    return [line.strip("| ").partition(" | ")[0] for line in table.splitlines()[2:]]


def test_each_row_of_the_table_has_a_check() -> None:
    assert [cell.strip("`").partition("(")[0].partition("`")[0] for cell in first_cells()] == list(HABITS)


@on_ranks(RANKS)
def test_torchs_habits_give_the_numbers_of_one_process_or_raise_with_the_call_to_make() -> None:
    torch.set_num_threads(1)
    for strategy in ("ddp", "zero1", "zero3"):
        for habit in HABITS.values():
            if habit is not schedule or strategy != "zero1":  # the longest
                habit(Beside(strategy))
