"""Values that leave a unit without passing through its outputs: saved tensors are checked and brought back."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.spec.errors import StateError
from shardwise.testing import probe
from tests.common.oracle import SHARDED, Block, Chain, compare, compare_each, plain_loss, planned, sample
from tests.common.ranks import on_ranks, refusal


class Box:
    """An object that no one looks into."""

    __slots__ = ("_value",)

    def __init__(self, value: Tensor) -> None:
        self._value = value

    def open(self) -> Tensor:
        return self._value


class Boxing(Block):
    """Its output is hidden in an opaque object."""

    def forward(self, box: Box) -> Box:
        return Box(super().forward(box.open()))


class Boxed(Chain):
    def __init__(self) -> None:
        super().__init__(Boxing, 6)

    def forward(self, x: Tensor) -> Tensor:
        box = Box(self.stem(x))
        for block in self.blocks:
            box = block(box)
        return self.head(box.open())


class SealedRoot(Chain):
    """The root hides its output: it is kept from forward to backward, so nothing has to be brought back."""

    def forward(self, x: Tensor) -> Box:
        return Box(super().forward(x))


def open_box(model, rank, step):
    return model(sample(rank, step)).open().square().mean()


class KeepsLoss(Block):
    """Stores a loss of its own on the module, as routers of experts do."""

    aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        self.aux = (torch.sin(h) @ self.down.weight.T).square().mean()
        return x + self.down(F.gelu(h))


class KeepsLossLast(Block):
    """Computes the stored loss after its output, so that backward comes to the loss first."""

    aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.aux = self.up(x).square().mean()
        return y


def with_aux_loss(model, rank, step):
    loss = plain_loss(model, rank, step)
    return loss + 0.1 * sum(block.aux for block in model.blocks)


def with_aux_loss_later(model, rank, step):
    """The loss on the module counts from the third step on only, when the order has long been recorded."""
    loss = plain_loss(model, rank, step)
    return loss + 0.1 * sum(block.aux for block in model.blocks) if step > 2 else loss


@pytest.mark.parametrize("is_checked", [True, False], ids=["checked", "as-users-run-it"])
@on_ranks(1, 2, 3)
def test_hidden_values_and_losses_kept_on_modules_are_right_in_every_step(is_checked):
    compare_each(Boxed, plain_loss, steps=5, is_checked=is_checked, heals=True)
    compare_each(lambda: Chain(KeepsLoss), with_aux_loss, steps=5, is_checked=is_checked, heals=True)
    compare_each(SealedRoot, open_box, is_checked=is_checked)


@on_ranks(2)
def test_losses_kept_on_recomputed_modules_are_right():
    for strategy, recomputed in (("zero3", "full"), ("zero1", sw.wrap_by_name("blocks.*.up"))):
        with planned(activation_checkpointing=recomputed):
            compare(lambda: Chain(KeepsLossLast, 2), with_aux_loss, strategy, steps=2, heals=True)


@on_ranks(2)
def test_a_loss_on_a_module_that_counts_only_in_later_steps_is_right_under_checks():
    compare_each(lambda: Chain(KeepsLoss), with_aux_loss_later, steps=6, heals=True)


@on_ranks(2)
def test_a_loss_on_a_module_that_counts_only_in_later_steps_is_right_or_refused_as_users_run_it():
    found = []
    for strategy in SHARDED:
        try:
            trained = compare(
                lambda: Chain(KeepsLoss), with_aux_loss_later, strategy, steps=6, is_checked=False, heals=True
            )
        except StateError as error:
            found.append(str(error))
        else:
            found.append(f"right, {trained.probe.num_healed} healed")
    for text in found:
        assert text.startswith("right") or "a value left the unit without passing through its outputs" in text


class CheckpointedInside(Block):
    """Recomputes a part of itself: checkpoint's saved-tensor hooks lie above ours."""

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self._run, x, use_reentrant=False)

    def _run(self, x: Tensor) -> Tensor:
        return self.down(torch.sin(self.up(x)))


class OwnHooks(Block):
    """Pushes saved-tensor hooks of its own, as offloading of activations does."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            h = self.up(x)
        with torch.autograd.graph.save_on_cpu():
            return x + self.down(F.gelu(h))


@on_ranks(2, 3)
def test_saved_tensor_hooks_of_checkpoint_and_of_the_user_live_beside_ours():
    compare_each(lambda: Chain(CheckpointedInside), plain_loss)
    compare_each(lambda: Chain(OwnHooks), plain_loss)


@on_ranks(2)
def test_saved_tensors_are_watched_in_the_first_steps_and_no_longer_than_needed():
    model = sw.parallelize(Chain())
    seen = []
    hooks = torch._C._autograd._top_saved_tensors_default_hooks
    model.blocks[0].register_forward_pre_hook(lambda _module, _args: seen.append(hooks(False) is not None))
    for step in range(5):
        plain_loss(model, 0, step).backward()
    assert seen[:2] == [True, True]
    assert not any(seen[3:])
    assert probe(model).num_healed == 0


class LeavesAnInputAlone(nn.Module):
    """Uses its weight in the loss only, through a method that is not forward."""

    def __init__(self, extra: Callable[[], nn.Module] = lambda: nn.Linear(8, 8)) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.extra = extra()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


@on_ranks(2)
def test_a_submodule_called_outside_its_units_forward_is_refused_with_name_and_shape():
    """pytorch#153354, trl#4550: methods other than forward compute with shards, or fail without a name."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    kinds = {
        lambda: nn.Linear(8, 8): x,
        lambda: nn.LayerNorm(8): x,
        lambda: nn.BatchNorm1d(8): x,
        lambda: nn.Conv1d(8, 6, 3): x.view(1, 8, 4),
        lambda: nn.GRU(8, 4): x,
        lambda: nn.Embedding(6, 8): torch.tensor([1, 2]),
    }
    for strategy, (extra, given) in itertools.product(("zero1", "zero3"), kinds.items()):
        torch.manual_seed(0)
        model = Chain(functools.partial(LeavesAnInputAlone, extra))
        names = [
            f"{name!r} (logical shape {list(p.shape)})" for name, p in model.named_parameters() if "2.extra" in name
        ]
        model = sw.parallelize(model, sw.ParallelPlan(strategy=strategy))
        for _ in range(2):
            text = refusal(StateError, model.blocks[2].extra, given)
            assert any(name in text for name in names), text
            assert "Compute in the forward of its unit 'blocks.2': call that module, or make the inner module" in text
            plain_loss(model, 0, 0).backward()
    torch.manual_seed(0)
    plain = Chain(LeavesAnInputAlone)
    model, wrap = copy.deepcopy(plain), sw.wrap_by_class({LeavesAnInputAlone, nn.Linear})
    model = sw.parallelize(model, sw.ParallelPlan(strategy="zero3", auto_wrap_policy=wrap))  # as the message says
    assert torch.equal(model.blocks[2].extra(x), plain.blocks[2].extra(x))


class EntersABlock(Chain):
    """Calls a module inside of a block, as DiT does with the embedding of its first block."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.blocks[0].extra(x).sum()


class KeepsParameters(nn.Module):
    """Reads its parameters from a list of its own, as pykan's networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.scales = [self.scale]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scales[0][None]


@on_ranks(2)
def test_the_refusal_of_a_part_says_what_fits_the_place_where_it_was_used():
    make = functools.partial(LeavesAnInputAlone, lambda: nn.Linear(8, 8))
    x = sample(0, 0)
    model = sw.parallelize(EntersABlock(make), "zero3")
    text = refusal(StateError, model, x)
    assert "A module of its unit 'blocks.0' was called from outside of that unit's forward" in text
    torch.manual_seed(0)
    plain = EntersABlock(make)
    for policy in (sw.wrap_by_class({LeavesAnInputAlone, nn.Linear}), "none"):  # as the message says
        model = sw.parallelize(copy.deepcopy(plain), strategy="zero3", auto_wrap_policy=policy)
        assert torch.equal(model(x), plain(x))
    text = refusal(StateError, sw.parallelize(KeepsParameters(), "zero3"), x)
    assert "The forward of the model is running" in text
    assert "a list, a tuple or a closure" in text


@on_ranks(2)
def test_a_submodule_called_outside_its_units_forward_trains_as_the_plain_one_where_it_is_there_in_full():
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Chain(LeavesAnInputAlone))
    plain, model = models[0], sw.parallelize(models[1], sw.ParallelPlan(strategy="ddp"))
    for each in (plain, model):
        each.blocks[2].extra(each.stem(sample(0, 0))).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) is (q.grad is None), name
        assert q.grad is None or torch.allclose(p.grad, q.grad), name


class GivesWeight(nn.Module):
    """An embedding that returns its weight too, for a head that is tied by hand, or a part of it."""

    def __init__(self, is_view: bool, is_named: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, 8))
        self.is_view, self.is_named = is_view, is_named

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor] | dict[str, list[Tensor]]:
        x, weight = F.embedding(ids, self.weight), self.weight[1:] if self.is_view else self.weight
        return {"both": [x, weight]} if self.is_named else (x, weight)


class TiedByHand(nn.Module):
    def __init__(self, is_view: bool, is_named: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = GivesWeight(is_view, is_named)
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, ids: Tensor) -> Tensor:
        given = self.embedding(ids)
        x, weight = given["both"] if isinstance(given, dict) else given
        for block in self.blocks:
            x = block(x)
        return x @ weight.T


def predict(model, rank, step):
    ids = torch.arange(12).view(3, 4).add(rank + step) % 10
    with torch.no_grad():
        before = model(ids)
    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    yield before, loss


def shard_each(model):
    for module in (model.embedding, *model.blocks):
        sw.fully_shard(module)
    return sw.fully_shard(model)


@pytest.mark.parametrize("is_view", [False, True])
@on_ranks(2, 3)
def test_a_unit_may_return_its_parameter_or_a_view_of_it(is_view):
    units = sw.wrap_by_class({GivesWeight, Block})
    for is_named in (False, True):
        compare_each(lambda flag=is_named: TiedByHand(is_view, flag), predict, auto_wrap_policy=units)
    compare(lambda: TiedByHand(is_view, is_named=False), predict, parallelize=shard_each)
