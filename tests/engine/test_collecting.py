"""A few copies move a gradient into its flat buffer, however many ranks the buffer is cut for.

One process alone stands for one of many ranks: nothing is sent, so its shards get its own gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.api.parallelize import apply_plan
from shardwise.api.preparation import prepare
from shardwise.comm.axes import open_mesh_comms
from shardwise.comm.dtype import memory_order
from shardwise.comm.record import RecordComm
from shardwise.engine.storage.attachment import engine_of
from shardwise.spec.mesh import Mesh

SHAPES = ((256, 257), (257,), (300, 257), (3, 1, 2, 2), (), (500, 64))


class Weighted(nn.Module):
    """The gradient of each parameter is a constant, whatever the parameters are: other ranks' parts are missing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in SHAPES)
        self.gradients = [torch.randn(shape) for shape in SHAPES]

    def forward(self) -> Tensor:
        return sum((w * g).sum() for w, g in zip(self.weights, self.gradients, strict=True))


def as_one_of(size: int, rank: int, plan: sw.ParallelPlan) -> Weighted:
    """The model as one rank of ``size`` holds it."""
    model = Weighted()

    def open_axis(axis: str, _purpose: str, ranks: Sequence[int]) -> RecordComm:
        return RecordComm(axis, rank=ranks.index(rank), size=len(ranks))

    comms = open_mesh_comms(Mesh(dp_shard=size), rank, open_axis)
    apply_plan(model, prepare(model, plan), comms, lambda: open_axis("dp", "", range(size)))
    return model


@contextlib.contextmanager
def counted(name: str, counts: list[int]):
    """Count the copies of each call of a foreach function. On CUDA one launch does all only where strides agree."""
    real: Callable[..., None] = getattr(torch, name)

    def call(targets: list[Tensor], sources: list[Tensor]) -> None:
        assert len(targets) == 1 or all(a.stride() == b.stride() for a, b in zip(targets, sources, strict=True))
        counts.append(len(targets))
        real(targets, sources)

    with mock.patch.object(torch, name, call):
        yield


@pytest.mark.parametrize("granularity", ["element", "row", ("block", 2048)], ids=str)
@pytest.mark.parametrize(("size", "rank"), [(2, 1), (8, 3), (64, 0), (1024, 0)])
def test_copies_of_a_gradient_do_not_grow_with_the_ranks_and_change_no_bit(size, rank, granularity):
    plan = sw.ParallelPlan("zero3", granularity=granularity, auto_wrap_policy="none", accumulation="unsharded")
    model = as_one_of(size, rank, plan)
    (group,) = [group for unit in engine_of(model, "").units for group in unit.groups]
    copies: list[int] = []
    added: list[int] = []
    filled = mock.patch.object(group.form, "zeros", side_effect=AssertionError("the sum fills the memory of .grad"))
    with counted("_foreach_copy_", copies), counted("_foreach_add_", added), filled:
        for is_last in (False, True):
            with sw.gradient_sync(model, is_last):
                model().backward()
    at_most = (3 if group.layout.is_even else 4) * len(SHAPES)
    assert len(SHAPES) <= sum(copies) <= at_most
    assert 0 < sum(added) <= sum(copies)
    num_checked = 0
    for shard, piece, spec in zip(group.shards, group.pieces, group.layout.params, strict=True):
        if piece.numel:
            gradient = model.gradients[int(spec.name.removeprefix("weights."))]
            expected = gradient.view(-1)[piece.start : piece.stop]
            assert torch.equal(memory_order(shard.grad), expected + expected)
            num_checked += piece.numel
    assert num_checked
