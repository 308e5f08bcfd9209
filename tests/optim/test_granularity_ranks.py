"""Layouts whose cuts keep blocks, rows or whole parameters together, and the optimizers that need that."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.spec.errors import PlanError, StateError
from shardwise.testing import forget_declaration, run_on_ranks
from tests.common import models
from tests.common.blockwise import RowAdagrad
from tests.common.oracle import Chain, compare, compare_each, plain_loss, sample
from tests.common.ranks import on_ranks, refusal

SHARDING = ("zero1", "zero2", "shard_grad_op", "zero3")
EVERY = ("element", sw.block(100), "row", "tensor")


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(*models.batch(step, 0, rank))


def compare_model(name: str, strategy: str, **how: object) -> None:
    how = {"steps": 3, "auto_wrap_policy": models.wrap_policy(name)} | how
    compare(lambda: models.build(name), loss_of, strategy, **how)


# -- elementwise optimizers under every granularity


def every_granularity(names: Iterable[str], strategies: Iterable[str]) -> None:
    for name in names:
        for granularity in EVERY[1:]:
            for strategy in strategies:
                compare_model(name, strategy, granularity=granularity)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_adamw_is_bitwise_under_every_granularity(world):
    run_on_ranks(every_granularity, world, ("odd",), ("zero1", "zero3"))


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_adamw_is_bitwise_under_every_granularity_for_every_model_and_preset(world):
    run_on_ranks(every_granularity, world, models.NAMES, ("ddp", *SHARDING), timeout_s=280)


# -- optimizers that need whole parameters


class Both:
    """Two optimizers that share the parameters of a model, stepped together."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    @property
    def state(self) -> dict[Tensor, dict]:
        return {parameter: state for part in self.parts for parameter, state in part.state.items()}

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


def muon(parameters: Iterable[nn.Parameter]) -> Both:
    """Muon for the matrices, AdamW for the rest, as its users build it. (Muon divides by the sides of its matrices.)"""
    listed = list(parameters)
    matrices = [p for p in listed if p.dim() == 2 and sw.logical_shape(p).numel()]
    others = [p for p in listed if p.dim() != 2]
    return Both(torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-2))


def adafactor(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Without parameters that have no element, of which it takes the root mean square."""
    return torch.optim.Adafactor([p for p in parameters if sw.logical_shape(p).numel()], lr=1e-2, weight_decay=0.1)


def whole_optimizers(names: Iterable[str], strategies: Iterable[str]) -> None:
    for name in names:
        for strategy in strategies:
            for make in (muon, adafactor):
                compare_model(name, strategy, granularity="tensor", optimizer=make)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_muon_and_adafactor_are_bitwise_where_each_parameter_lies_whole_on_one_rank(world):
    run_on_ranks(whole_optimizers, world, ("gpt",), SHARDING if world == 2 else ("zero1", "zero3"))


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_muon_and_adafactor_are_bitwise_for_every_model_and_preset(world):
    run_on_ranks(whole_optimizers, world, models.NAMES, ("ddp", *SHARDING), timeout_s=280)


def muon_that_nobody_stops():
    sw.declare_granularity(torch.optim.Muon, "element")
    try:
        compare_model("gpt", "zero3", optimizer=muon)
    finally:
        sw.declare_granularity(torch.optim.Muon, "tensor")


def test_the_comparison_sees_a_matrix_optimizer_that_works_on_slices():
    """Negative control."""
    with pytest.raises(AssertionError, match="is off by"):
        run_on_ranks(muon_that_nobody_stops, 2)


# -- what an optimizer sees


def seen_shapes(granularity: object) -> dict[str, tuple]:
    """By name, on this rank: the shapes of the shard, of its gradient after a backward, and of the whole parameter."""
    model = sw.parallelize(Shapes(), sw.ParallelPlan(granularity=granularity, auto_wrap_policy="none"))
    model(sample(0, 0)).sum().backward()
    named = model.named_parameters()
    return {name: (tuple(p.shape), tuple(p.grad.shape), tuple(sw.logical_shape(p))) for name, p in named}


class Shapes(nn.Module):
    """Every kind of shape, each used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scalar = nn.Parameter(torch.randn(()))
        self.vector = nn.Parameter(torch.randn(8))
        self.matrix = nn.Parameter(torch.randn(40, 64))
        self.turned = nn.Parameter(torch.randn(8, 32).t())
        self.experts = nn.Parameter(torch.randn(4, 8, 64))
        self.filters = nn.Parameter(torch.randn(16, 4, 4, 4).to(memory_format=torch.channels_last))

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.scalar, self.vector, self.matrix, self.turned, self.experts, self.filters)
        return x.sum() * sum(part.square().sum() for part in parts)


def test_with_tensor_the_owner_sees_the_parameter_and_the_others_none_of_it():
    found = run_on_ranks(seen_shapes, 3, "tensor")
    for name, (_, _, logical) in found[0].items():
        owners = [rank for rank, seen in enumerate(found) if 0 not in seen[name][0]]
        assert len(owners) == 1
        for rank, seen in enumerate(found):
            shape, of_gradient, _ = seen[name]
            assert shape == of_gradient == (logical if rank in owners else (0, *logical[1:]))


def test_with_row_every_rank_sees_whole_rows():
    found = run_on_ranks(seen_shapes, 3, "row")
    num_rows = {"matrix": 40, "experts": 32, "filters": 16}
    for name, count in num_rows.items():
        logical = found[0][name][2]
        rows = [seen[name][0] for seen in found]
        for shape in rows:
            assert len(shape) == len(logical)
            assert shape[1:] == logical[1:] or shape == (1, shape[1], logical[2])
        assert sum(shape[1] if name == "experts" else shape[0] for shape in rows) == count
    assert [seen["turned"][0] for seen in found].count((32, 8)) == 1  # its rows are no runs of memory: it stays whole
    assert sum(math.prod(seen["turned"][0]) for seen in found) == 256


def test_with_blocks_a_rank_holds_a_run_of_elements():
    found = run_on_ranks(seen_shapes, 3, sw.block(512))
    for name, (_, _, logical) in found[0].items():
        numels = [math.prod(seen[name][0]) for seen in found]
        assert sum(numels) == math.prod(logical)
        cuts = [sum(numels[:rank]) for rank in range(3)]
        assert all(cut % 512 == 0 or cut == math.prod(logical) for cut in cuts)


# -- which optimizer may work where


def rows():
    sw.declare_granularity(RowAdagrad, "row")
    for strategy in SHARDING:
        for granularity in ("row", "tensor"):
            compare_model("gpt", strategy, granularity=granularity, optimizer=RowAdagrad)
    messages = {}
    for granularity in ("element", sw.block(64)):
        messages[str(granularity)] = refusal(
            StateError, compare_model, "gpt", "zero3", granularity=granularity, optimizer=RowAdagrad
        )
    forget_declaration(RowAdagrad)
    return messages


@pytest.mark.parametrize("world", [2, 3])
def test_a_declared_row_optimizer_works_where_rows_are_whole_and_nowhere_else(world):
    for messages in run_on_ranks(rows, world):
        for granularity, text in messages.items():
            assert text.startswith("RowAdagrad needs every row of a parameter on one rank, but parameter '")
            assert f"is sharded by {granularity}: this rank holds " in text
            assert "Use sw.ParallelPlan(granularity='row'), strategy 'ddp', or an element-wise optimizer." in text


@on_ranks(2)
def test_an_optimizer_is_refused_exactly_where_what_it_needs_is_cut_or_unknown():
    texts = {}
    makers = {
        "Muon": muon,
        "Adafactor": adafactor,
        "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=1),
        "RowAdagrad": RowAdagrad,
    }
    for granularity in EVERY:
        for strategy in ("ddp", "zero1", "zero3"):
            for name, make in makers.items():
                model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy, granularity=granularity))
                optimizer = make(model.parameters())
                plain_loss(model, 0, 0).backward()
                before = [p.detach().clone() for p in model.parameters()]
                try:
                    optimizer.step(*((lambda: torch.zeros(()),) if name == "LBFGS" else ()))
                except StateError as error:
                    texts[name, strategy, str(granularity)] = str(error)
                    assert all(torch.equal(a, b.detach()) for a, b in zip(before, model.parameters(), strict=True))
    for strategy in ("zero1", "zero3"):
        for granularity in map(str, EVERY):
            assert (("Muon", strategy, granularity) in texts) == (granularity != "tensor")
            assert (("Adafactor", strategy, granularity) in texts) == (granularity != "tensor")
            assert ("LBFGS", strategy, granularity) in texts
            assert ("RowAdagrad", strategy, granularity) in texts
    assert not any(strategy == "ddp" for _, strategy, _ in texts)
    muons = texts["Muon", "zero3", "row"]
    assert "Muon needs every tensor of a parameter" not in muons
    assert muons.startswith("Muon needs every parameter whole on one rank, but parameter '")
    assert "Use sw.ParallelPlan(granularity='tensor')" in muons
    assert "RowAdagrad is not known to work parameter by parameter" in texts["RowAdagrad", "zero3", "tensor"]
    assert "sw.declare_granularity(RowAdagrad, 'tensor')" in texts["RowAdagrad", "zero3", "row"]


def test_declaring_takes_a_class_and_a_granularity():
    with pytest.raises(PlanError, match="granularity='column' is none"):
        sw.declare_granularity(RowAdagrad, "column")
    with pytest.raises(TypeError, match="an optimizer class is expected, got 'RowAdagrad'"):
        sw.declare_granularity("RowAdagrad", "row")  # type: ignore[arg-type]


# -- everything else that goes by the layout


def norms_and_states() -> dict[str, object]:
    """After three clipped steps: the norms and the full state dict, by granularity."""
    found = {}
    for granularity in EVERY:
        model = sw.parallelize(
            models.build("odd"),
            sw.ParallelPlan(granularity=granularity, auto_wrap_policy=models.wrap_policy("odd")),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        norms = []
        for step in range(3):
            loss_of(model, dist.get_rank(), step).backward()
            norms.append(sw.clip_grad_norm(model, 0.3).item())
            optimizer.step()
            optimizer.zero_grad()
        state = sw.full_state_dict(model)
        other = sw.parallelize(
            models.build("odd"), sw.ParallelPlan(granularity="row", auto_wrap_policy=models.wrap_policy("odd"))
        )
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        sw.load_full_state_dict(other, state)
        again = sw.full_state_dict(other)
        assert state.keys() == again.keys()
        assert all(torch.equal(state[key], again[key]) for key in state)
        with sw.full_parameters(model):
            shown = {name: p.detach().clone() for name, p in model.named_parameters()}
        found[str(granularity)] = norms, state, shown
    return found


@pytest.mark.parametrize("world", [1, 3])
def test_norms_state_dicts_and_shown_parameters_are_those_of_element(world):
    results = run_on_ranks(norms_and_states, world)
    expected_norms, expected_state, _ = results[0]["element"]
    for rank, found in enumerate(results):
        for granularity, (norms, state, shown) in found.items():
            assert norms == expected_norms, granularity
            assert all(torch.equal(shown[name], expected_state[name]) for name in shown), granularity
            if rank == 0:
                assert all(torch.equal(state[key], expected_state[key]) for key in expected_state), granularity


@on_ranks(3)
def test_the_summary_tells_granularity_imbalance_and_idle_ranks() -> None:
    found = {}
    for granularity in EVERY:
        model = sw.parallelize(models.build("gpt"), sw.ParallelPlan(granularity=granularity))
        shown = sw.summary(model)
        found[str(granularity)] = (shown.granularity, shown.imbalance, shown.num_idle_ranks, str(shown))
    for name, (granularity, imbalance, num_idle, text) in found.items():
        assert granularity == name
        assert f"cut by {name}: the fullest rank owns {imbalance:.3f} times the mean" in text
        assert num_idle == 0
        assert 1.0 <= imbalance < 1.25


class OneMatrix(nn.Module):
    """More ranks than parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


@on_ranks(4)
def test_ranks_that_own_nothing_take_part_and_are_counted() -> None:
    compare_each(OneMatrix, plain_loss, SHARDING, granularity="tensor", optimizer=adafactor)
    text = str(sw.summary(sw.parallelize(OneMatrix(), sw.ParallelPlan(granularity="tensor"))))
    assert "2 of 4 ranks own nothing" in text
