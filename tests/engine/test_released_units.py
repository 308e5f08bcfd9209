"""Units are released and gathered again: whatever the order in which they run, each finds its own data."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.engine.engine import Engine
from shardwise.testing import probe
from tests.common.oracle import Block, Chain, compare, compare_each, plain_loss, presets, sample
from tests.common.ranks import on_ranks


class Twice(Chain):
    """Every unit runs twice in a forward: 0 1 2 3 4 0 1 2 3 4."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.head(x)


class Idle(Chain):
    """A block runs after the head, and no backward comes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(Block())

    def forward(self, x: Tensor) -> Tensor:
        *blocks, idle = self.blocks
        x = self.stem(x)
        for block in blocks:
            x = block(x)
        y = self.head(x)
        idle(x)
        return y


class InARow(Chain):
    """Every unit runs twice in a row: 0 0 1 1 2 2."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(block(x))
        return self.head(x)


class ThereAndBack(Chain):
    """0 1 2 3 4 3 2 1 0."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in [*self.blocks, *reversed(self.blocks[:-1])]:
            x = block(x)
        return self.head(x)


@on_ranks(2, 3)
def test_units_that_run_more_than_once_find_their_data_again():
    for build in (Twice, InARow, ThereAndBack):
        compare_each(build, plain_loss)


def freeze(model, names):
    for name, parameter in model.named_parameters():
        if any(part in name for part in names):
            parameter.requires_grad_(False)
    return model


@on_ranks(2, 3)
def test_frozen_units_and_frozen_parts_of_units_have_data_but_no_gradients():
    """pytorch#91167, pytorch#104690: parameters of a unit must be trained or frozen all together."""
    for build in (Chain, Twice):
        compare_each(lambda build=build: freeze(build(), ["blocks.0", "blocks.2", "blocks.3"]), plain_loss)
        compare_each(lambda build=build: freeze(build(), ["stem", "blocks.0", "blocks.1"]), plain_loss)
    for trained in compare_each(lambda: freeze(Chain(), ["up", "stem"]), plain_loss).values():
        seen = trained.probe
        assert all(sum(group.is_trainable for group in unit.groups) == 1 for unit in sw.summary(trained.model).units)
        frozen_shards = [shard.parameter for shard in seen.shards if not shard.parameter.requires_grad]
        assert all(shard.grad is None and shard not in trained.optimizer.state for shard in frozen_shards)
        plain_loss(trained.model, dist.get_rank(), 9).backward()
        assert seen.held_bytes()["gradients"] == seen.predicted_bytes()["gradients"]  # none of frozen ones


class Family(nn.Module):
    """A unit that holds two units, one of which holds another, and computes between them."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.child = Block()
        self.scale = nn.Parameter(torch.ones(8))
        self.other = Parent()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.mix(x))
        h = self.child(h) * self.scale
        return x + self.mix(self.other(h))


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grandchild = Block()
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.grandchild(x + self.bias)


NESTED = sw.wrap_by_class({"Family", "Parent", "Block"})


@on_ranks(2, 3)
def test_nested_units_never_share_storage_with_those_around_them():
    for trained in compare_each(lambda: Chain(Family, 3), plain_loss, auto_wrap_policy=NESTED).values():
        units = sw.summary(trained.model).units
        assert len(units) == 13
        assert max(unit.depth for unit in units) == 3
    compare_each(lambda: Chain(Family, 3), plain_loss, auto_wrap_policy=sw.wrap_by_size(1), steps=3)
    compare_each(lambda: Chain(Family, 3), two_forwards, auto_wrap_policy=NESTED, steps=3)


def two_forwards(model, rank, step):
    """Two forwards before one backward."""
    return (model(sample(rank, step)) * model(sample(rank, step, salt=1))).mean()


def separate_backwards(model, rank, step):
    """Two forwards, then a backward of each, the older first."""
    first, second = plain_loss(model, rank, step), plain_loss(model, rank, step + 50)
    first.backward()
    yield first
    second.backward()
    yield second


def newer_first(model, rank, step):
    first, second = plain_loss(model, rank, step), plain_loss(model, rank, step + 50)
    second.backward()
    yield second
    first.backward()
    yield first


def forward_forgotten(model, rank, step):
    """A forward whose backward never comes."""
    forgotten = model(sample(rank, step, salt=2))
    del forgotten
    return plain_loss(model, rank, step)


def forward_kept(model, rank, step):
    """A forward whose backward never comes, though its graph lives on."""
    model.__dict__["kept_by_test"] = model(sample(rank, step, salt=2))
    return plain_loss(model, rank, step)


def two_from_the_third_step_on(model, rank, step):
    """The order has been recorded with one forward to a backward; then there are two."""
    return two_forwards(model, rank, step) if step > 1 else plain_loss(model, rank, step)


def two_in_the_first_steps(model, rank, step):
    return two_forwards(model, rank, step) if step < 2 else plain_loss(model, rank, step)


CHANGING = (two_from_the_third_step_on, two_in_the_first_steps)


@on_ranks(2, 3)
def test_several_forwards_may_come_before_a_backward():
    for script in (two_forwards, separate_backwards, newer_first, forward_forgotten, forward_kept):
        compare_each(Chain, script, steps=3)
    for script in CHANGING:
        compare_each(Chain, script)
    compare_each(Twice, two_forwards, steps=3)
    compare_each(Twice, separate_backwards, steps=3)


class Parallel(nn.Module):
    """Branches that run side by side and meet at the end, one of them with a tail."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.left = nn.ModuleList(Block() for _ in range(3))
        self.right = nn.ModuleList(Block() for _ in range(3))
        self.join = nn.Bilinear(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x, torch.sin(x)
        for left, right in zip(self.left, self.right, strict=True):
            a, b = left(a), right(b)
        return self.join(a, b)


class BoundaryTensor(Parallel):
    """Each branch feeds the other, and the first outputs are used again at the end."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x, torch.sin(x)
        first = None
        for left, right in zip(self.left, self.right, strict=True):
            a, b = left(b) + a, right(a) * b
            first = a if first is None else first
        return self.join(a + first, b)


class Dense(Chain):
    """Every block sees the outputs of all before it."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = [self.stem(x)]
        for block in self.blocks:
            outputs.append(block(torch.stack(outputs).sum(0)))
        return self.head(F.gelu(torch.stack(outputs).sum(0)))


@on_ranks(2, 3)
def test_parallel_branches_and_dense_connections_are_right():
    for build in (Parallel, BoundaryTensor, Dense):
        compare_each(build, plain_loss)


class Uneven(Chain):
    """Blocks of many sizes."""

    def __init__(self) -> None:
        sizes = iter([13, 40, 14, 41, 15, 3, 42, 16])
        super().__init__(lambda: Block(8, next(sizes)), 8)


@on_ranks(2, 3)
def test_units_of_different_sizes_are_right_and_have_the_bytes_of_those_that_are_there_together():
    for strategy in presets():
        trained = compare(Uneven, plain_loss, strategy)
        assert trained.probe.held_bytes()["gathered"] == trained.probe.predicted_bytes()["gathered"], strategy


@pytest.mark.parametrize("num_buffers", [1, 2, 3, 4])
@on_ranks(2)
def test_all_gradient_buffers_but_one_travel_while_it_is_filled(num_buffers: int) -> None:
    """The most units whose reductions are under way at once."""
    plan = sw.ParallelPlan(gradient_buffers=num_buffers, merge_units=False)
    model = sw.parallelize(Chain(), plan)
    seen, counts = probe(model), []
    issue = Engine.reduce

    def reduce(engine: Engine, unit: Any) -> None:
        issue(engine, unit)
        counts.append(len(seen.reducing))

    with mock.patch.object(Engine, "reduce", reduce):
        plain_loss(model, dist.get_rank(), 0).backward()
    assert not seen.reducing
    assert max(counts) == max(num_buffers - 1, 1)


@on_ranks(2, 3)
def test_nothing_that_a_step_needs_stays_allocated():
    for build in (Chain, Twice, ThereAndBack, Idle):
        for trained in compare_each(build, plain_loss).values():
            seen = trained.probe
            assert all(b.untyped_storage().nbytes() == 0 for b in (*seen.gathered_buffers, *seen.gradient_buffers))


@on_ranks(2, 3)
def test_with_one_gradient_buffer_a_single_unit_has_one_at_a_time():
    for build in (Chain, Twice):
        for strategy, trained in compare_each(build, plain_loss, gradient_buffers=1).items():
            measured, predicted = trained.probe.held_bytes(), trained.probe.predicted_bytes()
            assert measured["reduce"] == predicted["reduce"], strategy
