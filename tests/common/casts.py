"""Training that casts or rounds on its way, beside one process that does so at the same points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, nn

import shardwise as sw
from shardwise.testing import probe
from tests.common import models

PRESETS = ("ddp", "zero1", "zero2", "shard_grad_op", "zero3")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STEPS = 3


@dataclass
class Numbers:
    """Of a rank: its losses, the norms of the gradients, the whole state, and whether it sent what was predicted."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    as_predicted: bool = True

    def check(self, expected: Numbers, where: object) -> None:
        """Everything is equal to the last bit."""
        assert self.losses == expected.losses, where
        assert self.norms == expected.norms, where
        assert self.as_predicted, where
        for name, value in self.state.items():
            assert value.dtype is torch.float32, (where, name)
            assert torch.equal(value, expected.state[name]), (where, name)


def train(
    build: Callable[[], nn.Module],
    plan: sw.ParallelPlan,
    *,
    num_microbatches: int = 1,
    max_norm: float | None = None,
    is_flat: bool = False,
) -> Numbers:
    """On a rank: some steps of AdamW."""
    model = sw.parallelize(build(), plan)
    optimizer = torch.optim.AdamW(sw.flat_parameters(model) if is_flat else model.parameters(), lr=1e-2)
    numbers = Numbers()
    for step in range(STEPS):
        for microbatch in range(num_microbatches):
            is_last = microbatch == num_microbatches - 1
            with sw.gradient_sync(model, is_last), sw.record_collectives(model) as events:
                loss = model(*models.batch(step, microbatch, distributed.get_rank())) / num_microbatches
                loss.backward()
            numbers.losses.append(loss.item())
        if max_norm is not None:
            numbers.norms.append(sw.clip_grad_norm(model, max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    sent = [(event.kind, event.unit, event.sent_bytes, event.axis) for event in events]
    predicted = probe(model).predicted_collectives(is_first_of_window=num_microbatches == 1)
    numbers.as_predicted = sent == [tuple(event) for event in predicted]
    numbers.state = sw.full_state_dict(model)
    return numbers


def mean_of(grads: list[Tensor]) -> Tensor:
    """Added up in rank order, then divided."""
    return sum(grads[1:], grads[0]) / len(grads)


def one_process(
    master: nn.Module,
    low: nn.Module,
    world: int,
    *,
    read: Callable[[Tensor], Tensor] = lambda value: value,
    send: Callable[[str, Tensor], Tensor] = lambda _name, grad: grad,
    mean: Callable[[list[Tensor]], Tensor] = mean_of,
    max_norm: float | None = None,
) -> list[Numbers]:
    """What each of ``world`` ranks is to find.

    Args:
        master: What the optimizer changes, in fp32.
        low: The same model as it computes.
        world: Ranks.
        read: From a parameter of ``master`` to what ``low`` gets of it.
        send: From the name of a parameter and a rank's gradient to what is added up.
        mean: From what was sent to the gradient, but for its dtype.
        max_norm: Gradients are clipped to it.
    """
    optimizer = torch.optim.AdamW(master.parameters(), lr=1e-2)
    ranks = [Numbers() for _ in range(world)]
    for step in range(STEPS):
        with torch.no_grad():
            for target, source in zip(low.parameters(), master.parameters(), strict=True):
                target.copy_(read(source))
        sent: dict[str, list[Any]] = {}
        for rank in range(world):
            loss = low(*models.batch(step, 0, rank))
            loss.backward()
            ranks[rank].losses.append(loss.item())
            for name, parameter in low.named_parameters():
                if parameter.grad is not None:
                    sent.setdefault(name, []).append(send(name, parameter.grad))
            low.zero_grad()
        given = [(p, mean(sent[name]).float()) for name, p in master.named_parameters() if name in sent]
        for parameter, grad in given:
            parameter.grad = grad
        if max_norm is not None:
            norm = _clip([grad for _, grad in given], max_norm)
            for numbers in ranks:
                numbers.norms.append(norm)
        optimizer.step()
        optimizer.zero_grad()
    for numbers in ranks:
        numbers.state = master.state_dict()
    return ranks


def _clip(grads: list[Tensor], max_norm: float) -> float:
    norm = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt().float()
    for grad in grads:
        grad.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm.item()
