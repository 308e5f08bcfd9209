"""How many units are gathered ahead: bits, messages, and bytes as predicted."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.spec.errors import PlanError
from shardwise.spec.plan import ParallelPlan
from shardwise.testing import probe
from shardwise.testing.probe import checks
from tests.common.oracle import Block, Chain, compare_each, plain_loss, sample
from tests.common.ranks import on_ranks


class Uneven(Chain):
    """Blocks of three sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.blocks = nn.ModuleList(Block(8, wide) for wide in (9, 40, 17, 40, 9, 17))


class Halves(nn.Module):
    """A block whose two halves are units, of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(8, 8), Block(8, 40)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.large(torch.tanh(self.small(x))))


PARTS = {"auto_wrap_policy": sw.wrap_by_name("blocks.*.small", "blocks.*.large")}


def ahead(forward: int, backward: int) -> dict[str, object]:
    return {"forward_prefetch": forward, "backward_prefetch": backward, "merge_units": False}


@on_ranks(2, 3)
def test_any_depth_gives_the_same_bits():
    with checks():
        for strategy in ("zero2", "zero3"):
            compare_each(Uneven, plain_loss, (strategy,), steps=2, **ahead(3, 2))
            compare_each(Chain, plain_loss, (strategy,), steps=2, activation_checkpointing="full", **ahead(3, 2))
        for depth in (0, 1):
            compare_each(Uneven, plain_loss, ("zero3",), steps=2, **ahead(depth, depth))
            for way in ("none", sw.wrap_by_name("blocks.*")):
                compare_each(
                    lambda: Chain(Halves),
                    plain_loss,
                    ("zero3",),
                    steps=2,
                    activation_checkpointing=way,
                    **PARTS,
                    **ahead(depth, depth),
                )


def trained(build: type[nn.Module], **options: object) -> tuple[nn.Module, list[tuple[object, ...]]]:
    model = sw.parallelize(build(), sw.ParallelPlan(**{"merge_units": False, **options}))
    for step in range(3):
        with sw.record_collectives(model) as events:
            model(sample(dist.get_rank(), step)).square().mean().backward()
        model.zero_grad()
    return model, [(event.kind, event.unit, event.sent_bytes, event.axis) for event in events]


@on_ranks(2, 3)
def test_bytes_and_the_order_of_messages_are_those_predicted() -> None:
    gathered_bytes, gathers = {}, {}
    for depth in (0, 1, 2):
        model, events = trained(Uneven, **ahead(depth, depth))
        seen = probe(model)
        assert events == [tuple(event) for event in seen.predicted_collectives()], depth
        assert seen.held_bytes()["gathered"] == seen.predicted_bytes()["gathered"], depth
        gathered_bytes[depth] = seen.predicted_bytes()["gathered"]
        gathers[depth] = sorted(event for event in events if event[0] == "all_gather")
    assert gathered_bytes[0] < gathered_bytes[1] < gathered_bytes[2]
    assert all(found == gathers[0] for found in gathers.values())  # nothing is gathered more often


@on_ranks(2)
def test_without_prefetch_a_unit_is_gathered_when_the_one_before_has_been_reduced() -> None:
    orders = {}
    for depth in (0, 1):
        _, events = trained(Uneven, **ahead(depth, depth))
        orders[depth] = [(kind, unit) for kind, unit, *_ in events if unit in {"blocks.3", "blocks.4"}][2:]
    assert orders[1].index(("all_gather", "blocks.3")) < orders[1].index(("reduce_scatter", "blocks.4"))
    assert orders[0].index(("all_gather", "blocks.3")) > orders[0].index(("reduce_scatter", "blocks.4"))


@on_ranks(2)
def test_units_inside_a_recomputed_module_are_there_together() -> None:
    recompute = {"activation_checkpointing": sw.wrap_by_name("blocks.*")}
    seen = probe(trained(lambda: Chain(Halves), **PARTS, **recompute, **ahead(0, 0))[0])
    assert seen.held_bytes()["gathered"] == seen.predicted_bytes()["gathered"]


# -- how many units are gathered ahead


class Watched(Chain):
    """Notes, as each block begins its forward, which blocks have been gathered or are on their way."""

    def __init__(self, num_blocks: int = 6) -> None:
        super().__init__(num_blocks=num_blocks)
        self.events: list[sw.CollectiveEvent] = []
        self.seen: list[int] = []
        for block in self.blocks:
            block.register_forward_pre_hook(lambda *_: self.seen.append(len(gathered(self.events))))


def gathered(events: list[sw.CollectiveEvent]) -> list[str]:
    return [event.unit for event in events if event.kind == "all_gather" and event.unit.startswith("blocks.")]


def ahead_in(model: Watched) -> tuple[list[int], list[int]]:
    """By block: how many blocks ahead are gathered when it begins forward, and in backward when it is reduced."""
    model.seen.clear()
    with sw.record_collectives(model) as events:
        model.events = events
        model(sample(dist.get_rank(), 0)).square().mean().backward()
    model.zero_grad()
    forward = [count - 1 - index for index, count in enumerate(model.seen)]
    last = len(model.blocks) - 1
    places = [place for place, event in enumerate(events) if event.kind == "reduce_scatter" and "blocks." in event.unit]
    # The last block is kept from forward to backward, so that each gather but those of forward is of an earlier one.
    backward = [len(gathered(events[:place])) - (last + 1) - reduced for reduced, place in enumerate(places)]
    return forward, backward


def expected(ahead: int) -> list[int]:
    return [min(ahead, 5 - index) for index in range(6)]


@on_ranks(2)
def test_as_many_units_are_gathered_ahead_as_the_plan_says() -> None:
    gathered_bytes = {}
    for forward, backward in ((0, 0), (1, 1), (2, 1), (1, 3), (3, 2)):
        plan = sw.ParallelPlan(merge_units=False, forward_prefetch=forward, backward_prefetch=backward)
        model = sw.parallelize(Watched(), plan)
        for _ in range(2):
            found = ahead_in(model)
        assert found == (expected(forward), expected(backward)), (forward, backward)
        seen = probe(model)
        trace = [(event.kind, event.unit, event.sent_bytes, event.axis) for event in model.events]
        assert trace == [tuple(event) for event in seen.predicted_collectives()]
        assert seen.held_bytes()["gathered"] == seen.predicted_bytes()["gathered"]
        gathered_bytes[max(forward, backward)] = seen.predicted_bytes()["gathered"]
    block = gathered_bytes[2] - gathered_bytes[1]
    assert (gathered_bytes[0], gathered_bytes[3]) == (gathered_bytes[1] - block, gathered_bytes[1] + 2 * block)


@on_ranks(2)
def test_listed_modules_are_gathered_ahead() -> None:
    model = Watched()
    for block in model.blocks:
        sw.fully_shard(block)
    sw.fully_shard(model)
    blocks = model.blocks
    for index in range(4):
        blocks[index].set_modules_to_forward_prefetch([blocks[index + 1], blocks[index + 2]])
        blocks[index + 2].set_modules_to_backward_prefetch([blocks[index]])  # the one between is gathered first
    blocks[4].set_modules_to_forward_prefetch([])
    for _ in range(2):
        found = ahead_in(model)
    assert found == ([2, 2, 2, 2, 1, 0], [2, 2, 2, 2, 1, 0])
    trace = [(event.kind, event.unit, event.sent_bytes, event.axis) for event in model.events]
    seen = probe(model)
    assert trace == [tuple(event) for event in seen.predicted_collectives()]
    assert seen.held_bytes()["gathered"] == seen.predicted_bytes()["gathered"]


@pytest.mark.parametrize("field", ["forward_prefetch", "backward_prefetch"])
def test_depths_that_cannot_be_honoured_are_refused(field: str) -> None:
    for value in (-1, "two", 1.5, True):
        with pytest.raises(PlanError, match=f"{field}="):
            ParallelPlan(**{field: value})
    with pytest.raises(PlanError, match=f"{field}=2 with"):
        ParallelPlan(**{field: 2}, quantized_gather="int8")


@on_ranks(2)
def test_modules_may_be_listed_while_one_is_gathered_and_between_a_forward_and_its_backward() -> None:
    model, rank = Chain(), dist.get_rank()
    for block in model.blocks:
        sw.fully_shard(block)
    sw.fully_shard(model)
    blocks = model.blocks
    model.set_requires_gradient_sync(False)  # the parameters stay what they are, and what is gathered is used again
    plain_loss(model, rank, 0).backward()
    blocks[0].unshard()
    blocks[0].set_modules_to_forward_prefetch([blocks[1], blocks[2]])
    loss = plain_loss(model, rank, 1)
    assert torch.equal(loss, plain_loss(Chain(), rank, 1))
    blocks[1].set_modules_to_forward_prefetch([blocks[2], blocks[3], blocks[4]])
    loss.backward()
    blocks[1].set_modules_to_forward_prefetch([blocks[2], blocks[3], blocks[4]])
    assert torch.equal(plain_loss(model, rank, 2), plain_loss(Chain(), rank, 2))
