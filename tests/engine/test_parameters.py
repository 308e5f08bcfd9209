"""Parameters of odd shapes, dtypes and relations."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.spec.errors import RankDisagreement, StateError
from shardwise.testing import run_on_ranks
from tests.common.oracle import PRESETS, Chain, compare_each, plain_loss, sample
from tests.common.ranks import on_ranks, refusal


class Odd(nn.Module):
    """Scalars, empty ones, one element, primes, three dimensions, a transposed and a channels-last stride."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.25))
        self.empty = nn.Parameter(torch.zeros(0))
        self.none = nn.Parameter(torch.zeros(3, 0, 2))
        self.one = nn.Parameter(torch.tensor([0.5]))
        self.weight = nn.Parameter(torch.randn(11, 8).t() * 0.1)  # (8, 11), strides (1, 8)
        self.back = nn.Parameter(torch.randn(11, 8) * 0.1)
        self.cube = nn.Parameter(torch.randn(7, 1, 13) * 0.1)
        self.kernel = nn.Parameter((torch.randn(5, 2, 3, 3) * 0.1).to(memory_format=torch.channels_last))
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x @ self.weight) * self.gain + self.one
        y = h @ self.back + self.cube.sum() + self.empty.sum() + self.none.sum()
        image = torch.nn.functional.conv2d(y.reshape(1, 2, -1, 4), self.kernel, padding=1)
        return x + y * image.mean()


class Mixed(nn.Module):
    """Parameters of three dtypes, trained and frozen ones of each."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8, dtype=torch.float64)
        self.c = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.d = nn.Linear(8, 8, dtype=torch.float64).requires_grad_(requires_grad=False)
        self.table = nn.Parameter(torch.arange(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) + self.b(x.double()).float() + self.c(x.bfloat16()).float() + self.d(x.double()).float()
        return torch.tanh(y) * self.table.sum() * 0.1


class Tied(nn.Module):
    """Ties inside a unit, between units, and between a unit and the root; a module in two places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(23)
        self.embed = nn.Linear(8, 8, bias=False)
        self.blocks = nn.ModuleList(TiedBlock() for _ in range(5))
        self.blocks[3].up.weight = self.blocks[1].up.weight
        self.blocks[2].down.weight = self.embed.weight
        self.again = self.blocks[4]
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.again(x))


class TiedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.third.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.third(torch.tanh(self.down(torch.tanh(self.up(x)))))


class Large(nn.Module):
    """Large enough for a gradient hook of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 33000, bias=False)
        self.down = nn.Linear(33000, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) * 0.1


def wide_loss(model, rank, step):
    return model(sample(rank, step, 4, 8)).square().mean()


@on_ranks(2, 3)
def test_odd_mixed_tied_and_large_parameters_are_right():
    """pytorch#156784, pytorch#196996: parameters of several dtypes in one unit are refused."""
    compare_each(lambda: Chain(Odd), wide_loss)
    compare_each(lambda: Chain(Mixed), plain_loss)
    compare_each(Tied, plain_loss)
    compare_each(lambda: Chain(Large), plain_loss, steps=2)


@on_ranks(5)
def test_more_ranks_than_elements_are_right():
    compare_each(lambda: Chain(Odd), wide_loss, ("zero1", "zero3"), steps=2)
    compare_each(Tied, plain_loss, ("zero1", "zero3"), steps=2)


@on_ranks(2)
def test_a_gradient_may_have_other_strides_than_its_parameter():
    """pytorch#128066: gradients that are not contiguous corrupt a collective.

    A gradient in another memory order than its parameter, across a cut and not.
    """

    class Transposing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(24, 8) * 0.1)
            self.inner = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.weight.t().contiguous().t()[:8] @ x.T).T

    compare_each(lambda: Chain(Transposing), plain_loss)


# -- what cannot be sharded


def refusals():
    texts = {}

    def attempt(name, change, kind=StateError, **options):
        model = Chain()
        change(model)
        texts[name] = refusal(kind, sw.parallelize, model, sw.ParallelPlan(**options))

    def give_gradient(model):
        plain_loss(model, 0, 0).backward()

    def give_holes(model):
        model.blocks[1].up.weight = nn.Parameter(torch.randn(26, 8)[::2])

    def give_hook(model):
        model.blocks[1].up.weight.register_post_accumulate_grad_hook(lambda _p: None)

    def give_memory_of_another(model):
        model.blocks[2].up.weight.data = model.blocks[1].up.weight.data

    def give_meta(model):
        model.blocks[1].up.to("meta")

    def script(model):
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            model.blocks[1].up = torch.jit.script(model.blocks[1].up)

    attempt("gradient", give_gradient)
    attempt("script", script)
    attempt("holes", give_holes)
    attempt("hook", give_hook)
    attempt("memory", give_memory_of_another)
    attempt("twice", sw.parallelize)
    model = Chain()
    sw.parallelize(model.blocks[0])
    texts["inner"] = refusal(StateError, sw.parallelize, model)
    attempt("meta", give_meta)
    return texts


def test_what_cannot_be_sharded_is_refused_by_name():
    texts = run_on_ranks(refusals, 2)[1]
    assert "parameter 'stem.weight' holds a gradient" in texts["gradient"]
    assert "parameter 'blocks.1.up.weight' has shape [13, 8] with strides [16, 1]: a view with holes" in texts["holes"]
    assert "parameter 'blocks.1.up.weight' carries a hook" in texts["hook"]
    assert "'blocks.1.up.weight' and 'blocks.2.up.weight' are two objects over the same memory" in texts["memory"]
    assert texts["script"].startswith("'blocks.1.up' was compiled by torch.jit")
    assert texts["twice"].startswith("Chain is parallelized already.")
    assert texts["inner"].startswith("Chain (its 'blocks.0') is parallelized already.")
    assert "'blocks.1.up.weight' is on the meta device" in texts["meta"]


@on_ranks(2)
def test_sparse_gradients_are_refused_by_name():
    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 8, sparse=True)
            self.inner = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table(torch.arange(3))

    texts = []
    for strategy in PRESETS:
        model = sw.parallelize(Chain(Embedding), sw.ParallelPlan(strategy=strategy))
        with pytest.raises(StateError) as caught:
            plain_loss(model, 0, 0).backward()
        texts.append(str(caught.value))
    for text in texts:
        assert text.startswith("the gradient of 'blocks.")
        assert text.endswith("Build the embedding with sparse=False.")


@on_ranks(2)
def test_ranks_with_different_models_are_told_so_all_of_them():
    rank = torch.distributed.get_rank()
    first = refusal(RankDisagreement, sw.parallelize, Chain(num_blocks=4 + rank))
    model = Chain()
    if rank == 1:
        model.blocks[0].up.double()
    second = refusal(RankDisagreement, sw.parallelize, model)
    assert "rank 1 has blocks.4.up.weight [13, 8]" in first
    assert "rank 0 has blocks.0.up.weight [13, 8] torch.float32" in second
