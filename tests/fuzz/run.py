"""Running programs on ranks, finding those that fail, and cutting them down."""

from __future__ import annotations

import contextlib
import re
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import shardwise as sw
from shardwise.testing import RankFailure, run_on_ranks
from shardwise.testing import oracle as one_process
from tests.common import oracle
from tests.fuzz.model import Model, Unit, script
from tests.fuzz.program import Program, smaller
from tests.fuzz.transport import delayed

_TIMEOUT_S = 20.0


@dataclass
class Failure:
    """A program that gives something else than a plain process, or an error."""

    program: Program
    message: str
    trace: str
    judgement: str = ""


# -- on the ranks


def run(program: Program) -> None:
    """Run one program beside plain copies.

    Raises:
        AssertionError: Something differs.
    """
    made: dict[str, Any] = {"parallelize": lambda model: shard_each(model, program)}
    if program.route == "parallelize":
        made = options(program)
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        if program.delays:
            stack.enter_context(delayed(program.seed, dist.get_rank()))
        warnings.simplefilter("ignore")  # of reentrant recomputations without anything that requires grad
        if not program.is_exact:
            stack.enter_context(mock.patch.object(one_process, "same_bits", _is_close))
            made["optimizer"] = _sgd
        oracle.compare(
            lambda: Model(program),
            script(program),
            program.strategy,
            steps=len(program.steps),
            is_checked=program.is_checked,
            heals=True,
            **made,
        )


def options(program: Program) -> dict[str, Any]:
    """Fields of the plan, but for the strategy."""
    found = {
        "auto_wrap_policy": sw.wrap_by_class({Unit}) if has_units(program) else "none",
        "reshard_after_forward": program.reshard,
        "accumulation": program.accumulation,
        "gradient_buffers": program.num_buffers,
        "merge_units": 1 << 16 if program.merge else False,
        "activation_checkpointing": program.recompute if has_units(program) else "none",
    }
    if program.strategy in ("ddp", "zero1", "zero2"):
        found.pop("reshard_after_forward")
    return found


def _is_close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    """Its steps do not blow up what is rounded another way."""
    return torch.optim.SGD(parameters, lr=0.05)


def has_units(program: Program) -> bool:
    """Whether there is a unit beside the root."""
    return any(isinstance(module, Unit) for module in Model(program).modules())


def shard_each(model: Model, program: Program) -> nn.Module:
    """Make a model train by ``sw.fully_shard``, unit by unit."""
    for module in reversed(list(model.modules())):
        if isinstance(module, Unit):
            sw.fully_shard(module, reshard_after_forward=program.reshard)
    return sw.fully_shard(model)


def run_many(programs: Sequence[Program]) -> None:
    """Run programs one after the other; names the one that fails."""
    torch.set_num_threads(1)
    for index, program in enumerate(programs):
        try:
            run(program)
        except BaseException as error:
            raise AssertionError(f"program #{index}: {type(error).__name__}: {error}") from error


# -- FSDP2, which says what is legal


def judge(program: Program) -> None:
    """Run a program with FSDP2 beside plain copies; gradients need to be close only.

    Raises:
        AssertionError: They are not.
    """
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    copies = [Model(program) for _ in range(world)]
    model = Model(program)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in reversed(list(model.modules())):
            if isinstance(module, Unit):
                torch_fully_shard(module, reshard_after_forward=program.reshard is not False)
        torch_fully_shard(model)
        shards = list(model.parameters())  # the module holds others while it computes
        optimizers = [torch.optim.SGD(each, lr=0.01) for each in (copies[0].parameters(), shards)]
        for step in range(len(program.steps)):
            runs = [one_process._Run(script(program), each, other, step) for other, each in enumerate(copies)]
            mine = one_process._Run(script(program), model, rank, step)
            while True:
                expected, got = [each.advance() for each in runs], mine.advance()
                if got is one_process._END:
                    break
                for a, b in zip(expected[rank], got, strict=True):
                    assert torch.allclose(a, b, rtol=1e-4, atol=1e-5), f"step {step}: values"
            for parameters in zip(shards, *(each.parameters() for each in copies), strict=True):
                _judge_gradient(parameters[0], parameters[1:], step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            one_process._spread(copies, but=())
            for each in copies:
                each.zero_grad()


def _judge_gradient(ours: nn.Parameter, plain: Sequence[nn.Parameter], step: int) -> None:
    grads = [p.grad for p in plain if p.grad is not None]
    plain[0].grad = sum(grads) / len(plain) if grads else None
    if not ours.requires_grad or not grads:
        return
    assert ours.grad is not None, f"step {step}: no gradient"
    whole = ours.grad.full_tensor()
    assert torch.allclose(whole, plain[0].grad, rtol=1e-3, atol=1e-5), f"step {step}: a gradient"


# -- from outside


def search(programs: Iterable[Program], *, batch: int = 20, judges: bool = True) -> Iterator[Failure]:
    """Run programs, many in one start of the ranks; yields those that fail."""
    waiting: dict[int, list[Program]] = {}
    for program in programs:
        waiting.setdefault(program.world, []).append(program)
    for world, found in waiting.items():
        done = 0
        while done < len(found):
            failed = _first_failure(found[done : done + batch], world)
            if failed is None:
                done += batch
                continue
            index, failure = failed
            done += index + 1
            if judges:
                failure.judgement = judgement(failure.program)
            yield failure


def _first_failure(programs: Sequence[Program], world: int) -> tuple[int, Failure] | None:
    try:
        run_on_ranks(run_many, world, programs, timeout_s=_TIMEOUT_S + 3 * len(programs))
    except RankFailure as failure:
        text = str(failure)
        numbers = re.findall(r"program #(\d+):", failure.causes[failure.rank]) or re.findall(r"program #(\d+):", text)
        if not numbers:
            if len(programs) == 1:
                return 0, Failure(programs[0], failure.causes[failure.rank], text)
            middle = len(programs) // 2  # nobody came back: which one is it?
            first = _first_failure(programs[:middle], world)
            if first is not None:
                return first
            second = _first_failure(programs[middle:], world)
            return None if second is None else (middle + second[0], second[1])
        index = int(numbers[0])
        return index, Failure(programs[index], failure.causes[failure.rank], text)
    return None


def judgement(program: Program) -> str:
    """What FSDP2 makes of a program: ``right``, or what went wrong."""
    try:
        run_on_ranks(judge, program.world, program, timeout_s=_TIMEOUT_S)
    except RankFailure as failure:
        return failure.causes[failure.rank]
    return "right"


def fails(program: Program) -> Failure | None:
    """The failure of one program, if it fails."""
    found = _first_failure([program], program.world)
    return None if found is None else found[1]


def shrink(failure: Failure, limit_s: float = 600.0) -> Failure:
    """The smallest program that fails in the same way, as far as it is found in time."""
    kind, deadline = _kind(failure.message), time.monotonic() + limit_s
    is_done = False
    while not is_done and time.monotonic() < deadline:
        is_done = True
        for candidate in smaller(failure.program):
            if time.monotonic() > deadline:
                break
            found = fails(candidate)
            if found is not None and _kind(found.message) == kind:
                failure, is_done = found, False
                break
    failure.judgement = judgement(failure.program)
    return failure


def _kind(message: str) -> str:
    """What kind of failure it is: the first words without names and numbers."""
    text = re.sub(r"program #\d+: ", "", message)
    if "is off by" in text or "has no gradient" in text or ": value" in text:
        return "differs"
    return re.sub(r"'[^']*'|\d+", "_", text)[:60]
