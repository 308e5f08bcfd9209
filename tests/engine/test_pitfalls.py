"""Graphs that make hooks fire early, late, twice or not at all."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.spec.errors import StateError
from shardwise.testing import probe
from tests.common.oracle import (
    SHARDED,
    Block,
    Chain,
    compare,
    compare_each,
    descend,
    plain_loss,
    planned,
    presets,
    sample,
)
from tests.common.ranks import on_ranks, refusal

# -- outputs that are somebody else's


class Wrapper(nn.Module):
    """Returns its child's output as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 1.5))
        self.child = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x * self.scale)


class HandsThrough(nn.Module):
    """Returns its second input unchanged beside its output, or makes it if there is none (T5's position_bias)."""

    def __init__(self, makes_bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.bias = nn.Linear(8, 8) if makes_bias else None

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if bias is None:
            bias = self.bias(torch.ones(8))
        return torch.tanh(self.linear(x) + bias), bias


class SharedBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(HandsThrough(index == 0) for index in range(6))

    def forward(self, x: Tensor) -> Tensor:
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


class Identity(nn.Module):
    """A unit that sometimes returns its input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.inner = nn.Identity()
        self.is_on = True

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) if self.is_on else x


def with_every_second_block_off(model, rank, step):
    for index, block in enumerate(model.blocks):
        block.is_on = bool((index + step) % 2) or index == 0
    return plain_loss(model, rank, step)


@on_ranks(2, 3)
def test_a_parent_that_returns_its_childs_output_and_inputs_handed_through_are_right():
    for strategy in presets():
        nested = sw.wrap_by_class({Wrapper, Block})
        trained = compare(lambda: Chain(Wrapper), plain_loss, strategy, auto_wrap_policy=nested)
        assert len(trained.probe.units) == 11
        compare(SharedBias, plain_loss, strategy)
        compare(lambda: Chain(Identity), with_every_second_block_off, strategy)


# -- backward, more than once or not to its end


def backward_twice(model, rank, step):
    loss = plain_loss(model, rank, step)
    loss.backward(retain_graph=True)
    yield loss
    loss.backward(retain_graph=True)
    yield loss
    loss.backward()
    yield loss


def two_losses_on_one_graph(model, rank, step):
    y = model(sample(rank, step))
    y.square().mean().backward(retain_graph=True)
    yield y
    y.sin().sum().backward()
    yield y


class UndefinedGradient(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x, weight):
        return x + weight.sum() * 0.5

    @staticmethod
    def backward(_ctx, grad):
        return grad, None


class WithUndefined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.large = nn.Parameter(torch.randn(512, 512) * 1e-3)  # large enough for a hook of its own

    def forward(self, x: Tensor) -> Tensor:
        return UndefinedGradient.apply(torch.tanh(self.linear(x)), self.large)


@on_ranks(2, 3)
def test_a_graph_can_be_run_backward_again_and_gradients_may_be_undefined():
    compare_each(Chain, backward_twice)
    compare_each(Chain, two_losses_on_one_graph, steps=2)
    compare_each(lambda: Chain(WithUndefined), plain_loss, steps=2)


class Refuses(torch.autograd.Function):
    """Fails in backward (or forward) on request."""

    when: str | None = None

    @staticmethod
    def forward(_ctx, x):
        if Refuses.when == "forward":
            raise ValueError("no forward")
        return x.clone()

    @staticmethod
    def backward(_ctx, grad):
        if Refuses.when == "backward":
            raise ValueError("no backward")
        return grad


class Fragile(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        return x + self.down(Refuses.apply(h) if getattr(self, "is_fragile", False) else h)


def fail_then_work(when):
    def script(model, rank, step):
        model.blocks[2].is_fragile = True
        if step in (1, 2):
            Refuses.when = when
            with contextlib.suppress(ValueError):
                plain_loss(model, rank, step + 100).backward()
                raise AssertionError("it did not fail")
            Refuses.when = None
            for parameter in model.parameters():
                parameter.grad = None
        return plain_loss(model, rank, step)

    return script


def fail_then_backward(model, rank, step):
    """Two forwards; the backward of one raises, that of the other follows with no forward between them."""
    model.blocks[2].is_fragile = True
    failing = plain_loss(model, rank, step + 100)
    model.blocks[2].is_fragile = False
    loss = plain_loss(model, rank, step)
    if step in (1, 2):
        Refuses.when = "backward"
        with pytest.raises(ValueError, match="no backward"):
            failing.backward()
        Refuses.when = None
        for parameter in model.parameters():
            parameter.grad = None
    return loss


def fail_twice_then_backward(model, rank, step):
    """The failed backward is tried once more: torch has freed its graph by then."""
    model.blocks[2].is_fragile = True
    loss, again = plain_loss(model, rank, step), plain_loss(model, rank, step)
    if step:
        Refuses.when = "backward"
        for _ in range(2):
            with pytest.raises((ValueError, RuntimeError), match=r"no backward|a second time"):
                again.backward()
        Refuses.when = None
        for parameter in model.parameters():
            parameter.grad = None
    return loss


@on_ranks(2, 3)
def test_after_an_exception_in_forward_or_backward_the_next_step_is_right():
    for script in (fail_then_backward, fail_twice_then_backward):
        compare_each(lambda: Chain(Fragile), script)
    compare_each(lambda: Chain(Fragile), fail_then_work("backward"))
    compare_each(lambda: Chain(Fragile), fail_then_work("forward"))


class Graph(nn.Module):
    """A layer of a graph network. Its edges are sparse; one matrix of them is made of the layer's own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.edges = nn.Parameter(torch.tensor([0.5, 1.5, -1.0]))
        places = torch.tensor([[0, 1, 2], [1, 2, 0]])
        self.register_buffer("places", places)
        self.fixed = torch.sparse_coo_tensor(places, torch.tensor([1.0, 2.0, 3.0]), (3, 3))
        self.rows = self.fixed.to_sparse_csr()

    def forward(self, x: Tensor) -> Tensor:
        learned = torch.sparse_coo_tensor(self.places, self.edges, (3, 3))
        h = torch.sparse.mm(self.rows, self.linear(x))
        return x + torch.sparse.mm(learned, torch.sparse.mm(self.fixed, h).relu())


class Edges(nn.Module):
    """Returns a sparse tensor that lies where its parameter does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, 1.5, -1.0]))

    def forward(self) -> Tensor:
        return torch.sparse_csr_tensor(torch.tensor([0, 1, 2, 3]), torch.tensor([1, 2, 0]), self.weight, (3, 3))


class HandsEdgesOn(Chain):
    def __init__(self) -> None:
        super().__init__(num_blocks=3)
        self.edges = nn.ModuleList(Edges() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        found = [each() for each in self.edges]
        x = super().forward(x)
        for each in found:
            x = torch.sparse.mm(each, x)
        return x


@on_ranks(2)
def test_sparse_tensors_may_be_saved_for_backward_and_returned():
    warnings.filterwarnings("ignore", "Sparse")
    with planned(merge_units=False):
        compare_each(lambda: Chain(Graph), plain_loss)
        compare_each(HandsEdgesOn, plain_loss, auto_wrap_policy=sw.wrap_by_class({Edges, Block}))
    model = Chain()
    model.register_buffer("edges", Graph().rows, persistent=False)
    message = refusal(StateError, sw.parallelize, model)
    assert message.startswith("buffer 'edges' of shape [3, 3] is torch.sparse_csr")
    assert "plain attribute" in message


# -- the encoder alone, as generate() calls it


class EncoderDecoder(nn.Module):
    """As T5: embeddings and norms that the root owns, an encoder that is called by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.shared = nn.Embedding(11, 8)
        self.encoder = Stack(self.shared)
        self.decoder = Stack(self.shared)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, tokens: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = self.encoder(tokens) if memory is None else memory
        return self.head(self.decoder(tokens) + memory.mean(1, keepdim=True))


class Stack(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def tokens_of(rank, step):
    return torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(step * 10 + rank))


def encode_then_train(model, rank, step):
    tokens = tokens_of(rank, step)
    with torch.no_grad():
        memory = model.encoder(tokens)
        answer = model(tokens, memory)
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    yield memory, answer, loss


def train_through_the_encoder(model, rank, step):
    """The encoder runs by itself, with gradients, before the model does."""
    tokens = tokens_of(rank, step)
    memory = model.encoder(tokens)
    loss = F.cross_entropy(model(tokens, memory).flatten(0, 1), tokens.flatten())
    loss.backward()
    yield loss


@on_ranks(2, 3)
def test_an_encoder_can_be_called_without_the_root():
    compare_each(EncoderDecoder, encode_then_train)
    compare_each(EncoderDecoder, train_through_the_encoder)


# -- what the engine leaves behind


@on_ranks(2)
def test_deleting_the_model_frees_its_memory_at_once_without_the_garbage_collector():
    import gc
    import weakref

    gc.disable()
    for strategy in presets():
        model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))
        optimizer = torch.optim.AdamW(model.parameters())
        descend(optimizer, (plain_loss(model, 0, step) for step in range(3)))
        watched = [weakref.ref(model), weakref.ref(model.blocks[3].up), *probe(model).weak_references()]
        watched += [weakref.ref(p) for p in model.parameters()]
        assert all(ref() is not None for ref in watched)
        del model, optimizer
        left = [ref() for ref in watched if ref() is not None]
        assert not left, f"{strategy}: {len(left)} of {len(watched)} objects live on, such as {type(left[0])}"


# -- containers


class Loops(nn.Module):
    """Layers are a ModuleList of ModuleLists: the inner ones look like blocks but are never called (DeepViT, CaiT)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.layers = nn.ModuleList(nn.ModuleList([nn.LayerNorm(8), Block()]) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for norm, block in self.layers:
            x = x + block(norm(x))
        return x


class Uncalled(nn.Module):
    """A module of a class of its own that only holds others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.block = Block()


class LoopsOverHolders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.layers = nn.ModuleList(Uncalled() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer.block(layer.norm(x))
        return x


@on_ranks(2, 3)
def test_auto_takes_only_modules_that_are_called():
    compare_each(Loops, plain_loss)
    compare_each(LoopsOverHolders, plain_loss)
    return [unit.name for unit in compare(LoopsOverHolders, plain_loss, steps=1).probe.units]


# -- used parameters


class Chooses(nn.Module):
    """Uses one of its branches, which depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.never = nn.Linear(8, 8)

    def forward(self, x: Tensor, choice: int) -> Tensor:
        return torch.tanh(self.branches[choice](x)) if choice < 3 else x * 1.25


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Chooses() for _ in range(5))

    def forward(self, x: Tensor, choices: list[int]) -> Tensor:
        x = self.stem(x)
        for block, choice in zip(self.blocks, choices, strict=True):
            x = block(x, choice)
        return x


def everyone_another(model, rank, step):
    choices = [(rank + step * index) % 3 for index in range(5)]
    return model(sample(rank, step), choices).square().mean()


def only_rank_one(model, rank, step):
    """Branch 2 is used by rank 1 alone, branch 1 in some steps by nobody."""
    choices = [2 if rank == 1 and index == step % 5 else 0 for index in range(5)]
    return model(sample(rank, step), choices).square().mean()


def one_uses_none(model, rank, step):
    """Rank 0 uses no parameter of some units at all, and step 2 none of unit 3 on any rank."""
    choices = [3 if (rank == 0 and index == 1) or (step == 2 and index == 3) else index % 3 for index in range(5)]
    return model(sample(rank, step), choices).square().mean()


@on_ranks(2, 3)
def test_ranks_may_use_different_parameters_of_a_unit_and_unused_ones_keep_no_gradient():
    """pytorch#158719, torchtitan#2747, DeepSpeed#7170, Megatron-LM#2218: ranks that use different parameters hang."""
    for script in (everyone_another, only_rank_one, one_uses_none):
        compare_each(Choosing, script, steps=5)


@on_ranks(3)
def test_a_parameter_that_no_rank_used_keeps_no_gradient():
    for trained in compare_each(Choosing, only_rank_one, SHARDED, steps=2).values():
        assert all(p.grad is None for block in trained.model.blocks for p in block.never.parameters())


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def residual() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Residual() for _ in range(4)], nn.Linear(8, 4))


@on_ranks(2)
def test_an_output_that_one_rank_alone_keeps_changes_nothing() -> None:
    """As where rank 0 keeps predictions of a validation that runs without torch.no_grad."""
    plain, model = residual(), sw.parallelize(residual(), sw.ParallelPlan(strategy="zero3", merge_units=False))
    rank = torch.distributed.get_rank()
    x = torch.arange(48.0).reshape(2, 3, 8).div(48)
    model(x[rank]).sum().backward()  # records the order
    model.zero_grad()
    kept = [model(-x[rank])][: 1 - rank]
    model(x[rank]).pow(2).sum().backward()
    ((plain(x[0]).pow(2).sum() + plain(x[1]).pow(2).sum()) / 2).backward()
    assert len(kept) == 1 - rank
    for each in (plain, model):
        torch.optim.SGD(each.parameters(), lr=0.5).step()
    with sw.full_parameters(model):
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(one, other)


@on_ranks(2)
def test_forwards_that_are_never_followed_by_a_backward_delay_no_reduction_but_the_first_time() -> None:
    """As the generator of a GAN runs for the critic's step, which needs its values alone."""
    model = sw.parallelize(residual(), sw.ParallelPlan(strategy="zero3", merge_units=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(3, 8)

    def reductions_and_gathers(num_more: int) -> list[tuple[str, str]]:
        for _ in range(num_more):
            model(x)
        loss = model(x).sum()
        with sw.record_collectives(model) as events:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [(event.kind, event.unit) for event in events]

    alone = [reductions_and_gathers(0) for _ in range(2)][-1]
    first, *later = [reductions_and_gathers(2) for _ in range(3)]
    assert sorted(first) == sorted(alone)
    assert later == [alone, alone]
    assert reductions_and_gathers(0) == alone
