"""Optimizers of bitsandbytes, stood for by classes of its names: what fits them under sharding."""

from __future__ import annotations

import types

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.spec.errors import StateError
from tests.common.oracle import Chain, sample
from tests.common.ranks import on_ranks


def optimizer_of(name: str, bits: int, *, max_unorm: float = 0.0) -> type[torch.optim.Optimizer]:
    def init(self, params, lr=0.1):
        torch.optim.SGD.__init__(self, params, lr=lr)
        self.args = types.SimpleNamespace(optim_bits=bits, max_unorm=max_unorm, min_8bit_size=4096)

    return type(name, (torch.optim.SGD,), {"__init__": init, "__module__": f"bitsandbytes.optim.{name.lower()}"})


def step(cls, strategy, **fields):
    torch.manual_seed(0)
    model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy, **fields))
    optimizer = cls(model.parameters())
    batch = sample(dist.get_rank() * ("pp" not in fields), 0)
    sw.train_step(model, batch, lambda output, _: output.square().mean(), num_microbatches=1)
    optimizer.step()


@on_ranks(2)
def test_each_is_told_what_fits_it():
    eight, lamb, wide = optimizer_of("AdamW8bit", 8), optimizer_of("LAMB", 32, max_unorm=1.0), optimizer_of("AdamW", 32)
    with pytest.raises(StateError, match=r"bitsandbytes' AdamW8bit keeps its state.*\n.*torchao.optim.AdamW8bit"):
        step(eight, "zero3")
    with pytest.raises(StateError, match=r"LAMB needs every parameter whole on one rank.*\n.*granularity='tensor'"):
        step(lamb, "zero3")
    step(lamb, "zero3", granularity="tensor")
    step(wide, "zero3")
    for cls in (eight, lamb, wide):
        step(cls, "ddp")
        step(cls, "ddp", pp=2)
