"""Models of which each rank runs other parts, from the first step on: layers are left out, a tower, a whole list.

BART and Whisper with LayerDrop and CaiT with layer dropout are among the families of ``tests/common/families.py``.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.engine.order import RankPeers
from shardwise.spec.errors import CommError, RankDisagreement
from shardwise.testing import probe, run_on_ranks
from tests.common.oracle import Block, Chain, Wanders, compare, compare_each, plain_loss, presets, sample
from tests.common.ranks import on_ranks, refusal


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


@on_ranks(2, 3, timeout_s=120)
def test_ranks_may_leave_out_different_layers_of_a_list_from_the_first_step_on():
    for policy in ("auto", sw.wrap_by_class({Nested}), sw.wrap_by_class({Nested, Block})):
        compare_each(Drops, drop, presets(), auto_wrap_policy=policy)
    compare(Drops, drop, "zero3", activation_checkpointing="full")
    compare(Drops, drop, "zero3", merge_units=1 << 20)
    compare(Drops, drop, "zero3", merge_units=False, activation_checkpointing="full")


# -- in the first step already ranks run different parts


class Tower(nn.Module):
    """A text model and a tower for images, which is registered last and runs in the middle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Linear(8, 8)
        self.text = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 3)
        self.tower = nn.ModuleList(Block() for _ in range(2))
        self.frozen = Block().requires_grad_(requires_grad=False)

    def forward(self, x: Tensor, images: Tensor | None = None) -> Tensor:
        x = self.text[0](self.stem(x))
        if images is not None:
            images = self.frozen(images)
            for block in self.tower:
                images = block(images)
            x = x + images
        for block in self.text[1:]:
            x = block(x)
        return self.head(x)


def mix(has_images):
    """By step, by rank: whether the batch has images."""

    def script(model, rank, step):
        images = sample(rank, step, salt=1) if has_images[step][rank] else None
        return model(sample(rank, step), images).square().mean()

    return script


#: Each rank in turn is the one without images, or the only one with some.
MIXED = ((1, 0, 0), (0, 1, 1), (1, 1, 1), (0, 0, 0), (1, 0, 0))
#: Nobody has images at first; then one rank alone.
LATE = ((0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 0), (1, 1, 0))


class TwoLists(Chain):
    """Two lists of layers of one module, the later one registered first."""

    def __init__(self) -> None:
        super().__init__(num_blocks=3)
        self.early = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, left_out: tuple[int, ...] = ()) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate([*self.early, *self.blocks]):
            if index not in left_out:
                x = block(x)
        return self.head(x)


#: In the first step one rank leaves out a whole list, and all leave out layer 4.
OF_TWO_LISTS = (((0, 1, 2, 4), (4, 5), (1, 4)), ((3, 4, 5), (0, 1, 2), ()), ((), (1, 4), (0, 5)))


def drop_of_two_lists(model, rank, step):
    return model(sample(rank, step), OF_TWO_LISTS[step][rank]).square().mean()


@on_ranks(2, 3, timeout_s=120)
def test_ranks_may_run_different_parts_of_a_model_from_the_first_step_on():
    by_block = {"auto_wrap_policy": sw.wrap_by_class({Block})}
    for when in (MIXED, LATE):
        compare_each(Tower, mix(when), steps=5, **by_block)
    compare_each(TwoLists, drop_of_two_lists, ("ddp", "zero3"), steps=3)
    compare(Tower, mix(MIXED), steps=3, activation_checkpointing="full", **by_block)
    compare(Tower, mix(LATE), steps=3, accumulation="unsharded", **by_block)
    with_updates = sw.wrap_by_class({Block})
    compare(Tower, mix(MIXED), steps=3, auto_wrap_policy=with_updates, reshard_after_forward=False)


class Between(Chain):
    """A frozen block between trained ones, which only some forwards use."""

    def __init__(self) -> None:
        super().__init__(num_blocks=3)
        self.frozen = Block().requires_grad_(requires_grad=False)

    def forward(self, x: Tensor, *, uses_frozen: int = 0) -> Tensor:
        x = self.blocks[0](self.stem(x))
        if uses_frozen:
            x = self.frozen(x)
        return self.head(self.blocks[2](self.blocks[1](x)))


#: By step, by rank: whether the frozen block is used. One rank alone is the first to use it.
FROZEN = ((0, 0, 0, 0), (0, 1, 0, 0), (1, 0, 0, 1), (0, 0, 1, 0))


def use_frozen(model, rank, step):
    return model(sample(rank, step), uses_frozen=FROZEN[step][rank]).square().mean()


@on_ranks(4)
def test_one_rank_alone_may_be_the_first_to_use_a_frozen_unit():
    """Groups of ranks gather by themselves, so that the forward of one group tells the others nothing."""
    by_block = {"auto_wrap_policy": sw.wrap_by_class({Block}), "merge_units": False}
    compare(Between, use_frozen, "hsdp", dp_replicate=2, **by_block)
    compare_each(Between, use_frozen, ("ddp", "zero3"), **by_block)


class Heads(Chain):
    """Two heads, which run in the other order than they are registered in. Both run; the loss decides which count."""

    def __init__(self) -> None:
        super().__init__(num_blocks=2)
        self.heads = nn.ModuleDict({"a": Block(), "b": Block()})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        return {name: self.heads[name](x) for name in "ba"}


#: By step, by rank: the heads that the loss is made of. Rank by rank at first, then both on one rank alone;
#: and a head that nobody's loss has used before.
HEADS = (("a", "b"), ("a", "b"), ("ab", "a"), ("b", "ab"))
LATE_HEAD = (("a", "a"), ("a", "b"), ("b", "a"), ("a", "ab"))


def use_heads(when):
    def script(model, rank, step):
        found = model(sample(rank, step))
        return sum(found[name].square().mean() for name in when[step][rank])

    return script


@on_ranks(2)
def test_the_loss_of_each_rank_may_be_made_of_other_heads():
    by_block = {"auto_wrap_policy": sw.wrap_by_class({Block}), "merge_units": False}
    for when in (HEADS, LATE_HEAD):
        compare_each(Heads, use_heads(when), ("ddp", "zero3"), steps=4, **by_block)


def leave_at_other_places(model, rank, step):
    """Rank 0 leaves the order when block 2 is being gathered ahead, rank 1 one place later."""
    path = (0, 1, 2, 3, 4) if step == 0 else ((1, 0, 2, 3, 4), (2, 1, 0, 3, 4))[rank]
    return model(sample(rank, step), path).square().mean()


@on_ranks(2)
def test_all_ranks_may_leave_an_order_at_different_places():
    compare(Wanders, leave_at_other_places, merge_units=False, auto_wrap_policy=sw.wrap_by_class({Block}))


@on_ranks(2)
def test_messages_end_once_one_rank_has_run_all_there_is():
    """How many words the ranks exchange in each step: in a new pass one for each unit, and one more.

    The model has seven units, six of them with gradients. In the first step of ``mixed`` the rank without images has
    run the text model's last two blocks before the other one comes to them: nine units in forward.
    """
    found = {}
    for name, when in (("mixed", MIXED), ("late", LATE)):
        for strategy in ("ddp", "zero3"):
            plan = sw.ParallelPlan(strategy=strategy, auto_wrap_policy=sw.wrap_by_class({Block}))
            model = sw.parallelize(Tower(), plan)
            counts = []
            with (
                mock.patch.object(RankPeers, "exchange", autospec=True, side_effect=RankPeers.exchange) as exchange,
                mock.patch.object(RankPeers, "highest", autospec=True, side_effect=RankPeers.highest) as highest,
            ):
                for step in range(5):
                    with sw.record_collectives(model) as events:
                        mix(when)(model, dist.get_rank(), step).backward()
                    model.zero_grad()
                    counts.append(highest.call_count + exchange.call_count)
                    exchange.reset_mock()
                    highest.reset_mock()
                    assert all(event.unit != "order" for event in events)  # outside of the trace
            found[name, strategy] = counts
    assert found == {
        ("mixed", "ddp"): [6 + 1, 0, 0, 0, 0],
        ("mixed", "zero3"): [9 + 1 + 6 + 1, 0, 0, 0, 0],
        # Four units at first. The second backward begins with a word, as trained units have had no gradient.
        ("late", "ddp"): [4 + 1, 1 + 6 + 1, 0, 0, 0],
        # A word at the end of the second forward tells that a rank wants more: it is five units.
        ("late", "zero3"): [4 + 1 + 4 + 1, 1 + 5 + 1 + 6 + 1, 0, 0, 0],
    }


def fail_alone(strategy):
    """Rank 1 raises in its first forward, then in its first backward; then both go on as if nothing had been."""
    rank, texts = dist.get_rank(), []

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("in backward")

    def refuse(*_):
        raise ValueError("in forward")

    plain, model = Chain(), sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))
    if rank == 1 and strategy != "ddp":
        hook = model.blocks[2].up.register_forward_hook(refuse)
        with pytest.raises(ValueError, match="in forward"):
            plain_loss(model, rank, 0)
        hook.remove()
    elif strategy != "ddp":
        texts.append(refusal(CommError, plain_loss, model, rank, 0))
    if rank == 1:
        hook = model.blocks[2].register_forward_hook(lambda _module, _args, output: Fails.apply(output))
        with pytest.raises(ValueError, match="in backward"):
            plain_loss(model, rank, 0).backward()
        hook.remove()
    else:
        texts.append(refusal(CommError, plain_loss(model, rank, 0).backward))
    plain_loss(model, rank, 0).backward()
    for other in range(2):
        plain_loss(plain, other, 0).backward()
    grads = dict(plain.named_parameters())
    for shard in probe(model).shards:
        assert shard.grad is None or torch.equal(shard.grad, shard.part_of(grads[shard.name].grad / 2)), shard.name
    return texts


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_where_one_rank_fails_in_a_first_pass_its_peers_raise_too(strategy):
    texts, raised = run_on_ranks(fail_alone, 2, strategy)
    assert raised == []
    assert len(texts) == 1 + (strategy == "zero3")
    for text in texts:
        assert text.startswith("rank 1 along dp_shard has left a pass through the model by an exception")


@on_ranks(2)
def test_ranks_that_come_into_a_model_through_different_modules_are_told_so():
    model = sw.parallelize(Chain(), sw.ParallelPlan(auto_wrap_policy=sw.wrap_by_class({Block})))
    rank = dist.get_rank()
    part = model.blocks[0] if rank == 0 else model
    text = refusal(RankDisagreement, part, sample(rank, 0))
    assert text.startswith("the ranks call the model through different modules, or are in different passes: rank 0 has")
    assert "rank 0 has blocks.0, rank 1 has root." in text


class Towers(nn.Module):
    """A tower that only some batches need, below a trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Chain(num_blocks=2)
        self.tower.head = nn.Linear(8, 8)
        self.trunk = Chain(num_blocks=2)

    def forward(self, x: Tensor, has_picture: bool) -> Tensor:
        return self.trunk(torch.tanh(self.tower(x)) if has_picture else x)


def squared(output: Tensor, _batch: object) -> Tensor:
    return output.square().mean()


@on_ranks(2)
def test_in_an_evaluation_each_rank_may_leave_out_a_tower():
    """For each strategy the held-out losses and those of one process, and a training loss beside one without grad."""
    rank, found = dist.get_rank(), []
    for strategy in ("zero3", "shard_grad_op", "ddp"):
        model, plain = Towers(), Towers()
        plain.load_state_dict(model.state_dict())
        sw.parallelize(model, strategy=strategy)
        for needs in ((True, False), (False, True), (False, False), (True, True), (False, True)):
            loss = sw.eval_step(model, (sample(rank, 0), needs[rank]), squared)
            with torch.no_grad():
                each = [squared(plain(sample(other, 0), needs[other]), None) for other in (0, 1)]
            found.append((loss.item(), (sum(each) / 2).item()))
        trained = sw.train_step(model, (sample(rank, 0), rank == 1), squared)
        again = sw.eval_step(model, (sample(rank, 0), rank == 1), squared)
        found.append((again.item(), trained.item()))
    for loss, expected in found:
        assert loss == pytest.approx(expected, rel=1e-6)


@on_ranks(2)
def test_an_evaluation_gathers_once_what_needs_no_release():
    """Of several microbatches, of which each rank may leave out a tower; then the parameters have changed."""
    rank = dist.get_rank()
    for strategy in ("zero1", "zero2", "shard_grad_op", "zero3"):
        model, plain = Towers(), Towers()
        plain.load_state_dict(model.state_dict())
        sw.parallelize(model, strategy=strategy)
        units = {unit.name for unit in probe(model).units if unit.padded_numel}
        for factor in (2.0, 1.0):
            inputs = [(sample(rank, index), rank == index % 2) for index in range(4)]
            losses: list[Tensor] = []
            with sw.record_collectives(model) as events:
                sw.eval_step(model, iter(inputs), squared, len(inputs), losses=losses)
            gathered = [event.unit for event in events if event.kind == "all_gather" and event.unit in units]
            assert (len(gathered) > len(units)) == (strategy == "zero3")
            assert set(gathered) == units
            if strategy == "shard_grad_op":
                assert not any(unit.is_gathered for unit in probe(model).units)
            with torch.no_grad():
                torch.testing.assert_close(losses, [squared(plain(*each), None) for each in inputs])
                for parameter in (*model.parameters(), *plain.parameters()):
                    parameter.data.mul_(factor)
