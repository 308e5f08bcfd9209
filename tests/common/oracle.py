"""One plain process beside the ranks, with the models and data of the tests of the engine.

What is compared, and how, is in ``shardwise.testing.oracle``.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing import Comparison, Waiting, compare_each_with_one_process, compare_with_one_process, probe

__all__ = ["Waiting"]

PRESETS = ("ddp", "zero1", "zero2", "shard_grad_op", "zero3")
SHARDED = ("shard_grad_op", "zero3")


def presets() -> tuple[str, ...]:
    """:func:`some_presets` on two ranks; on other worlds one with replicas and one without."""
    if _only is not None:
        return _only
    return some_presets() if not dist.is_initialized() or dist.get_world_size() == 2 else ("zero1", "zero3")


def some_presets(turn: int = 0) -> tuple[str, ...]:
    """``ddp``, ``zero3`` and one preset between them by the name of the running test; ``pytest --every-case``: all.

    Args:
        turn: Number of a variant of the test: the next variant gets the next preset.
    """
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]  # without the phase
    if not test or "SHARDWISE_EVERY_CASE" in os.environ:
        return PRESETS
    return ("ddp", PRESETS[1 + (zlib.crc32(test.encode()) + turn) % 3], "zero3")


_only: tuple[str, ...] | None = None
_options: dict[str, Any] = {}


@contextlib.contextmanager
def planned(*, only: tuple[str, ...] | None = None, **options: Any) -> Iterator[None]:
    """Inside, scenarios run with these fields of the plan, and under the presets of ``only``."""
    global _only, _options
    before = _only, _options
    _only, _options = only, options
    try:
        yield
    finally:
        _only, _options = before


Script = Callable[[nn.Module, int, int], Any]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def descend(optimizer: torch.optim.Optimizer, losses: Iterable[Tensor]) -> None:
    """A step for each loss, which is computed when the step before it is done."""
    for loss in losses:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


_OF_THE_ORACLE = inspect.signature(compare_each_with_one_process).parameters.keys()


def compare(
    build: Callable[..., nn.Module],
    script: Script,
    strategy: str = "zero3",
    *,
    parallelize: Callable[[nn.Module], nn.Module] | None = None,
    **options: Any,
) -> Comparison:
    """Train under ``strategy`` and as one process (``shardwise.testing.compare_with_one_process``).

    Args:
        build: Builds the model; for the rank that is given, where some are ignored.
        script: What a rank does in a step.
        strategy: Name of a preset.
        parallelize: Instead of ``sw.parallelize`` with ``strategy``.
        **options: Of the oracle by its names, else further fields of the plan.
    """
    if parallelize is None:
        return compare_each(build, script, (strategy,), **options)[strategy]
    return compare_with_one_process(
        build,
        script,
        parallelize,
        shares_buffers=False,
        where=f"{strategy} on {dist.get_world_size()} ranks",
        **options,
    )


def compare_each(
    build: Callable[..., nn.Module], script: Script, strategies: Sequence[str] | None = None, **options: Any
) -> dict[str, Comparison]:
    """The same under each strategy (by default those of :func:`presets`), step by step beside one process."""
    own = {name: options.pop(name) for name in list(options) if name in _OF_THE_ORACLE}
    names = presets() if strategies is None else strategies
    at = {name: f"{name} on {dist.get_world_size()} ranks" for name in names}
    plans = {name: sw.ParallelPlan(strategy=name, **_options | options) for name in at}
    found = compare_each_with_one_process(
        build,
        script,
        {at[name]: lambda model, plan=plan: sw.parallelize(model, plan) for name, plan in plans.items()},
        builds_by_rank="ignored" in options,
        **own,
    )
    return {name: found[at[name]] for name in at}


def compare_local_sums(
    model: nn.Module,
    build: Callable[[], nn.Module],
    syncs: Callable[[bool], contextlib.AbstractContextManager[None]],
    where: str,
) -> None:
    """Accumulate unsharded: rank r's microbatches are added, then the sums over the ranks, then divided.

    Args:
        model: Parallelized.
        build: Builds the plain model.
        syncs: Says in which microbatch gradients are sent: the last one.
        where: For messages.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    copies = [build() for _ in range(world)]
    for step in range(3):
        for other, plain in enumerate(copies):
            plain.zero_grad()
            for micro in range(3):
                plain_loss(plain, other, 10 * step + micro).backward()
        for micro in range(3):
            with syncs(micro == 2), sw.record_collectives(model) as events:
                plain_loss(model, rank, 10 * step + micro).backward()
            kinds = {event.kind for event in events if "reduce" in event.kind}
            assert bool(kinds) == (micro == 2), f"{where}: {kinds} in microbatch {micro}"
            if micro < 2:
                assert all(shard.grad is None for shard in probe(model).shards)  # nothing that can be read
        for shard in probe(model).shards:
            total = None
            for plain in copies:
                grad = dict(plain.named_parameters())[shard.name].grad
                total = grad if total is None else total + grad
            if shard.grad is not None:
                assert torch.equal(shard.grad, shard.part_of(total / world)), f"{where}: {shard.name}"
        model.zero_grad()


# -- models and data


def seeded(*key: int) -> torch.Generator:
    """A generator that depends on ``key`` alone."""
    seed = 17
    for part in key:
        seed = seed * 1009 + part
    return torch.Generator().manual_seed(seed)


def sample(rank: int, step: int, *shape: int, salt: int = 0) -> Tensor:
    """A rank's data of a step."""
    return torch.randn(*(shape or (3, 8)), generator=seeded(rank, step, salt))


class Block(nn.Module):
    """Two linears and a residual."""

    def __init__(self, dim: int = 8, wide: int = 13) -> None:
        super().__init__()
        self.up = nn.Linear(dim, wide)
        self.down = nn.Linear(wide, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Chain(nn.Module):
    """A stem, blocks one after the other, a head."""

    def __init__(self, block: Callable[[], nn.Module] = Block, num_blocks: int = 5, dim: int = 8) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.stem = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.head = nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Wanders(Chain):
    """Runs its blocks in the order that each forward is given."""

    def forward(self, x: Tensor, path: tuple[int, ...]) -> Tensor:
        x = self.stem(x)
        for index in path:
            x = self.blocks[index](x)
        return self.head(x)


def plain_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    """The loss of a model from (3, 8) samples to anything."""
    return model(sample(rank, step)).square().mean()


def even() -> nn.Module:
    """Linears whose parameters two or three ranks divide into multiples of 16: no vector kernel meets a remainder."""
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))


def even_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    """The loss of :func:`even` on a rank's data of a step."""
    return model(sample(rank, step, 3, 32)).square().mean()
