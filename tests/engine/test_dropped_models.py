"""Models that are deleted while messages of theirs are under way."""

from __future__ import annotations

import contextlib
import gc
import weakref

import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from shardwise.comm.gloo import _Exchange
from shardwise.testing import probe
from tests.common.oracle import Chain, Wanders, plain_loss, presets, sample
from tests.common.ranks import on_ranks


class Raises(Chain):
    """Raises behind its third block on request: the fourth is being gathered then."""

    def forward(self, x: Tensor, *, fails: bool = False) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if fails and index == 2:
                raise ValueError("a wrong batch")
        return self.head(x)


def raises_in_forward(strategy):
    rank = dist.get_rank()
    model = sw.parallelize(Raises(num_blocks=6), sw.ParallelPlan(strategy=strategy))
    for step in range(2):
        plain_loss(model, rank, step).backward()
    with contextlib.suppress(ValueError):
        model(sample(rank, 2), fails=True)
    return model, sum(unit.state == "unsharding" for unit in probe(model).units)


@on_ranks(2, timeout_s=60)
def test_a_model_that_is_dropped_with_a_prefetch_under_way_leaves_the_group_in_order():
    """What is under way when the model goes has come when it is gone: the next collective on the group ends."""
    found = {}
    for strategy in presets():
        model, num_under_way = raises_in_forward(strategy)
        del model
        gc.collect()
        total = torch.tensor([1.0])
        dist.all_reduce(total)
        again = sw.parallelize(Chain())
        plain_loss(again, dist.get_rank(), 0).backward()
        found[strategy] = num_under_way, total.item()
    assert found["zero3"] == (1, 2.0)
    assert {total for _, total in found.values()} == {2.0}


@on_ranks(2, timeout_s=40)
def test_what_is_being_gathered_is_waited_for_before_its_memory_goes():
    """Waits of the dropped model's receives, before its slots are freed."""
    model, _ = raises_in_forward("zero3")
    handles = [each for each in gc.get_objects() if isinstance(each, _Exchange) and each._receives]
    num_handles = len(handles)
    del model
    gc.collect()
    assert (num_handles, [len(handle._receives) for handle in handles]) == (1, [0])


@on_ranks(2, timeout_s=60)
def test_a_dropped_model_goes_at_once_after_ranks_have_agreed_which_units_backward_comes_to_again():
    gc.disable()
    rank = dist.get_rank()
    for strategy in ("ddp", "zero3"):
        model = sw.parallelize(Wanders(), sw.ParallelPlan(strategy=strategy, merge_units=False))
        for step in range(2):
            model(sample(rank, step), ((0, 1, 2, 3), (0, 1, 0, 2, 0))[rank]).square().mean().backward()
        references = [weakref.ref(parameter) for parameter in model.parameters()]
        engine = probe(model)._engine
        assert not engine.backward.awaited
        del model, engine
        assert [parameter() for parameter in references] == [None] * len(references), strategy
