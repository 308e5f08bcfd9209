"""``gathered_slots``: one slot, or slots that units of every size share; bits, and bytes as predicted."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.spec.errors import PlanError, StateError
from shardwise.spec.plan import ParallelPlan
from shardwise.testing import probe, run_on_ranks
from shardwise.testing.probe import checks
from tests.common.oracle import Block, Chain, compare_each, plain_loss, sample
from tests.common.ranks import on_ranks, refusal


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


def every_number_of_slots() -> None:
    with checks():
        for strategy in ("zero2", "zero3"):
            options = {"forward_prefetch": 3, "backward_prefetch": 2, "merge_units": False, "keep_buffers": False}
            compare_each(Uneven, plain_loss, (strategy,), steps=2, **options)
            compare_each(Chain, plain_loss, (strategy,), steps=2, activation_checkpointing="full", **options)
        for count, *kept in ((1, True, False), (2, False)):
            for keeps in kept:
                options = {"gathered_slots": count, "keep_buffers": keeps, "merge_units": False}
                compare_each(Uneven, plain_loss, ("zero3",), steps=2, **options)
                for way in ("none", sw.wrap_by_name("blocks.*")):
                    compare_each(
                        lambda: Chain(Halves),
                        plain_loss,
                        ("zero3",),
                        steps=2,
                        activation_checkpointing=way,
                        **PARTS,
                        **options,
                    )


@pytest.mark.parametrize("world", [2, 3])
def test_any_number_of_slots_gives_the_same_bits(world: int) -> None:
    run_on_ranks(every_number_of_slots, world)


def trained(build: type[nn.Module], **options: object) -> tuple[nn.Module, list[tuple[object, ...]]]:
    model = sw.parallelize(build(), sw.ParallelPlan(merge_units=False, **options))
    for step in range(3):
        with sw.record_collectives(model) as events:
            model(sample(dist.get_rank(), step)).square().mean().backward()
        model.zero_grad()
    return model, [(event.kind, event.unit, event.sent_bytes, event.axis) for event in events]


@on_ranks(2, 3)
def test_bytes_and_the_order_of_messages_are_those_predicted() -> None:
    held, gathers = {}, {}
    for slots in ("auto", 1, 2, 3):
        model, events = trained(Uneven, gathered_slots=slots)
        seen = probe(model)
        assert events == [tuple(event) for event in seen.predicted_collectives()], slots
        assert sum(slot.nbytes for slot in seen.slots) == seen.predicted_bytes()["gathered"], slots
        held[slots] = seen.predicted_bytes()["gathered"]
        gathers[slots] = sorted(event for event in events if event[0] == "all_gather")
        assert sw.summary(model).num_grown_slots == 0
    assert held[1] < held[2] < held[3] < held["auto"]  # one, two, three of the largest, two of each size
    assert all(found == gathers["auto"] for found in gathers.values())  # nothing is gathered more often


@on_ranks(2)
def test_with_one_slot_a_unit_is_gathered_when_the_one_before_has_been_reduced() -> None:
    orders = {}
    for slots in (1, 2):
        _, events = trained(Uneven, gathered_slots=slots)
        orders[slots] = [(kind, unit) for kind, unit, *_ in events if unit in {"blocks.3", "blocks.4"}][2:]
    assert orders[2].index(("all_gather", "blocks.3")) < orders[2].index(("reduce_scatter", "blocks.4"))
    assert orders[1].index(("all_gather", "blocks.3")) > orders[1].index(("reduce_scatter", "blocks.4"))


@on_ranks(2)
def test_units_inside_a_recomputed_module_have_a_slot_each_of_their_own_size() -> None:
    recompute = {"activation_checkpointing": sw.wrap_by_name("blocks.*")}
    model, _ = trained(lambda: Chain(Halves), gathered_slots=1, **PARTS, **recompute)
    seen = probe(model)
    sizes = sorted(slot.nbytes for slot in seen.slots)[-3:]
    units = {unit.name: unit for unit in sw.summary(model).units}
    numel = [units[f"blocks.0.{half}"].groups[0].numel * 4 for half in ("small", "large")]
    assert sorted(numel) == [size for size in sizes if size in numel]
    assert sum(slot.nbytes for slot in seen.slots) == seen.predicted_bytes()["gathered"]


@pytest.mark.parametrize("value", [0, "one", 1.5, True])
def test_what_is_no_number_of_slots_is_refused(value: object) -> None:
    with pytest.raises(PlanError, match="gathered_slots="):
        ParallelPlan(gathered_slots=value)


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
    held = {}
    for forward, backward in ((0, 0), (1, 1), (2, 1), (1, 3), (3, 2)):
        plan = sw.ParallelPlan(merge_units=False, forward_prefetch=forward, backward_prefetch=backward)
        model = sw.parallelize(Watched(), plan)
        for _ in range(2):
            found = ahead_in(model)
        assert found == (expected(forward), expected(backward)), (forward, backward)
        seen = probe(model)
        trace = [(event.kind, event.unit, event.sent_bytes, event.axis) for event in model.events]
        assert trace == [tuple(event) for event in seen.predicted_collectives()]
        assert sum(slot.nbytes for slot in seen.slots) == seen.predicted_bytes()["gathered"]
        held[max(forward, backward)] = seen.predicted_bytes()["gathered"]
        assert sw.summary(model).num_grown_slots == 0
    block = held[2] - held[1]
    assert (held[0], held[3]) == (held[1], held[1] + 2 * block)
    # Slots of all sizes together: all but one are for units ahead.
    model = sw.parallelize(Watched(), sw.ParallelPlan(merge_units=False, gathered_slots=4))
    for _ in range(2):
        found = ahead_in(model)
    assert found == (expected(3), expected(3))


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
    assert sum(slot.nbytes for slot in seen.slots) == seen.predicted_bytes()["gathered"]


@pytest.mark.parametrize("field", ["forward_prefetch", "backward_prefetch"])
def test_depths_that_cannot_be_honoured_are_refused(field: str) -> None:
    for value in (-1, "two", 1.5, True):
        with pytest.raises(PlanError, match=f"{field}="):
            ParallelPlan(**{field: value})
    for options in ({"gathered_slots": 2}, {"quantized_gather": "int8"}):
        with pytest.raises(PlanError, match=f"{field}=2 with"):
            ParallelPlan(**{field: 2}, **options)
    assert ParallelPlan(**{field: 2}, gathered_slots=3).prefetch == (2, 2)  # as the message says


@on_ranks(2)
def test_modules_may_be_listed_while_one_is_gathered_but_not_between_a_forward_and_its_backward() -> None:
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
    text = refusal(StateError, blocks[1].set_modules_to_forward_prefetch, [blocks[2], blocks[3], blocks[4]])
    assert text.startswith("3 units cannot be gathered ahead from now on: they need other slots")
    loss.backward()
    blocks[1].set_modules_to_forward_prefetch([blocks[2], blocks[3], blocks[4]])
    assert torch.equal(plain_loss(model, rank, 2), plain_loss(Chain(), rank, 2))
