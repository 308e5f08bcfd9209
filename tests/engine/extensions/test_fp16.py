"""fp16 with a gradient scaler: one decision on all ranks, the range of sums, parity with one process."""

import contextlib
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, distributed, nn

import shardwise as sw
from shardwise.engine.storage import part
from shardwise.optim.scaler import needs_scaler
from shardwise.spec.errors import StateError
from shardwise.testing import run_on_ranks
from tests.common import models
from tests.common.ranks import on_ranks, refusal

PRESETS = ("ddp", "zero1", "zero2", "shard_grad_op", "zero3")
STEPS = 6
SPOILT = 3  # in this step the loss of the last rank is so large that gradients overflow


# -- an inf on one rank, in a shard that another owns


class Weighted(nn.Module):
    """Element i of the weight has x[i] for its gradient: rank 0 owns the first half, rank 1 the second."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(128))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def step_with_an_inf(preset: str, scaler: torch.amp.GradScaler) -> tuple[bool, float, dict[str, Tensor]]:
    """Whether this rank's optimizer moved, the scale afterwards, and the parameters."""
    model = sw.parallelize(Weighted(), sw.ParallelPlan(strategy=preset))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.ones(128)
    if distributed.get_rank() == 0:
        x[100] = float("inf")  # rank 1 owns element 100
    scaler.scale(model(x)).backward()
    before = model.weight.detach().clone()
    is_torchs = type(scaler) is torch.amp.GradScaler
    if is_torchs and preset != "ddp":
        with pytest.raises(StateError, match=r"torch\.amp\.GradScaler on a parallelized model"):
            scaler.step(optimizer)
        model.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(model(x)).backward()
    with part.as_plain_tensors() if is_torchs else contextlib.nullcontext():
        scaler.step(optimizer)
    scaler.update()
    return not torch.equal(before, model.weight), scaler.get_scale(), sw.full_state_dict(model)


def with_either_scaler(presets):
    return {
        preset: [
            step_with_an_inf(preset, make("cpu", init_scale=8.0)) for make in (sw.GradScaler, torch.amp.GradScaler)
        ]
        for preset in presets
    }


def test_pytorch_116054_an_inf_in_one_shard_stops_the_step_on_every_rank() -> None:
    ranks = run_on_ranks(with_either_scaler, 2, PRESETS)
    for preset in PRESETS:
        assert [results[preset][0][:2] for results in ranks] == [(False, 4.0), (False, 4.0)], preset
        assert torch.equal(ranks[0][preset][0][2]["weight"], torch.ones(128)), preset
    # The negative control: torch's own, were it not refused, looks at the shard alone, and half of the model moves on.
    assert [results["zero3"][1][:2] for results in ranks] == [(True, 8.0), (False, 4.0)]


@on_ranks(4)
def test_an_inf_in_one_group_stops_the_step_in_all_groups() -> None:
    """Two groups of two ranks: the inf of rank 0 reaches the other group with the sums."""
    model = sw.parallelize(Weighted(), sw.ParallelPlan(dp_replicate=2, dp_shard=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = sw.GradScaler("cpu", init_scale=8.0)
    x = torch.ones(128)
    if distributed.get_rank() == 0:
        x[100] = float("inf")
    scaler.scale(model(x)).backward()
    before = model.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert (not torch.equal(before, model.weight), scaler.get_scale()) == (False, 4.0)


@on_ranks(2)
def test_infs_of_two_ranks_stop_a_fused_optimizer_too() -> None:
    model = sw.parallelize(Weighted(), sw.ParallelPlan())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    scaler = sw.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.full((128,), float("inf")))).backward()
    before = model.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(before, model.weight)
    assert scaler.get_scale() == 4.0


@on_ranks(2)
def test_a_rank_that_owns_no_gradient_takes_part() -> None:
    """One parameter of 64 elements: the second rank owns none of it."""
    model = sw.parallelize(nn.Linear(64, 1, bias=False), sw.ParallelPlan())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = sw.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(2, 64)).sum()).backward()
    scaler.unscale_(optimizer)
    norm = sw.clip_grad_norm(model, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.has_found_inf, norm.item()) == (False, 16.0)


@on_ranks(1)
def test_masters_in_fp16_are_refused_with_what_to_do() -> None:
    model = sw.parallelize(nn.Linear(4, 4).half(), sw.ParallelPlan())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = sw.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4).half()).sum()).backward()
    message = refusal(sw.StateError, scaler.unscale_, optimizer)
    assert "'weight' is kept in fp16" in message
    assert "master_dtype='fp32'" in message


# -- the range of a sum in fp16


#: By world: a gradient in range of which a plain sum over the ranks is not.
LARGE = {2: 40000.0, 4: 30000.0}


def reduce_large(preset: str) -> tuple[Tensor, Tensor]:
    """Every rank's gradient has the same large value everywhere."""
    large = LARGE[distributed.get_world_size()]
    policy = sw.PrecisionPolicy(param_dtype=None, reduce_dtype="fp16")
    model = sw.parallelize(nn.Linear(64, 8, bias=False), sw.ParallelPlan(strategy=preset, mp_policy=policy))
    (model(torch.ones(1, 64)).sum() * large).backward()
    grads = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    grads = grads if preset == "ddp" else grads.to_local()
    plain = torch.full((1,), large, dtype=torch.float16)
    total = plain.clone()
    for _ in range(distributed.get_world_size() - 1):
        total += plain
    return grads, total


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_gradients_whose_sum_leaves_the_range_of_fp16_are_averaged(world: int, preset: str) -> None:
    for grads, plain_sum in run_on_ranks(reduce_large, world, preset):
        assert plain_sum.isinf().all()
        assert torch.equal(grads, torch.full_like(grads, LARGE[world]))


# -- parity


@dataclass
class Numbers:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


def gain(step: int, rank: int, world: int) -> float:
    return 3e4 if step == SPOILT and rank == world - 1 else 1.0


def new_scaler(kind: type[torch.amp.GradScaler]) -> torch.amp.GradScaler:
    return kind("cpu", init_scale=64.0, growth_interval=2)


def train(preset: str, num_microbatches: int, *, is_flat: bool = False) -> Numbers:
    rank, world = distributed.get_rank(), distributed.get_world_size()
    policy = sw.PrecisionPolicy(param_dtype="fp16", reduce_dtype="fp16")
    model = sw.parallelize(models.build("tied"), sw.ParallelPlan(strategy=preset, mp_policy=policy))
    assert needs_scaler(model)
    optimizer = torch.optim.AdamW(sw.flat_parameters(model) if is_flat else model.parameters(), lr=1e-2)
    scaler = new_scaler(sw.GradScaler)
    numbers = Numbers()
    for step in range(STEPS):
        for microbatch in range(num_microbatches):
            with sw.gradient_sync(model, microbatch == num_microbatches - 1):
                loss = model(*models.batch(step, microbatch, rank)) / num_microbatches
                scaler.scale(loss.float() * gain(step, rank, world)).backward()
            numbers.losses.append(loss.item())
        scaler.unscale_(optimizer)
        numbers.norms.append(sw.clip_grad_norm(model, 0.3).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        numbers.scales.append(scaler.get_scale())
    numbers.state = sw.full_state_dict(model)
    return numbers


def train_every_preset() -> dict[tuple[str, int], Numbers]:
    found = {(preset, count): train(preset, count) for preset in PRESETS for count in (1, 2)}
    return found | {
        ("zero3, flat", 1): train("zero3", 1, is_flat=True),
        ("ddp, flat", 1): train("ddp", 1, is_flat=True),
    }


def one_process(world: int, num_microbatches: int, *, is_sharded: bool) -> tuple[list[list[float]], Numbers]:
    """fp32 masters, an fp16 copy that computes, torch's own scaler; divided before and after each sum in fp16."""
    before, after = {2: (2, 1), 3: (2, 1.5)}[world]
    master, low = models.build("tied"), models.build("tied").half()
    optimizer = torch.optim.AdamW(master.parameters(), lr=1e-2)
    scaler = new_scaler(torch.amp.GradScaler)
    losses: list[list[float]] = [[] for _ in range(world)]
    numbers = Numbers()
    # What is added up before one division: with sharded accumulation every microbatch by itself.
    windows = [[m] for m in range(num_microbatches)] if is_sharded else [list(range(num_microbatches))]
    for step in range(STEPS):
        with torch.no_grad():
            for target, source in zip(low.parameters(), master.parameters(), strict=True):
                target.copy_(source)
        for window in windows:
            total: list[Tensor] | None = None
            for rank in range(world):
                for microbatch in window:
                    loss = low(*models.batch(step, microbatch, rank)) / num_microbatches
                    scaler.scale(loss.float() * gain(step, rank, world)).backward()
                    losses[rank].append(loss.item())
                grads = [p.grad / before for p in low.parameters()]
                low.zero_grad()
                total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
            for parameter, grad in zip(master.parameters(), total, strict=True):
                mean = (grad / after).float()
                parameter.grad = mean if parameter.grad is None else parameter.grad + mean
        scaler.unscale_(optimizer)
        norm = torch.stack([p.grad.double().square().sum() for p in master.parameters()]).sum().sqrt().float()
        for parameter in master.parameters():
            parameter.grad.mul_(torch.clamp(0.3 / (norm + 1e-6), max=1.0))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        numbers.norms.append(norm.item())
        numbers.scales.append(scaler.get_scale())
    numbers.state = master.state_dict()
    return losses, numbers


@pytest.mark.parametrize("world", [2, 3])
def test_with_scaling_every_preset_equals_one_process_through_an_overflow(world: int) -> None:
    expected = {
        (is_sharded, count): one_process(world, count, is_sharded=is_sharded)
        for is_sharded, count in ((True, 1), (True, 2), (False, 2))
    }
    for rank, by_preset in enumerate(run_on_ranks(train_every_preset, world)):
        for (preset, count), got in by_preset.items():
            losses, wanted = expected[count == 1 or preset not in ("ddp", "zero1"), count]
            # The scale grew, fell at the overflow, and grew again; that step was skipped.
            assert wanted.scales == [64.0, 128.0, 128.0, 64.0, 64.0, 128.0]
            assert not torch.tensor(wanted.norms[SPOILT]).isfinite()
            assert got.scales == wanted.scales, preset
            assert got.losses == losses[rank], preset
            torch.testing.assert_close(got.norms, wanted.norms, rtol=0, atol=0, equal_nan=True)
            for name, value in got.state.items():
                assert torch.equal(value, wanted.state[name]), (preset, count, name)
