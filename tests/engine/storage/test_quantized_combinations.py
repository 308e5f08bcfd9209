"""What is quantized, together with everything else that moves or keeps parameters: the same numbers as without it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, distributed, nn

import shardwise as sw
from shardwise.testing import checks, probe, run_on_ranks
from tests.common import models
from tests.common.ranks import on_ranks

EVERYTHING = {"quantize_frozen": "int8", "quantized_gather": "int8", "quantized_reduce": "int8"}
WITHOUT_GATHER = EVERYTHING | {"quantized_gather": "none"}


def train(plan: sw.ParallelPlan, *, updates_in_backward: bool = False, fused: bool = False) -> list[object]:
    model = sw.parallelize(models.build("frozen"), plan)
    parameters = sw.flat_parameters(model) if updates_in_backward else model.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=fused)
    if updates_in_backward:
        sw.optimizer_in_backward(model, optimizer)
    losses = []
    for step in range(3):
        with sw.record_collectives(model) as events:
            loss = model(*models.batch(step, 0, distributed.get_rank()))
            loss.backward()
        losses.append(loss.item())
        if not updates_in_backward:
            optimizer.step()
            optimizer.zero_grad()
    sent = [(event.kind, event.unit, event.sent_bytes, event.axis) for event in events]
    assert sent == [tuple(event) for event in probe(model).predicted_collectives()]
    with torch.no_grad():
        losses.append(model(*models.batch(9, 0, 0)).item())
    return [losses, sw.full_state_dict(model)]


def train_combinations() -> dict[str, dict[str, list[object]]]:
    zero3 = {"strategy": "zero3", **EVERYTHING}
    ddp = {"strategy": "ddp", **WITHOUT_GATHER}
    inner = {"kept over two ranks": {"reshard_after_forward": 2}} if distributed.get_world_size() > 2 else {}
    with checks():
        return {
            "zero3": {
                "plain": train(sw.ParallelPlan(**zero3)),
                "recomputed": train(sw.ParallelPlan(activation_checkpointing="full", **zero3)),
                "units by themselves": train(sw.ParallelPlan(merge_units=False, **zero3)),
                "one unit": train(sw.ParallelPlan(auto_wrap_policy="none", **zero3)),
                "on the host": train(sw.ParallelPlan(offload_policy="cpu", **zero3)),
                "kept after forward": train(sw.ParallelPlan(reshard_after_forward=False, **zero3)),
                **{name: train(sw.ParallelPlan(**zero3, **more)) for name, more in inner.items()},
                "updated in backward": train(sw.ParallelPlan(**zero3), updates_in_backward=True),
            },
            "ddp": {
                "plain": train(sw.ParallelPlan(**ddp)),
                "recomputed": train(sw.ParallelPlan(activation_checkpointing="full", **ddp)),
                "units by themselves": train(sw.ParallelPlan(merge_units=False, **ddp)),
                "one unit": train(sw.ParallelPlan(auto_wrap_policy="none", **ddp)),
                "on the host": train(sw.ParallelPlan(offload_policy="cpu", **ddp)),
                "updated in backward": train(sw.ParallelPlan(**ddp), updates_in_backward=True),
            },
        }


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_levers_do_not_change_what_quantized_training_computes(world: int) -> None:
    for results in run_on_ranks(train_combinations, world):
        for preset, by_name in results.items():
            losses, state = by_name["plain"]
            for name, (other_losses, other_state) in by_name.items():
                assert other_losses == losses, (preset, name)
                for key, value in state.items():
                    assert torch.equal(value, other_state[key]), (preset, name, key)


@on_ranks(2)
def test_models_on_meta_are_quantized_as_they_are_made() -> None:
    """From a real model, and from one whose construction is replayed unit by unit."""
    found = []
    for make in (lambda: models.build("frozen"), lambda: sw.deferred_init(lambda: models.build("frozen"))):
        model = sw.parallelize(make(), sw.ParallelPlan(quantize_frozen="int8"))
        found.append(sw.full_state_dict(model))
    real, replayed = found
    assert real.keys() == replayed.keys()
    for name, value in real.items():
        assert torch.equal(value, replayed[name]), name


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.frozen = nn.Linear(16, 16).requires_grad_(requires_grad=False)
        self.trained = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.trained(self.frozen(x)).sum()


def step_fused(is_spoilt: bool) -> tuple[bool, bool]:
    """A fused optimizer skips inside its kernel: it is told of what other ranks have found."""
    model = sw.parallelize(Linear(), sw.ParallelPlan(**EVERYTHING))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = sw.GradScaler("cpu", init_scale=8.0)
    before = sw.full_state_dict(model)
    x = torch.ones(4, 16)
    if is_spoilt and distributed.get_rank() == 1:
        x[0, 0] = float("inf")
    scaler.scale(model(x)).backward()
    scaler.step(optimizer)
    scaler.update()
    after = sw.full_state_dict(model)
    return scaler.get_scale() < 8.0, any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("is_spoilt", [True, False])
def test_a_fused_optimizer_skips_with_the_others(is_spoilt: bool) -> None:
    ranks = run_on_ranks(step_fused, 2, is_spoilt)
    assert [fell for fell, _ in ranks] == [is_spoilt, is_spoilt]
    assert ranks[0][1] is not is_spoilt


def train_whole_tensors(form: str, strategy: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    plan = sw.ParallelPlan(
        strategy=strategy,
        granularity="tensor",
        auto_wrap_policy=sw.wrap_by_class({nn.Linear}),
        merge_units=False,
        **{form: "int8"},
    )
    sw.parallelize(model, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = torch.randn(2, 64, generator=torch.Generator().manual_seed(2 * step + distributed.get_rank()))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(sw.full_state_dict(model).values())


def train_all_whole_tensors() -> dict[str, list[list[torch.Tensor]]]:
    return {
        "quantized_reduce": [train_whole_tensors("quantized_reduce", each) for each in ("ddp", "zero1", "zero3")],
        "quantized_gather": [train_whole_tensors("quantized_gather", each) for each in ("zero1", "zero3")],
    }


def test_a_rank_may_own_nothing_of_a_group() -> None:
    """Each layer is a unit of one tensor, which is whole on one rank."""
    for strategies in run_on_ranks(train_all_whole_tensors, 2)[0].values():
        for states in strategies[1:]:
            assert all(torch.equal(a, b) for a, b in zip(strategies[0], states, strict=True))
