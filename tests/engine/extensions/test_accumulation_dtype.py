"""In which dtype gradients of several microbatches are added up, where they travel in another than the master's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, distributed, nn

import shardwise as sw
from shardwise.testing import run_on_ranks, same_bits
from tests.common import models

PRESETS = ("ddp", "zero1", "zero2", "shard_grad_op", "zero3")
NUM_MICROBATCHES = 4
Gradients = list[Tensor]
State = dict[str, Tensor]


def policy(reduce_dtype: str) -> sw.PrecisionPolicy:
    return sw.PrecisionPolicy(param_dtype="bf16", reduce_dtype=reduce_dtype)


def train(preset: str, accumulation: str, reduce_dtype: str) -> State:
    """One step of SGD with a rate of 1 over the mean of all microbatches: what is added is what is seen."""
    plan = sw.ParallelPlan(strategy=preset, mp_policy=policy(reduce_dtype), accumulation=accumulation)
    model = sw.parallelize(models.build("tied"), plan)
    rank = distributed.get_rank()
    for microbatch in range(NUM_MICROBATCHES):
        with sw.gradient_sync(model, microbatch == NUM_MICROBATCHES - 1):
            model(*models.batch(0, microbatch, rank)).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return sw.full_state_dict(model)


def train_all() -> dict[tuple[str, str, str], State]:
    return {
        (preset, accumulation, reduce_dtype): train(preset, accumulation, reduce_dtype)
        for preset in PRESETS
        for accumulation in ("sharded", "unsharded")
        for reduce_dtype in ("bf16", "fp32")
    }


# -- one process


class OneProcess:
    """The same gradients, added up in one way or another."""

    def __init__(self, world: int, reduce_dtype: torch.dtype) -> None:
        self.world = world
        self.reduce = reduce_dtype
        self.low = models.build("tied").to(torch.bfloat16)

    def gradients(self, microbatch: int, rank: int) -> Gradients:
        self.low.zero_grad()
        self.low(*models.batch(0, microbatch, rank)).backward()
        return [parameter.grad.clone() for parameter in self.low.parameters() if parameter.grad is not None]

    def by_rank(self, accumulate_in: torch.dtype) -> State:
        """Each rank adds up its microbatches in a dtype, then the ranks are summed in the reduce dtype."""
        ranks = []
        for rank in range(self.world):
            grads = [_cast(self.gradients(m, rank), accumulate_in) for m in range(NUM_MICROBATCHES)]
            ranks.append(_cast(_added(grads), self.reduce))
        return self._update(_cast([total / self.world for total in _added(ranks)], torch.float32))

    def by_microbatch(self, accumulate_in: torch.dtype) -> State:
        """The ranks are summed for each microbatch in the reduce dtype, and the means added up in another."""
        means = []
        for microbatch in range(NUM_MICROBATCHES):
            total = _added([_cast(self.gradients(microbatch, rank), self.reduce) for rank in range(self.world)])
            means.append(_cast([each / self.world for each in total], accumulate_in))
        return self._update(_cast(_added(means), torch.float32))

    @staticmethod
    def _update(grads: Gradients) -> State:
        master: nn.Module = models.build("tied")
        for parameter, grad in zip(master.parameters(), grads, strict=True):
            parameter.grad = grad
        torch.optim.SGD(master.parameters(), lr=1.0).step()
        return master.state_dict()


def _cast(grads: Gradients, dtype: torch.dtype) -> Gradients:
    return [grad.to(dtype) for grad in grads]


def _added(terms: list[Gradients]) -> Gradients:
    total = terms[0]
    for more in terms[1:]:
        total = [a + b for a, b in zip(total, more, strict=True)]
    return total


def differing(got: State, expected: State) -> list[str]:
    return [name for name, value in expected.items() if not same_bits(got[name], value)]


#: By accumulation: what it is, and what it would be in the other dtype.
WAYS: dict[str, tuple[Callable[[OneProcess], State], Callable[[OneProcess], State]]] = {
    "sharded": (
        lambda plain: plain.by_microbatch(torch.float32),
        lambda plain: plain.by_microbatch(plain.reduce),
    ),
    "unsharded": (
        lambda plain: plain.by_rank(plain.reduce),
        lambda plain: plain.by_rank(torch.float32 if plain.reduce is torch.bfloat16 else torch.bfloat16),
    ),
}


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long)])
def test_sharded_accumulation_is_in_the_masters_dtype_and_unsharded_in_the_reduce_dtype(world: int) -> None:
    results, *_ = run_on_ranks(train_all, world, timeout_s=150)
    for reduce_dtype, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        plain = OneProcess(world, dtype)
        for accumulation, (right, wrong) in WAYS.items():
            expected, other = right(plain), wrong(plain)
            is_blind = accumulation == "sharded" and reduce_dtype == "fp32"  # master and reduce dtype are one there
            assert bool(differing(other, expected)) != is_blind, "the comparison could not tell"
            for preset in PRESETS:
                got = results[preset, accumulation, reduce_dtype]
                assert differing(got, expected) == [], (preset, accumulation, reduce_dtype)
