"""Parameters that are left alone: each rank's own experts, and parts that are nobody's business."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.spec.errors import CheckpointError, PlanError, StateError
from shardwise.testing import probe, run_on_ranks
from tests.common.oracle import Block, Chain, adamw, compare, compare_each, plain_loss, sample
from tests.common.own import own
from tests.common.ranks import on_ranks, refusal


class WithExpert(Block):
    """A block and an expert, whose weights depend on the rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        shared = torch.get_rng_state()
        torch.manual_seed(100 + rank)
        self.expert = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.norm.running_mean.fill_(rank)
        torch.set_rng_state(shared)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.norm(torch.tanh(self.expert(x)))


class Experts(Chain):
    """Rank's own experts in every block, and a frozen part that all ranks hold alike."""

    def __init__(self, rank: int) -> None:
        super().__init__(lambda: WithExpert(rank))
        self.tower = nn.Linear(8, 8).requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.tower(x))


OWN = ["blocks.*.expert", "blocks.*.norm"]
ALL = [*OWN, "tower.*"]


def accumulated(model, rank, step):
    for micro in range(2):
        loss = plain_loss(model, rank, 10 * step + micro)
        loss.backward()
        yield loss


@on_ranks(2, 3)
def test_each_rank_trains_its_own_experts_and_shares_the_rest():
    compare_each(Experts, plain_loss, ignored=ALL)
    compare_each(Experts, plain_loss, ignored=ALL, auto_wrap_policy=sw.wrap_by_class({Block, nn.Linear}))
    compare_each(Experts, accumulated, ignored=ALL)
    compare(Experts, plain_loss, "zero3", ignored=ALL, given=sw.flat_parameters)


@on_ranks(2)
def test_modules_and_parameters_may_be_given_themselves_and_nothing_of_them_is_touched():
    """Modules and parameters may be given themselves; of a module its buffers are meant too."""
    rank = dist.get_rank()
    model = Experts(rank)
    entries = [*(block.expert for block in model.blocks), *(block.norm for block in model.blocks), model.tower.weight]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sw.parallelize(model, sw.ParallelPlan(ignored=entries, sync="error"))
    for block in model.blocks:
        assert block.expert.weight.shape == (8, 8)
        assert (block.norm.running_mean == rank).all()
    assert model.tower.weight.shape == (8, 8)
    sharded = {shard.name for shard in probe(model).shards}
    assert "tower.weight" not in sharded
    assert "tower.bias" in sharded
    for step in range(2):
        plain_loss(model, rank, step).backward()
    means = [torch.zeros(8) for _ in range(dist.get_world_size())]
    dist.all_gather(means, model.blocks[0].norm.running_mean)
    assert not torch.equal(means[0], means[1])  # nobody's buffers were sent
    text = str(sw.summary(model))
    assert "ignored (whole, this rank's own): blocks.0.expert.weight blocks.0.expert.bias" in text
    state = sw.full_state_dict(model)
    if rank == 0:
        assert state.keys() == before.keys()
        assert torch.equal(state["blocks.3.expert.weight"], before["blocks.3.expert.weight"])
    whole = sw.clip_grad_norm(model, float("inf"))
    assert sw.clip_grad_norm(model.parameters(), float("inf")) == whole
    block = [p for name, p in model.blocks[0].named_parameters() if not name.startswith(("expert.", "norm."))]
    assert sw.clip_grad_norm(model.blocks[0], float("inf")) == sw.clip_grad_norm(block, float("inf")) > 0
    for nothing in (model.blocks[0].expert, [model.blocks[0].expert.weight], []):
        assert sw.clip_grad_norm(nothing, 1e-9) == 0
    norm = sw.clip_grad_norm(model, 1e-9)
    assert norm > 0
    assert own(model.stem.weight.grad).norm() < 1e-8
    assert model.blocks[0].expert.weight.grad.abs().max() > 1e-4  # neither counted nor scaled


def by_unit():
    rank = dist.get_rank()
    model = Experts(rank)
    ignored = {p for block in model.blocks for p in (*block.expert.parameters(), *block.norm.parameters())}
    for block in model.blocks:
        block.norm.running_mean.zero_()  # buffers are not among what is ignored here
        sw.fully_shard(block, ignored_params=ignored)
    return sw.fully_shard(model, ignored_params=ignored)


@on_ranks(2)
def test_fully_shard_takes_ignored_parameters():
    for block in (model := by_unit()).blocks:
        assert block.expert.weight.shape == (8, 8)
    rank, ignored = dist.get_rank(), probe(model).ignored
    assert len(ignored) == 5 * 4
    assert "blocks.4.expert.bias" in ignored
    optimizer = adamw(model.parameters())
    reference = sw.parallelize(Experts(rank), sw.ParallelPlan(ignored=OWN))
    other = adamw(reference.parameters())
    for step in range(3):
        for each, stepper in ((model, optimizer), (reference, other)):
            plain_loss(each, rank, step).backward()
            stepper.step()
            stepper.zero_grad()
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


@on_ranks(2)
def test_full_state_dicts_hold_rank_0s_and_load_into_every_rank():
    """A full state dict has one value for each name: rank 0's; it is everybody's after loading."""
    rank = dist.get_rank()
    model = sw.parallelize(Experts(rank), sw.ParallelPlan(ignored=ALL))
    state = sw.full_state_dict(model)
    fresh = sw.parallelize(Experts(7), sw.ParallelPlan(ignored=ALL))
    sw.load_full_state_dict(fresh, state)
    again = sw.full_state_dict(fresh)
    assert all(torch.equal(again[name], value) for name, value in state.items())
    expected = Experts(0).blocks[2].expert.weight
    assert torch.equal(fresh.blocks[2].expert.weight, expected)
    if rank == 0:
        del state["tower.weight"]
    with pytest.raises(StateError, match=r"tower.weight: missing"):
        sw.load_full_state_dict(fresh, state)


def step_all(model, optimizer, steps):
    for step in steps:
        plain_loss(model, dist.get_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()


def ignored_state(model, optimizer):
    own = probe(model).ignored
    return {
        name: (p.detach().clone(), {k: v.clone() for k, v in optimizer.state.get(p, {}).items()})
        for name, p in own.items()
    }


def save(folder, ignored):
    model = sw.parallelize(Experts(dist.get_rank()), sw.ParallelPlan(ignored=ignored))
    optimizer = adamw(model.parameters())
    step_all(model, optimizer, range(2))
    sw.save(Path(folder) / "at-2", model, optimizer)
    step_all(model, optimizer, [2])
    return ignored_state(model, optimizer)


def load(folder, ignored, strategy):
    rank = dist.get_rank()
    model = sw.parallelize(Experts(rank + 5), sw.ParallelPlan(strategy=strategy, ignored=ignored, sync="warn"))
    optimizer = adamw(model.parameters())
    sw.load(Path(folder) / "at-2", model, optimizer)
    step_all(model, optimizer, [2])
    return ignored_state(model, optimizer)


def load_elsewhere(folder, ignored):
    model = sw.parallelize(Experts(0), sw.ParallelPlan(ignored=ignored))
    return refusal(CheckpointError, sw.load, Path(folder) / "at-2", model)


def test_checkpoints_hold_each_ranks_own_and_load_on_as_many_ranks(tmp_path):
    expected = run_on_ranks(save, 2, str(tmp_path), ALL)
    for strategy in ("zero3", "ddp"):
        for rank, got in enumerate(run_on_ranks(load, 2, str(tmp_path), ALL, strategy)):
            for name, (value, state) in expected[rank].items():
                assert torch.equal(got[name][0], value), name
                assert got[name][1].keys() == state.keys(), name
                assert all(torch.equal(got[name][1][key], part) for key, part in state.items()), name
    text = run_on_ranks(load_elsewhere, 3, str(tmp_path), ALL)[0]
    assert "was each rank's own and was saved by 2 ranks, but this world has 3" in text


def save_alike(folder):
    model = sw.parallelize(Chain(), sw.ParallelPlan(ignored=["stem"]))
    model.stem.requires_grad_(requires_grad=False)
    sw.save(Path(folder) / "alike", model)
    return model.stem.weight.detach().clone()


def load_alike(folder):
    model = Chain()
    with torch.no_grad():
        model.stem.weight.zero_()
    sw.parallelize(model, sw.ParallelPlan(ignored=["stem"]))
    sw.load(Path(folder) / "alike", model)
    return model.stem.weight.detach().clone()


def test_what_all_ranks_hold_alike_is_saved_once_and_loads_anywhere(tmp_path):
    expected = run_on_ranks(save_alike, 2, str(tmp_path))[0]
    for got in run_on_ranks(load_alike, 3, str(tmp_path)):
        assert torch.equal(got, expected)


@on_ranks(2)
def test_what_is_not_in_the_model_or_has_no_values_is_refused_on_all_ranks():
    model = Chain()
    pattern, module, parameter = (
        refusal(PlanError, sw.parallelize, model, sw.ParallelPlan(ignored=[entry]))
        for entry in ("blocks.*.middle", nn.Linear(2, 2), nn.Parameter(torch.zeros(3, 4)))
    )
    if dist.get_rank() == 1:
        model.blocks[2].up.to("meta")
        model.blocks[2].up.weight = nn.Parameter(torch.empty(13, 8, device="meta"))
    empty = refusal(StateError, sw.parallelize, model, sw.ParallelPlan(ignored=["blocks.2"], sync="rank0"))
    assert pattern.startswith("ignored: 'blocks.*.middle' matches no module and no parameter of Chain.\n  Names in")
    assert module.startswith("ignored: Linear is not in Chain.")
    assert parameter.startswith("ignored: a parameter of shape [3, 4] is not in Chain.")
    assert "is on the meta device" in empty


@on_ranks(1)
def test_the_update_in_backward_refuses_trained_parameters_that_it_would_leave_out():
    model = sw.parallelize(Experts(0), sw.ParallelPlan(ignored=OWN))
    with pytest.raises(StateError, match=r"ignored parameter 'blocks.0.expert.weight' would never be updated"):
        sw.optimizer_in_backward(model, adamw(model.parameters()))


@on_ranks(2)
def test_a_gradient_scaler_sees_what_one_rank_alone_holds():
    """An inf in one rank's own gradient skips the step on all ranks, under ddp too."""
    rank = dist.get_rank()
    model = sw.parallelize(Experts(rank), sw.ParallelPlan(strategy="ddp", ignored=ALL))
    optimizer = adamw(model.parameters())
    scaler = sw.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(sample(rank, 0)).square().mean()).backward()
    if rank == 1:
        model.blocks[1].expert.weight.grad[0, 0] = torch.inf
    before = [p.detach().clone() for p in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("how", ["recorded", "state"])
@on_ranks(2)
def test_a_model_on_meta_gets_them_filled_too(how):
    plain = Chain()
    ignored = ["blocks.2", "stem.weight"]
    if how == "recorded":
        model = sw.parallelize(sw.deferred_init(Chain), sw.ParallelPlan(ignored=ignored))
    else:
        with torch.device("meta"):
            model = Chain()
        sw.parallelize(model, sw.ParallelPlan(ignored=ignored), init=plain.state_dict())
    assert torch.equal(model.blocks[2].up.weight, plain.blocks[2].up.weight)
    assert torch.equal(model.stem.weight, plain.stem.weight)
    assert "stem.weight" not in {shard.name for shard in probe(model).shards}
