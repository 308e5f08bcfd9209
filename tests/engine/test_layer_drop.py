"""Models that leave out layers, each rank others, from the first step on.

BART and Whisper with LayerDrop and CaiT with layer dropout are among the families of ``tests/common/families.py``.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing import run_on_ranks
from tests.common.oracle import Block, Chain, compare, compare_each, presets, sample


class Nested(nn.Module):
    """Two units in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block(8, 11)
        self.second = Block(8, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Drops(Chain):
    """Leaves out layers; the last of the list have no gradient, and another list follows in an inner module."""

    def __init__(self) -> None:
        super().__init__(Nested)
        self.tail = Chain(num_blocks=3)
        self.tail.head = nn.Linear(8, 8)

    def forward(self, x: Tensor, left_out: tuple[int, ...] = ()) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            if index not in left_out:
                x = block(x)
        y = self.tail.stem(x)
        for index, block in enumerate(self.tail.blocks):
            if index + 5 not in left_out:
                y = block(y)
        return self.head(self.tail.head(y) + x)


#: By step, by rank: which layers are left out. In the first step nobody runs layer 1.
LEFT_OUT = (((0, 1), (1, 4, 5), (1,)), ((), (2, 6), (7,)), ((4,), (4,), (4,)), ((1, 2, 3), (0, 7), (5, 6)))


def drop(model, rank, step):
    return model(sample(rank, step), LEFT_OUT[step][rank]).square().mean()


def drops():
    for policy in ("auto", sw.wrap_by_class({Nested}), sw.wrap_by_class({Nested, Block})):
        compare_each(Drops, drop, presets(), auto_wrap_policy=policy)
    compare(Drops, drop, "zero3", activation_checkpointing="full")
    compare(Drops, drop, "zero3", merge_units=1 << 20)
    compare(Drops, drop, "zero3", merge_units=False, activation_checkpointing="full")


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_may_leave_out_different_layers_of_a_list_from_the_first_step_on(world):
    run_on_ranks(drops, world, timeout_s=120)
