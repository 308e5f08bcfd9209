"""One training run, in one plain process and on N ranks, as numbers that can be compared bit by bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, nn

import shardwise as sw
from shardwise.testing import checks, optimizer_state, probe
from tests.bits import same_bits
from tests.parity import models

STEPS = 5
PRESETS = ("ddp", "zero1", "zero2", "shard_grad_op", "zero3")


@dataclass(frozen=True)
class Variant:
    """What a step does besides forward, backward and update. ``accumulation`` is also that of the plan."""

    name: str
    num_microbatches: int = 1
    accumulation: str = "auto"
    max_norm: float | None = None


VARIANTS = (
    Variant("plain"),
    Variant("accumulates sharded", 2, "sharded"),
    Variant("accumulates unsharded", 2, "unsharded"),
    Variant("clips", max_norm=0.3),
)


@dataclass
class Numbers:
    """Everything that a run computed.

    Optimizer state of a parameter without elements may be missing: on no rank is there anything to update.

    Attributes:
        losses: By step and microbatch: of one process by rank too, of a rank its own.
        norms: Gradient norm of each step, before clipping; none where the optimizer steps inside backward.
        tensors: Parameters, buffers and optimizer state, whole and in memory order, by name.
        steps: The optimizer's step count of every parameter that it has updated.
    """

    losses: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Rates at which five steps change every bit."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


# -- one plain process


#: What is added up: (microbatch, rank) pairs in one go, as repeated backwards add, or sums, one after the other.
Sum = tuple[tuple[int, int], ...] | list["Sum"]


def train_plain(name: str, variant: Variant, world: int, num_groups: int = 1) -> Numbers:
    """One process adds up the microbatches of ``world`` ranks, in the grouping of the variant's accumulation.

    The sums of ``num_groups`` groups of neighbouring ranks come first, then they are added.
    """
    model = models.build(name)
    optimizer = make_optimizer(model.parameters())
    numbers = Numbers()
    for step in range(STEPS):
        losses: dict[tuple[int, int], float] = {}
        total: dict[nn.Parameter, Tensor] = {}

        def backward(microbatch: int, rank: int, step: int = step, losses: dict = losses) -> None:
            loss = model(*models.batch(step, microbatch, rank)) / variant.num_microbatches
            loss.backward()
            losses[rank, microbatch] = loss.item()

        for what in _sums(variant, world, num_groups):
            summed = _summed(model, what, backward)
            divisor = torch.tensor(float(world))
            _add(total, {p: grad / divisor for p, grad in summed.items()})
        for parameter, grad in total.items():
            parameter.grad = grad
        numbers.norms.append(_norm(total, variant.max_norm))
        optimizer.step()
        optimizer.zero_grad()
        numbers.losses.append([losses[key] for key in sorted(losses)])
    for key, parameter in model.named_parameters():
        numbers.tensors[key] = _memory_order(parameter)
        state = optimizer.state.get(parameter, {})
        for kind in ("exp_avg", "exp_avg_sq"):
            if kind in state:
                numbers.tensors[f"optimizer/{key}/{kind}"] = _memory_order(state[kind])
        if "step" in state:
            numbers.steps[key] = state["step"].item()
    return numbers


def _sums(variant: Variant, world: int, num_groups: int) -> Iterator[Sum]:
    """What is added up before a division, in the order of the additions; the quotients are then added."""
    size, microbatches = world // num_groups, range(variant.num_microbatches)
    groups = [range(first, first + size) for first in range(0, world, size)]
    if variant.accumulation == "unsharded":  # a rank adds its microbatches, a group its ranks
        yield [[tuple((m, rank) for m in microbatches) for rank in group] for group in groups]
    elif variant.accumulation == "defer_replicate":  # a group adds its ranks, then the microbatches
        yield [[[((m, rank),) for rank in group] for m in microbatches] for group in groups]
    else:
        for m in microbatches:
            yield [[((m, rank),) for rank in group] for group in groups]


def _summed(model: nn.Module, what: Sum, backward: Callable[[int, int], None]) -> dict[nn.Parameter, Tensor]:
    if isinstance(what, tuple):
        for microbatch, rank in what:
            backward(microbatch, rank)
        return _take_gradients(model)
    total: dict[nn.Parameter, Tensor] = {}
    for part in what:
        _add(total, _summed(model, part, backward))
    return total


def _take_gradients(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    taken = {p: p.grad for p in model.parameters() if p.grad is not None}
    for parameter in taken:
        parameter.grad = None
    return taken


def _add(total: dict[nn.Parameter, Tensor], more: dict[nn.Parameter, Tensor]) -> None:
    for parameter, grad in more.items():
        total[parameter] = total[parameter] + grad if parameter in total else grad


def _norm(grads: dict[nn.Parameter, Tensor], max_norm: float | None) -> float:
    squares = [grad.double().square().sum() for grad in grads.values()]
    norm = torch.stack(squares).sum().sqrt().float()
    if max_norm is not None:
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for grad in grads.values():
            grad.mul_(coefficient)
    return norm.item()


def _memory_order(tensor: Tensor) -> Tensor:
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    return tensor.detach().permute(order).reshape(-1).clone()


# -- N ranks


@dataclass
class RankNumbers(Numbers):
    """What one rank returns: ``tensors`` is empty, its ranges of the whole tensors are in ``pieces``.

    Attributes:
        pieces: (name, first element, elements) of what this rank owns.
        replica: Which of the groups that hold the same this rank belongs to.
        held: As ``pieces``, of what it holds of parameters, owned or not.
        whole: Rank 0's full state dict, in memory order; on other ranks parameters that are held whole.
    """

    pieces: list[tuple[str, int, Tensor]] = field(default_factory=list)
    replica: int = 0
    held: list[tuple[str, int, Tensor]] = field(default_factory=list)
    whole: dict[str, Tensor] = field(default_factory=dict)


def train_ranks(
    name: str,
    preset: str,
    variant: Variant,
    *,
    is_debugging: bool = False,
    is_flat: bool = False,
    is_in_backward: bool = False,
    **options: object,
) -> RankNumbers:
    """The same on this rank of the world, with a strategy and further fields of the plan."""
    rank = distributed.get_rank()
    numbers = RankNumbers()
    with checks(is_enabled=is_debugging):
        model = sw.parallelize(
            models.build(name),
            sw.ParallelPlan(
                strategy=preset,
                accumulation=variant.accumulation,
                auto_wrap_policy=models.wrap_policy(name),
                **options,
            ),
        )
        optimizer = make_optimizer(sw.flat_parameters(model) if is_flat else model.parameters())
        if is_in_backward:
            sw.optimizer_in_backward(model, optimizer)
        for step in range(STEPS):
            losses = []
            for microbatch in range(variant.num_microbatches):
                with sw.gradient_sync(model, microbatch == variant.num_microbatches - 1):
                    loss = model(*models.batch(step, microbatch, rank)) / variant.num_microbatches
                    loss.backward()
                losses.append(loss.item())
            numbers.losses.append(losses)
            if is_in_backward:
                assert all(parameter.grad is None for parameter in model.parameters())
            elif variant.max_norm is None:
                numbers.norms.append(sw.clip_grad_norm(model, math.inf).item())
            else:
                numbers.norms.append(sw.clip_grad_norm(model, variant.max_norm).item())
            optimizer.step()
            optimizer.zero_grad()
        extents = probe(model).owned_extents(optimizer)
        # clone: results travel with their storage, and this one is the whole flat buffer
        numbers.pieces = [(e.name, e.start, tensor.clone()) for e, tensor in extents]
        numbers.replica = probe(model).replica
        numbers.held = [(e.name, e.start, tensor.clone()) for e, tensor in probe(model).extents()]
        states = optimizer_state(optimizer)
        numbers.steps = {
            key: states[parameter]["step"].item() for key, parameter in model.named_parameters() if parameter in states
        }
        state = sw.full_state_dict(model)
        if preset == "ddp":  # whole on every rank
            state = model.state_dict()
        numbers.whole = {key: _memory_order(value) for key, value in state.items()}
    return numbers


# -- comparison


def differences(expected: Numbers, ranks: list[RankNumbers]) -> list[str]:
    """Names of everything that is not equal to the last bit."""
    found = []
    for step in range(STEPS):
        losses = [loss for numbers in ranks for loss in numbers.losses[step]]
        if losses != expected.losses[step]:
            found.append(f"losses of step {step}")
        if any(numbers.norms[step] != expected.norms[step] for numbers in ranks if numbers.norms):
            found.append(f"norm of step {step}")
    got = _assemble(expected, ranks)
    wanted = {name: value for name, value in expected.tensors.items() if value.numel() or name in got}
    found += [name for name in wanted | got if not _is_equal(wanted.get(name), got.get(name))]
    for rank, numbers in enumerate(ranks):
        assert not (numbers.replica and numbers.pieces), "what the first group owns, others own too"
        found += [
            f"{name} held by rank {rank}"
            for name, start, part in numbers.held
            if name in expected.tensors and not _is_equal(expected.tensors[name][start : start + part.numel()], part)
        ]
        found += [f"{name} held whole by rank {rank}" for name in _unequal_whole(expected, numbers)]
        found += [
            f"step of {name} on rank {rank}" for name, step in numbers.steps.items() if step != expected.steps.get(name)
        ]
    stepped = {name for numbers in ranks for name in numbers.steps}
    found += [f"step of {name}" for name in expected.steps if name not in stepped and expected.tensors[name].numel()]
    return found


def _assemble(expected: Numbers, ranks: list[RankNumbers]) -> dict[str, Tensor]:
    """Whole tensors from the ranks' ranges, each element from exactly one rank."""
    whole: dict[str, Tensor] = {}
    owners: dict[str, Tensor] = {}
    for numbers in ranks:
        for name, start, piece in numbers.pieces:
            like = expected.tensors.get(name, torch.zeros(0))
            flat = whole.setdefault(name, torch.full_like(like, math.nan))
            flat[start : start + piece.numel()] = piece
            owners.setdefault(name, torch.zeros_like(like, dtype=torch.int8))[start : start + piece.numel()] += 1
    for name, count in owners.items():
        assert bool((count == 1).all()), f"{name}: an element has no owner, or two"
    return whole


def _unequal_whole(expected: Numbers, numbers: RankNumbers) -> list[str]:
    canonical = {name: value for name, value in expected.tensors.items() if not name.startswith("optimizer/")}
    return [
        name
        for name, value in numbers.whole.items()
        # A tied parameter shows under its other names as well.
        if not any(
            _is_equal(value, other) for other in ([canonical[name]] if name in canonical else canonical.values())
        )
    ]


def _is_equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and same_bits(a, b)
