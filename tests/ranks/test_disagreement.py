"""Ranks that take different paths through the units."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from shardwise.comm import watch
from shardwise.spec.errors import RankDisagreement
from shardwise.testing import run_on_ranks
from tests.ranks.oracle import Chain, compare, plain_loss, presets, sample

WORLDS = pytest.mark.parametrize("world", [2, 3])


class Skips(Chain):
    def forward(self, x: Tensor, left_out: tuple[int, ...] = ()) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            if index not in left_out:
                x = block(x)
        return self.head(x)


class SkipsTwice(Chain):
    """0 1 2 3 4 3 2 1 0, but for some: a unit that follows itself, as 4 was left out, is not done with."""

    def forward(self, x: Tensor, left_out: tuple[int, ...] = ()) -> Tensor:
        x = self.stem(x)
        for index in (0, 1, 2, 3, 4, 3, 2, 1, 0):
            if index not in left_out:
                x = self.blocks[index](x)
        return self.head(x)


def skip_from_step_two_on(model, rank, step):
    """In the first step all ranks run all units; later each leaves out others."""
    left_out = () if step == 0 else ((rank + step) % 5, (2 * rank + step) % 5)
    return model(sample(rank, step), left_out).square().mean()


def skip_at_the_ends(model, rank, step):
    """Rank 0 leaves out the first and the last unit, which are the first and last to be gathered."""
    left_out = (0, 4) if step > 0 and rank == 0 else ()
    return model(sample(rank, step), left_out).square().mean()


def skip_the_turn(model, rank, step):
    left_out = (4 - step % 2, 4 - step % 3) if step > 0 and rank == 0 else ()
    return model(sample(rank, step), left_out).square().mean()


def skip_all(model, rank, step):
    left_out = (0, 1, 2, 3, 4) if step in (1, 3) and rank == 1 else ()
    return model(sample(rank, step), left_out).square().mean()


def skip_and_evaluate(model, rank, step):
    """All ranks evaluate; then they train along different paths."""
    with torch.no_grad():
        value = model(sample(rank, step, salt=1))
    loss = skip_from_step_two_on(model, rank, step)
    loss.backward()
    yield value, loss


class Partial(Chain):
    """Runs its last blocks without grad on request: backward never reaches them."""

    def forward(self, x: Tensor, num_trained: int = 5) -> Tensor:
        h = self.stem(x)
        for index, block in enumerate(self.blocks):
            with torch.set_grad_enabled(index < num_trained):
                y = block(h)
            h = h + y
        return h if num_trained < 5 else self.head(h)


def train_fewer(model, rank, step):
    """From the second step on backward reaches fewer units on rank 0 than on the others."""
    return model(sample(rank, step), 5 - step if rank == 0 else 5).square().mean()


def train_fewer_first(model, rank, step):
    """The last unit has no backward in the first steps, on any rank."""
    return model(sample(rank, step), 3 if step < 2 else 5).square().mean()


def skips():
    for strategy in presets():
        for script in (skip_from_step_two_on, skip_at_the_ends, skip_all, skip_and_evaluate):
            compare(Skips, script, strategy)
        for script in (skip_from_step_two_on, skip_the_turn):
            compare(SkipsTwice, script, strategy)
        compare(Partial, train_fewer, strategy)
        compare(Partial, train_fewer_first, strategy)


@WORLDS
def test_from_the_second_step_on_a_rank_may_skip_whole_units(world):
    run_on_ranks(skips, world)


class Wanders(Chain):
    def forward(self, x: Tensor, path: tuple[int, ...]) -> Tensor:
        x = self.stem(x)
        for index in path:
            x = self.blocks[index](x)
        return self.head(x)


def diverge(strategy, stall_s):
    watch.STALL_S, watch.INTERVAL_S = stall_s, 0.1
    rank = dist.get_rank()
    model = sw.parallelize(Wanders(), sw.ParallelPlan(strategy=strategy))
    with pytest.raises(RankDisagreement) as caught:
        model(sample(rank, 0), (0, 2, 1, 3, 4) if rank == 1 else (0, 1, 2, 3, 4)).square().mean().backward()
    return str(caught.value)


@pytest.mark.parametrize(("world", "strategy"), [(2, "zero3"), (3, "zero3"), (2, "zero2"), (2, "ddp")])
def test_in_the_first_step_another_order_is_a_disagreement_that_all_ranks_report(world, strategy):
    texts = run_on_ranks(diverge, world, strategy, 0.6)
    for text in texts:
        assert "ranks issued different collectives at #" in text
        assert len(set(re.findall(r"'blocks\.\d'", text))) == 2
        assert "The ranks took different paths through the model." in text


def diverge_later(stall_s):
    """In a later step rank 1 runs a unit once more than the others ever did."""
    watch.STALL_S, watch.INTERVAL_S = stall_s, 0.1
    rank = dist.get_rank()
    model = sw.parallelize(Skips())
    for step in range(2):
        plain_loss(model, rank, step).backward()
    x = sample(rank, 0)
    if rank == 1:
        model.register_forward_pre_hook(lambda m, args: (m.blocks[2](m.blocks[2](args[0])),))
    with pytest.raises(RankDisagreement) as caught:
        model(x).square().mean().backward()
    return str(caught.value)


def test_a_unit_that_one_rank_alone_runs_is_a_disagreement_that_all_ranks_report():
    for text in run_on_ranks(diverge_later, 2, 0.6):
        assert "ranks issued different collectives at #" in text


def cross(stall_s):
    """Two models, called in another order by either rank: both wait for what the other has not begun."""
    watch.STALL_S, watch.INTERVAL_S = stall_s, 0.1
    rank = dist.get_rank()
    models = [sw.parallelize(Chain()), sw.parallelize(Chain())]
    texts = []
    for model in models if rank == 0 else reversed(models):
        with pytest.raises(RankDisagreement) as caught:
            model(sample(rank, 0))
        texts.append(str(caught.value))
    return texts


def test_ranks_that_wait_for_each_other_are_told_so_at_this_and_every_further_collective():
    for texts in run_on_ranks(cross, 2, 0.6):
        for text in texts:
            assert text.startswith("ranks wait for each other in different collectives:\n  rank 0: all_gather of unit")


def thread_after_end():
    found = watch.StallWatch.of(dist.group.WORLD)
    was_alive = found._thread.is_alive()
    found.end()
    return was_alive, found._thread.is_alive()


def test_the_watch_ends_before_the_interpreter_does():
    """A thread inside the store at the interpreter's end aborts the process; ``end`` is registered with atexit."""
    assert run_on_ranks(thread_after_end, 2) == [(True, False)] * 2
