"""Batch norm over the samples of all ranks equals batch norm of one process that has them all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.spec.errors import PlanError, StateError
from shardwise.testing import probe, run_on_ranks
from tests.common.oracle import presets, sample
from tests.common.ranks import on_ranks

#: Rounding of sums in another order, as shares of the largest element; measured: 1e-15 and 2e-7.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6}


class Convolutional(nn.Module):
    """Batch norm over images and over features, with and without parameters and statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Sequential(
            nn.Conv2d(2, 6, 3),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 4, 3),
            nn.BatchNorm2d(4, affine=False, momentum=None),
        )
        self.features = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8, track_running_stats=False))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(self.body(x).flatten(1)))


def images(step, dtype, count):
    return torch.randn(count, 2, 6, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)


def close(got, expected, where):
    gap = (got - expected).abs().max() / expected.abs().max().clamp(min=1)
    assert gap <= TOLERANCE[expected.dtype], f"{where}: off by {gap}"


def like_one_process(dtype, sizes):
    """Losses are sums over samples, so that uneven parts weigh as they do in one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    bounds = [sum(sizes[:index]) for index in range(world + 1)]
    states = []
    for strategy in presets():
        plain = Convolutional().to(dtype)
        model = sw.convert_sync_batchnorm(Convolutional().to(dtype))
        assert sum(type(m).__name__ == "SyncBatchNorm" for m in model.modules()) == 3
        sw.parallelize(model, sw.ParallelPlan(strategy=strategy, auto_wrap_policy=sw.wrap_by_name("body", "features")))
        optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in (plain, model)]
        for step in range(3):
            x = images(step, dtype, sum(sizes))
            loss = plain(x).square().sum() / world
            loss.backward()
            mine = model(x[bounds[rank] : bounds[rank + 1]]).square().sum()
            mine.backward()
            total = mine.detach() / world
            dist.all_reduce(total)
            close(total, loss.detach(), f"{strategy}, loss of step {step}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with sw.full_parameters(model):
            for name, value in plain.state_dict().items():
                close(
                    model.state_dict()[name].double() if value.dtype is torch.int64 else model.state_dict()[name],
                    value.double() if value.dtype is torch.int64 else value,
                    f"{strategy}, {name}",
                )
            states.append({name: value.clone() for name, value in model.state_dict().items()})
        plain.eval(), model.eval()
        x = images(9, dtype, 4)
        close(model(x).detach(), plain(x).detach(), f"{strategy}, evaluation")
    for state in states[1:]:
        for name, value in states[0].items():
            assert torch.equal(state[name], value), f"strategies differ in {name}"


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_it_equals_batch_norm_of_one_process_that_has_the_whole_batch(dtype):
    run_on_ranks(like_one_process, 2, dtype, (4, 4))
    run_on_ranks(like_one_process, 3, dtype, (1, 5, 2))


def test_a_rank_may_have_no_samples():
    run_on_ranks(like_one_process, 2, torch.float64, (5, 0))


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


@on_ranks(2)
def test_it_works_under_recomputation():
    """Recomputation repeats the collectives, on all ranks alike. (It also counts the batch twice, as in torch.)"""
    rank = dist.get_rank()
    plain, model = Recomputed().double(), sw.parallelize(sw.convert_sync_batchnorm(Recomputed().double()))
    xs = [sample(r, 0, 4, 8).double() for r in range(2)]
    plain(torch.cat(xs)).square().mean().backward()
    loss = model(xs[rank]).square().mean()
    loss.backward()
    for name, parameter in plain.named_parameters():
        mark = model.get_parameter(name)
        full_grad = torch.zeros_like(parameter).view(-1)
        gathered = [None, None]
        dist.all_gather_object(gathered, mark.grad.to_local().flatten() if mark.grad is not None else None)
        torch.cat([part for part in gathered if part is not None], out=full_grad)
        close(full_grad.view_as(parameter), parameter.grad, name)


@on_ranks(2)
def test_it_works_in_mixed_precision():
    """16-bit samples are computed in float32; parameters and statistics keep their dtype."""
    rank = dist.get_rank()
    plan = sw.ParallelPlan(mp_policy=sw.PrecisionPolicy(param_dtype="bf16"), auto_wrap_policy="none")
    model = sw.parallelize(sw.convert_sync_batchnorm(Recomputed()), plan)
    y = model(sample(rank, 0, 4, 8))
    y.float().square().mean().backward()
    assert y.dtype is torch.bfloat16
    assert model.blocks[0][1].running_mean.dtype is torch.float32
    assert model.blocks[0][1].weight.dtype is torch.float32
    norm = model.blocks[0][1]
    variances = [torch.zeros_like(norm.running_var) for _ in range(2)]
    dist.all_gather(variances, norm.running_var)
    assert torch.equal(*variances)


def traffic():
    model = sw.parallelize(sw.convert_sync_batchnorm(Recomputed()), sw.ParallelPlan(strategy="ddp"))
    seen = probe(model)
    x = sample(dist.get_rank(), 0, 4, 8)
    sent = []
    for _ in range(2):
        with sw.record_collectives(model) as events:
            model(x).square().mean().backward()
        sent = [(event.kind, event.sent_bytes) for event in events if event.unit == "sync_batch_norm"]
        others = [
            (event.kind, event.unit, event.sent_bytes, event.axis)
            for event in events
            if event.unit != "sync_batch_norm"
        ]
    assert others == [
        tuple(collective) for collective in seen.predicted_collectives()
    ]  # its statistics are not synchronised
    assert sw.summary(model).buffers == "not synchronised: none is saved with the model (auto)"
    return sent


def test_it_sends_what_it_says_and_its_statistics_are_equal_without_being_sent():
    statistics, sums = ("all_gather", 17 * 8), ("all_reduce", 16 * 8)
    for sent in run_on_ranks(traffic, 2):
        assert sorted(sent) == [statistics] * 8 + [sums] * 4  # each forward is run twice


@on_ranks(1)
def test_alone_it_is_plain_batch_norm_with_the_same_names_and_objects():
    plain, converted = Convolutional(), sw.convert_sync_batchnorm(Convolutional())
    for _ in range(2):
        x = images(0, torch.float32, 4)
        assert torch.equal(plain(x), converted(x))
    assert list(plain.state_dict()) == list(converted.state_dict())
    assert str(converted.body[1]) == str(plain.body[1]).replace("BatchNorm2d", "SyncBatchNorm")
    norm = nn.BatchNorm1d(3).eval()
    weight = norm.weight
    only = sw.convert_sync_batchnorm(norm)
    assert only.weight is weight
    assert not only.training
    shared = nn.Sequential(norm, nn.Identity(), norm)
    assert sw.convert_sync_batchnorm(shared)[0] is shared[2]
    assert sw.convert_sync_batchnorm(shared)[0] is shared[0]
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        only(torch.zeros(3))
    with pytest.raises(StateError, match=r"Call sw.convert_sync_batchnorm\(\) before sw.parallelize\(\)"):
        sw.convert_sync_batchnorm(sw.parallelize(Convolutional()))


@on_ranks(2)
def test_torchs_own_is_refused_on_cpu_with_what_to_call_and_converted():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Convolutional())
    with pytest.raises(PlanError) as caught:
        sw.parallelize(model)
    sw.parallelize(sw.convert_sync_batchnorm(model))(images(0, torch.float32, 4)).square().mean().backward()
    text = str(caught.value)
    assert text.startswith("'body.1' is a torch.nn.SyncBatchNorm, which refuses CPU tensors")
    assert "Call sw.convert_sync_batchnorm(model) before sw.parallelize()" in text


class Activated(nn.BatchNorm2d):
    """Ends with the activation, as timm's batch norms do."""

    def forward(self, x):
        return super().forward(x).relu()


def test_a_batch_norm_with_a_forward_of_its_own_is_refused():
    for model, name in ((nn.Sequential(nn.Conv2d(3, 4, 3), Activated(4)), "1"), (Activated(4), "Activated")):
        with pytest.raises(PlanError, match=f"^'{name}' is a Activated, whose own forward would be lost"):
            sw.convert_sync_batchnorm(model)
