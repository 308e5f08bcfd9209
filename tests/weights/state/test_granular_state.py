"""Checkpoints between granularities: parameters, and optimizer state per element, row, block and parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.spec.errors import CheckpointError, StateError
from shardwise.testing import forget_declaration, run_on_ranks
from tests.common import models
from tests.common.blockwise import BLOCK, Int8Momentum, RowAdagrad
from tests.common.ranks import on_ranks, refusal

Optimizers = list[torch.optim.Optimizer]


def matrices_and_others(parameters: Iterable[nn.Parameter]) -> Optimizers:
    listed = list(parameters)
    muon = torch.optim.Muon([p for p in listed if p.dim() == 2], lr=0.02)
    return [muon, torch.optim.AdamW([p for p in listed if p.dim() != 2], lr=1e-2)]


MAKERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizers]] = {
    "AdamW": lambda p: [torch.optim.AdamW(p, lr=1e-2)],
    "Muon": matrices_and_others,
    "Adafactor": lambda p: [torch.optim.Adafactor(p, lr=1e-2)],
    "Int8Momentum": lambda p: [Int8Momentum(p)],
    "RowAdagrad": lambda p: [RowAdagrad(p)],
}

#: Where each is saved and loaded: ranks, strategy, granularity. At 1, 2 and 4 ranks that get the same data the mean of
#: the gradients is the gradient, to the last bit: all of them continue one plain run.
PLACES: dict[str, list[tuple[int, str, object]]] = {
    "AdamW": [(2, "zero3", "row"), (4, "zero1", "tensor"), (2, "zero2", "element"), (1, "zero3", ("block", 100))],
    "Muon": [(2, "zero3", "tensor"), (4, "zero1", "tensor"), (1, "ddp", "element")],
    "Adafactor": [(2, "zero3", "tensor"), (4, "shard_grad_op", "tensor"), (2, "ddp", "row")],
    "Int8Momentum": [
        (2, "zero3", ("block", BLOCK)),
        (4, "zero1", ("block", 2 * BLOCK)),
        (2, "zero3", "tensor"),
        (1, "ddp", "element"),
    ],
    "RowAdagrad": [(2, "zero3", "row"), (4, "zero1", "tensor"), (2, "zero2", "row"), (1, "ddp", "element")],
}


def declare() -> None:
    sw.declare_granularity(Int8Momentum, sw.block(BLOCK))
    sw.declare_granularity(RowAdagrad, "row")


def train(model: nn.Module, optimizers: Optimizers, first: int, last: int) -> None:
    for step in range(first, last):
        model(*models.batch(step, 0, 0)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def pass_on(world: int, turn: int, folder: str) -> dict[str, dict[str, Tensor]]:
    """In this turn's place: load what the last one saved, train two steps, save. Gives the weights by optimizer."""
    declare()
    found = {}
    for name, places in PLACES.items():
        if turn >= len(places) or places[turn][0] != world:
            continue
        _, strategy, granularity = places[turn]
        model = sw.parallelize(models.build("gpt"), sw.ParallelPlan(strategy=strategy, granularity=granularity))
        optimizers = MAKERS[name](model.parameters())
        given: Any = optimizers if len(optimizers) > 1 else optimizers[0]
        if turn:
            for optimizer in optimizers:
                for settings in optimizer.param_groups:
                    settings["lr"] = 0.0  # the checkpoint knows better
            assert sw.load(f"{folder}/{name}-{turn - 1}", model, given) == {"step": 2 * turn}
        train(model, optimizers, 2 * turn, 2 * turn + 2)
        sw.save(f"{folder}/{name}-{turn}", model, given, state={"step": 2 * turn + 2})
        found[name] = sw.full_state_dict(model)
    return found


def test_a_run_goes_on_bit_for_bit_in_every_layout_that_its_optimizer_can_take(tmp_path):
    plain = {name: models.build("gpt") for name in MAKERS}
    optimizers = {name: make(plain[name].parameters()) for name, make in MAKERS.items()}
    for turn in range(max(map(len, PLACES.values()))):
        seen = {}
        for world in sorted({places[turn][0] for places in PLACES.values() if turn < len(places)}):
            seen |= run_on_ranks(pass_on, world, world, turn, str(tmp_path))[0]
        assert set(seen) == {name for name, places in PLACES.items() if turn < len(places)}
        for name, state in seen.items():
            train(plain[name], optimizers[name], 2 * turn, 2 * turn + 2)
            for key, value in plain[name].state_dict().items():
                assert torch.equal(state[key], value), f"{name} in {PLACES[name][turn]}: {key}"


class PerRank(torch.optim.SGD):
    """Keeps a tensor that is neither per element nor per row."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for settings in self.param_groups:
            for p in settings["params"]:
                if p.grad is not None:
                    self.state[p]["seen"] = torch.zeros(3)


class Listing(torch.optim.SGD):
    """Keeps a list."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for settings in self.param_groups:
            for p in settings["params"]:
                self.state[p]["history"] = [1]


def refuse(folder: str) -> dict[str, str]:
    """What cannot be saved or loaded, with the text on this rank."""
    texts = {}
    for cls in (PerRank, Listing):
        sw.declare_elementwise(cls)
        model = sw.parallelize(models.build("gpt"))
        optimizer = cls(model.parameters(), lr=0.1)
        train(model, [optimizer], 0, 1)
        texts[cls.__name__] = refusal(CheckpointError, sw.save, f"{folder}/{cls.__name__}", model, optimizer)
        forget_declaration(cls)

    sw.declare_granularity(RowAdagrad, "row")
    whole = sw.parallelize(models.build("gpt"), sw.ParallelPlan(granularity="row"))
    optimizer = RowAdagrad(whole.parameters())
    train(whole, [optimizer], 0, 1)
    sw.save(f"{folder}/rows", whole, optimizer)
    split = sw.parallelize(models.build("gpt"))
    texts["granularity"] = refusal(StateError, sw.load, f"{folder}/rows", split, RowAdagrad(split.parameters()))

    sw.declare_granularity(RowAdagrad, "element")  # a lie, which the stored shapes give away
    before = sw.full_state_dict(split)
    fresh = RowAdagrad(split.parameters())
    texts["shape"] = refusal(CheckpointError, sw.load, f"{folder}/rows", split, fresh)
    after = sw.full_state_dict(split)
    assert not fresh.state
    assert all(torch.equal(before[key], after[key]) for key in before)
    forget_declaration(RowAdagrad)
    return texts


def test_what_cannot_be_put_together_again_is_refused_on_every_rank_alike(tmp_path):
    first, second = run_on_ranks(refuse, 2, str(tmp_path))
    assert first.keys() == second.keys()
    for name in ("PerRank", "Listing", "shape"):
        assert first[name].replace(str(tmp_path), "") == second[name].replace(str(tmp_path), "")
    assert first["PerRank"].startswith("optimizer state cannot be saved:\n  - 'seen' of '")
    assert "in PerRank has shape [3], but a rank holds a piece of that parameter only" in first["PerRank"]
    advice = "Use granularity='tensor' or strategy 'ddp', or save without the optimizer: sw.save(path, model)."
    assert advice in first["PerRank"]
    assert "'history' of 'token_embedding.weight' in Listing is a list, not a tensor or number" in first["Listing"]
    assert first["Listing"].endswith("\n  Save without the optimizer: sw.save(path, model).")
    assert first["granularity"].startswith("RowAdagrad needs every row of a parameter on one rank")
    assert "does not fit this layout:\n  - 'sum' of '" in first["shape"]
    assert not list(tmp_path.glob("PerRank*"))


@on_ranks(2)
def test_a_learning_rate_in_a_tensor_is_saved_as_a_number_and_loaded_into_that_tensor(tmp_path: str) -> None:
    model = sw.parallelize(models.build("gpt"))
    rate = torch.tensor(0.25)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    train(model, [optimizer], 0, 1)
    sw.save(f"{tmp_path}/saved", model, optimizer)
    rate.fill_(0.5)
    sw.load(f"{tmp_path}/saved", model, optimizer)
    lr = optimizer.param_groups[0]["lr"]
    assert lr is rate
    assert (float(rate), float(lr)) == (0.25, 0.25)
