"""What stages of a pipeline have besides parameters: running statistics, random numbers; and parameters of several."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.spec.errors import PlanError, StateError
from shardwise.testing import run_on_ranks
from tests.common.ranks import on_ranks

STEPS, NUM_MICROBATCHES = 2, 2


class Net(nn.Module):
    """Batch norm before and behind the blocks, in one block without parameters, and a dropout in each block."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(4))
        self.blocks[2].append(nn.BatchNorm1d(6, affine=False))
        self.last = nn.BatchNorm1d(6)

    def forward(self, x):
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


def batch(step):
    return torch.randn(16, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def note(masks, module, _args, output):
    if module.training:
        masks.append((output != 0).tolist())


def train(rate, path):
    model = Net().double()
    for block in model.blocks:
        block[1].p = rate
    model = sw.parallelize(model, sw.ParallelPlan(pp=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    masks, losses = [], []
    for block in model.blocks:
        if list(block.children()):
            block[1].register_forward_hook(functools.partial(note, masks))
    for step in range(STEPS):
        losses.append(sw.train_step(model, (batch(step),), num_microbatches=NUM_MICROBATCHES).item())
        optimizer.step()
        optimizer.zero_grad()
    drawn = torch.rand(()).item()
    state = sw.full_state_dict(model)
    sw.save(path, model, optimizer)
    loaded = sw.parallelize(Net().double(), sw.ParallelPlan(pp=2))
    sw.load(path, loaded)
    evaluated = [sw.eval_step(each.eval(), (batch(9),)).item() for each in (model, loaded)]
    return losses, evaluated, state, masks, drawn


def test_running_statistics_are_those_of_one_process(tmp_path):
    ranks = run_on_ranks(train, 2, 0.0, str(tmp_path / "saved"))
    model = Net().double()
    for block in model.blocks:
        block[1].p = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        losses = [model(part) / NUM_MICROBATCHES for part in batch(step).chunk(NUM_MICROBATCHES)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert [ranks[0][0][step], ranks[1][0][step]] == [sum(loss.item() for loss in losses)] * 2
    for key, value in model.state_dict().items():
        torch.testing.assert_close(ranks[0][2][key], value, rtol=0, atol=0, msg=key)
    assert model.last.num_batches_tracked == STEPS * NUM_MICROBATCHES
    with torch.no_grad():
        evaluated = sum(model.eval()(part).item() for part in batch(9).chunk(2)) / 2
    for _, found, *_ in ranks:
        torch.testing.assert_close(torch.tensor(found), torch.tensor([evaluated] * 2), rtol=0, atol=0)


def test_every_stage_and_microbatch_draws_for_itself(tmp_path):
    ranks = run_on_ranks(train, 2, 0.5, str(tmp_path / "saved"))
    masks = [str(mask) for _, _, _, found, _ in ranks for mask in found]
    assert len(masks) == len(set(masks)) == 4 * STEPS * NUM_MICROBATCHES
    drawn = {drawn for *_, drawn in ranks}
    assert len(drawn) == 1, "whatever a stage draws, the states of the ranks stay the same"
    again = run_on_ranks(train, 2, 0.5, str(tmp_path / "again"))
    assert [found[0] for found in again] == [found[0] for found in ranks]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Tied(nn.Module):
    """The last block has a weight of the first between what is its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[3].up.weight = self.blocks[0].up.weight

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def hold_ties():
    model = sw.parallelize(Tied().double(), sw.ParallelPlan(pp=2))
    sw.train_step(model, (batch(0),), num_microbatches=2)
    with pytest.raises(StateError) as caught:
        torch.optim.Adafactor(model.parameters()).step()
    whole = sw.parallelize(Tied().double(), sw.ParallelPlan(pp=2, granularity="tensor"))
    sw.train_step(whole, (batch(0),), num_microbatches=2)
    torch.optim.Adafactor(whole.parameters()).step()
    return list(sw.full_state_dict(model)), str(caught.value)


def test_state_dicts_with_ties_between_stages_have_the_order_of_one_process():
    ranks = run_on_ranks(hold_ties, 2)
    assert ranks[0][0] == list(Tied().state_dict())
    for _, refusal in ranks:
        assert refusal.startswith("Adafactor needs every parameter whole on one rank, but parameter 'blocks.")
        assert "is sharded by element: dp_shard is 1, so that this rank has all of it, but plans must not" in refusal
        assert "Use sw.ParallelPlan(granularity='tensor')" in refusal


class Watched(Tied):
    """Its own forward keeps a mean of what the blocks give."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return x.square().mean()


class Normed(Tied):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6, affine=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x).square().mean()


@on_ranks(2)
def test_state_outside_of_blocks_is_refused_on_every_rank():
    found = []
    for kind in (Watched, Normed):
        model = sw.parallelize(kind().double(), sw.ParallelPlan(pp=2))
        with pytest.raises(PlanError) as caught:
            sw.train_step(model, (batch(0),), num_microbatches=2)
        found.append(str(caught.value))
    own, norm = found
    assert own.startswith("the model's own forward writes to the buffer 'mean'")
    assert norm.startswith("'norm' has no parameters, so that every pipeline stage has it, but writes to its buffers")


@on_ranks(3)
def test_a_buffer_that_every_stage_has_is_in_the_full_state_once():
    plain = Net()
    plain.register_buffer("shift", torch.randn(6))
    expected = {key: value.clone() for key, value in plain.state_dict().items()}
    state = sw.full_state_dict(sw.parallelize(plain, sw.ParallelPlan(pp=3)))
    if torch.distributed.get_rank() == 0:
        assert list(state) == list(expected)
        assert all(torch.equal(state[key], value) for key, value in expected.items())


class Scaled(Net):
    """Has parameters of its own, which every stage holds: one is used, the other never."""

    def __init__(self):
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return super().forward(x) * self.scale


@on_ranks(4)
def test_a_parameter_of_several_stages_that_none_uses_has_no_gradient():
    for strategy in ("ddp", "zero2", "zero3"):
        model = sw.parallelize(Scaled().double(), sw.ParallelPlan(strategy=strategy, pp=2))
        sw.train_step(model, (batch(0),), num_microbatches=NUM_MICROBATCHES)
        assert model.unused.grad is None
        assert model.scale.grad is not None
