"""Activation checkpointing: forward hooks that run inside backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import shardwise as sw
from tests.common.oracle import Block, Chain, compare_each, plain_loss, sample
from tests.common.ranks import on_ranks


class PerBlock(Chain):
    """Every block is recomputed, with dropout in it."""

    def __init__(self, is_reentrant: bool) -> None:
        super().__init__(Dropping)
        self.is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        return self.head(x)


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, training=self.training)


class PerSegment(Chain):
    """Segments of several blocks are recomputed as one."""

    def __init__(self, is_reentrant: bool) -> None:
        super().__init__(Block, 6)
        self.is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=self.is_reentrant)
        return self.head(x)


class Whole(Chain):
    """All blocks are one segment: backward recomputes the whole forward at once."""

    def __init__(self, is_reentrant: bool) -> None:
        super().__init__(Block, 6)
        self.is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.run, self.stem(x), use_reentrant=self.is_reentrant))

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class InsideUnit(Block):
    """A submodule of a unit is recomputed."""

    is_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.up, torch.sin(x), use_reentrant=self.is_reentrant)
        return x + self.down(F.gelu(h))


class InsideUnitReentrant(InsideUnit):
    is_reentrant = True


class StopsEarly(Block):
    """What follows the last saved tensor is not recomputed: the module never gets to its end."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.sin(self.up(x))) + 1.0


class Nested(Chain):
    """A recomputed segment holds recomputed blocks: with reentrant ones, a backward in a backward in a backward."""

    def __init__(self, is_reentrant: bool) -> None:
        super().__init__(Block, 6)
        self.is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, self.stem(x), use_reentrant=self.is_reentrant)
        x = checkpoint(self.second, x, use_reentrant=self.is_reentrant)
        return self.head(x)

    def first(self, x: Tensor) -> Tensor:
        for block in self.blocks[:3]:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        return x

    def second(self, x: Tensor) -> Tensor:
        for block in self.blocks[3:]:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        return x


# Of a reentrant one in a reentrant one, which runs without grad first.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("is_reentrant", [False, True])
@on_ranks(2, 3)
def test_blocks_segments_and_submodules_can_be_recomputed(is_reentrant):
    models = [
        lambda: PerBlock(is_reentrant),
        lambda: PerSegment(is_reentrant),
        lambda: Whole(is_reentrant),
        lambda: Nested(is_reentrant),
        lambda: Chain(InsideUnitReentrant if is_reentrant else InsideUnit),
    ]
    for build in models:
        compare_each(build, plain_loss, steps=3)


class Early(Chain):
    def __init__(self) -> None:
        super().__init__(StopsEarly)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, early_stop=True)
        return self.head(x)


@on_ranks(2)
def test_a_recomputation_that_stops_early_leaves_no_frame_behind():
    for trained in compare_each(Early, plain_loss).values():
        assert not any(unit.num_open_forwards for unit in trained.probe.units)
        with torch.no_grad():  # what follows is not taken for a recomputation
            trained.model(sample(0, 9))
        assert trained.probe.num_open_forwards == 0


class InnerBackward(Block):
    """Runs a backward of its own inside backward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_Inner.apply(x))


class _Inner(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (leaf * leaf).backward(grad)
        return leaf.grad


@on_ranks(2, 3)
def test_a_backward_inside_backward_does_not_end_the_outer_one():
    compare_each(lambda: Chain(InnerBackward), plain_loss)


class NestedUnits(nn.Module):
    """A unit that holds two, all recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.second, self.mix(checkpoint(self.first, x, use_reentrant=False)), use_reentrant=False)


class Outer(Chain):
    def __init__(self) -> None:
        super().__init__(NestedUnits, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@on_ranks(2, 3)
def test_units_in_recomputed_units_can_be_recomputed():
    compare_each(Outer, plain_loss, auto_wrap_policy=sw.wrap_by_class({NestedUnits, Block}))


def accumulate_with_recomputation(model, rank, step):
    """Twice through the model before one backward, both recomputed."""
    y = model(sample(rank, step)) * model(sample(rank, step, salt=1))
    return y.mean()


def whole_model(is_reentrant):
    def script(model, rank, step):
        x = sample(rank, step).requires_grad_()
        return checkpoint(model, x, use_reentrant=is_reentrant).square().mean()

    return script


@on_ranks(2)
def test_a_whole_model_can_be_recomputed_and_two_recomputed_forwards_share_one_backward():
    for is_reentrant in (False, True):
        compare_each(Chain, whole_model(is_reentrant), steps=3)
        compare_each(lambda flag=is_reentrant: PerBlock(flag), accumulate_with_recomputation, steps=3)


class GivesAnother(Block):
    """Returns a second value beside its own."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.gelu(self.up(x))
        return x + self.down(h), torch.sin(h).mean(-1)


class Beside(Chain):
    """The root returns the second values as they are; some blocks are left out, in other steps others."""

    def __init__(self) -> None:
        super().__init__(GivesAnother)
        self.left_out: frozenset[int] = frozenset()

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, others = self.stem(x), []
        for index, block in enumerate(self.blocks):
            if index not in self.left_out:
                x, other = checkpoint(block, x, use_reentrant=False)
                others.append(other)
        return self.head(x), others


def through_second_values(model, rank, step):
    """Backward begins in a block, not in the root; with the graph kept it comes a second time, through all."""
    model.left_out = frozenset({2, 3} if step < 2 else {1})
    y, others = model(sample(rank, step))
    loss = others[0 if step % 2 else -1].cos().mean()
    loss.backward(retain_graph=True)
    yield loss
    loss = y.square().mean() + sum(other.cos().mean() for other in others)
    loss.backward()
    yield loss


@on_ranks(2, 3)
def test_backward_may_begin_in_a_recomputed_unit_whose_second_value_the_root_returns():
    compare_each(Beside, through_second_values)
