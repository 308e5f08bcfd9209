"""``zero_grad()`` while sums of microbatches wait under ``sw.gradient_sync(model, False)``: as on one plain process.

All values are small integers, so that every order of addition gives the same bits.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.spec.errors import StateError
from shardwise.testing import run_on_ranks
from tests.common.ranks import on_ranks


class Model(nn.Module):
    """Blocks, an embedding that is tied to the output, and a head that only some forwards use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 1)
        self.output = nn.Linear(8, 6, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x: Tensor, *, uses_head: bool = False) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x).clamp(-2, 2)
        return self.head(x).sum() if uses_head else self.output(x).sum()


def build() -> Model:
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape))
    return model


def batch(rank: int, number: int) -> Tensor:
    return torch.randint(0, 6, (5,), generator=torch.Generator().manual_seed(10 * rank + number))


def is_bias(name: str) -> bool:
    return name.endswith("bias")


def part(model: nn.Module, *, biases: bool) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if is_bias(name) is biases]


def by_name(model):
    decay = {"lr": 0.5, "weight_decay": 0.5}
    return [torch.optim.SGD(part(model, biases=True), **decay), torch.optim.SGD(part(model, biases=False), **decay)]


def flat(model):
    kept, rest = sw.flat_parameters(model, decay=lambda name, _: not is_bias(name))
    decay = {"lr": 0.5, "weight_decay": 0.5}
    return [torch.optim.SGD(rest["params"], **decay), torch.optim.SGD(kept["params"], **decay)]


def zero_model(model, optimizers, *, set_to_none):
    model.zero_grad(set_to_none=set_to_none)


def zero_all(model, optimizers, *, set_to_none):
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=set_to_none)


def zero_some(model, optimizers, *, set_to_none):
    optimizers[1].zero_grad(set_to_none=set_to_none)


def replace(model, optimizers, *, set_to_none):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def accumulate(model, optimizers, rank, zero, hold, *, has_gradient):
    if has_gradient:
        model(batch(rank, 0)).backward()
    with hold():
        model(batch(rank, 1), uses_head=True).backward()  # the microbatch that is given up
    zero(model, optimizers)
    with hold():
        model(batch(rank, 2), uses_head=rank == 1).backward()
    with hold():
        model(batch(rank, 3)).backward()
    model(batch(rank, 4)).backward()


def step_of_plain(zero, *, has_gradient):
    """Every rank's gradients, by one process each; their mean; one step."""
    models = [build() for _ in range(dist.get_world_size())]
    for rank, model in enumerate(models):
        accumulate(model, by_name(model), rank, zero, contextlib.nullcontext, has_gradient=has_gradient)
    mean = copy.deepcopy(models[0])
    for parameter, *others in zip(mean.parameters(), *(model.parameters() for model in models), strict=True):
        grads = [other.grad for other in others if other.grad is not None]
        parameter.grad = torch.stack(grads).sum(0) / len(models) if grads else None
    for optimizer in by_name(mean):
        optimizer.step()
    return mean.state_dict()


def compare(plan, zero, make, settings):
    def zero_grad(model, optimizers):
        zero(model, optimizers, set_to_none=set_to_none)

    for set_to_none in (True, False):
        for has_gradient in (False, True):
            expected = step_of_plain(zero_grad, has_gradient=has_gradient)
            model = sw.parallelize(
                build(), sw.ParallelPlan(plan, auto_wrap_policy=sw.wrap_by_class({nn.Linear}), **settings)
            )
            optimizers = make(model)
            hold = lambda model=model: sw.gradient_sync(model, False)  # noqa: E731
            accumulate(model, optimizers, dist.get_rank(), zero_grad, hold, has_gradient=has_gradient)
            for optimizer in optimizers:
                optimizer.step()
            state = sw.full_state_dict(model)
            for name, value in expected.items() if dist.get_rank() == 0 else ():
                assert torch.equal(state[name], value), (name, set_to_none, has_gradient)


@pytest.mark.parametrize(
    ("zero", "make"),
    [
        (zero_model, by_name),
        (zero_all, by_name),
        (zero_some, by_name),
        (replace, by_name),
        (zero_all, flat),
        (zero_some, flat),
    ],
    ids=lambda made: made.__name__,
)
@pytest.mark.parametrize(
    ("plan", "settings"),
    [
        ("ddp", {}),
        ("zero1", {}),
        ("zero3", {"accumulation": "unsharded"}),
        ("zero3", {}),
    ],
    ids=["ddp", "zero1", "zero3 unsharded", "zero3"],
)
def test_zero_grad_drops_what_it_drops_on_one_process(plan, settings, zero, make):
    run_on_ranks(compare, 2, plan, zero, make, settings)


def test_zero_grad_drops_sums_that_wait_for_other_groups_of_ranks():
    settings = {"accumulation": "defer_replicate", "dp_replicate": 2}
    for zero, make in ((zero_all, by_name), (zero_some, by_name), (zero_some, flat)):
        run_on_ranks(compare, 4, "hsdp", zero, make, settings)


@pytest.mark.parametrize("is_flat", [False, True], ids=["by name", "flat"])
@pytest.mark.parametrize("plan", ["ddp", "zero3"])
@on_ranks(2)
def test_a_gradient_whose_sum_waits_can_be_zeroed_but_not_read(plan, is_flat):
    model = sw.parallelize(build(), sw.ParallelPlan(plan, accumulation="unsharded"))
    optimizer = torch.optim.SGD(sw.flat_parameters(model) if is_flat else model.parameters(), lr=1.0)
    given = [p for settings in optimizer.param_groups for p in settings["params"]]
    with sw.gradient_sync(model, False):
        model(batch(0, 1), uses_head=True).backward()
    before = sw.full_state_dict(model)
    waits = "sums of accumulated microbatches wait for their reduction"
    readers = [
        lambda: torch.nn.utils.clip_grad_norm_(given, 1.0),
        lambda: given[0].grad.norm(2),
        lambda: given[0].grad.mul_(2),
        lambda: given[0].grad + 1,
        lambda: given[0].grad.data.abs().sum(),
        lambda: list(given[0].grad),
        lambda: copy.deepcopy(given[0].grad),
    ]
    for read in readers:
        with pytest.raises(StateError, match=waits):
            read()
    for refused in (
        optimizer.step,
        lambda: sw.clip_grad_norm(model, 1.0),
        lambda: sw.optimizer_in_backward(model, optimizer),
    ):
        with pytest.raises(StateError):
            refused()
    assert repr(given[0].grad).startswith("WaitingGradient(shape=")
    with sw.full_parameters(model):
        assert all(p.grad is None for p in model.parameters())
    model(batch(0, 2), uses_head=True).backward()  # nothing of this has dropped the sums
    plain = build()
    for number in (1, 2):
        plain(batch(0, number), uses_head=True).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert torch.allclose(sw.clip_grad_norm(model, float("inf")), norm, rtol=1e-6)
    assert all(torch.equal(value, before[name]) for name, value in sw.full_state_dict(model).items())


@on_ranks(2)
def test_an_optimizer_steps_after_the_sums_were_dropped():
    model = sw.parallelize(build(), "zero1")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = sw.full_state_dict(model)
    with sw.gradient_sync(model, False):
        model(batch(0, 1)).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()  # as training scripts did it once
    assert not any(p.grad.to_local().any() for p in model.parameters() if p.grad is not None)
    optimizer.step()  # nothing waits any more
    assert all(torch.equal(value, before[name]) for name, value in sw.full_state_dict(model).items())
    optimizer.zero_grad()
    with sw.gradient_sync(model, False):
        model(batch(0, 1)).backward()
    optimizer.zero_grad()
    sw.optimizer_in_backward(model, optimizer)


@on_ranks(2)
def test_zero_grad_drops_the_sums_of_a_pipeline():
    torch.manual_seed(0)
    shape = {"num_layers": 4, "hidden": 24, "num_heads": 2, "vocab_size": 31, "seq_len": 6}
    model = sw.parallelize(sw.models.gpt("gpt-tiny", tied=True, **shape), sw.ParallelPlan(pp=2))
    kept, dropped = (tuple(torch.randint(0, 31, (4, 6)) for _ in range(2)) for _ in range(2))

    def gradients():
        sw.train_step(model, kept, num_microbatches=2)
        found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return found

    expected = gradients()
    for set_to_none in (True, False):
        with sw.gradient_sync(model, False):
            sw.train_step(model, dropped, num_microbatches=2)
            model.zero_grad(set_to_none=set_to_none)
            sw.train_step(model, dropped, num_microbatches=2)
        model.zero_grad(set_to_none=set_to_none)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))
