"""A parameter that is used outside of its unit's forward: the plain model's gradient, or an error that says what to do.

One unit a block: small models are merged into one unit by default, in whose forward everything is inside.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.spec.errors import StateError
from tests.common.ranks import on_ranks


class Block(nn.Module):
    """Returns its bias instead of adding it, as Megatron's linear layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.bias = nn.Parameter(torch.linspace(0, 1, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(self.linear(x)), self.bias


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 32, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, tokens: Tensor, shift: Tensor | float = 0.0) -> Tensor:
        x = self.embed(tokens) + shift
        for block in self.blocks:
            x, bias = block(x)
            x = x + bias
        return x


def entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


LOSSES = {
    "fused loss": lambda m, t: entropy(m(t) @ m.head.weight.T, t),
    "functional tying": lambda m, t: entropy(F.linear(m(t), m.embed.weight), t),
    "temperature": lambda m, t: entropy(m.head(m(t)) * m.scale.exp(), t),
    "penalty": lambda m, t: m(t).square().mean() + 0.1 * sum(p.square().sum() for p in m.parameters()),
    "before the model": lambda m, t: entropy(m.head(m(t, m.head.weight.sum())), t),
}


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(rank: int, microbatch: int) -> Tensor:
    return torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(10 * rank + microbatch))


def parallel(strategy: str, *, is_trained_later: bool = False) -> nn.Module:
    wrap = sw.wrap_by_class({Block, nn.Embedding, nn.Linear})
    plain = build().requires_grad_(not is_trained_later)
    model = sw.parallelize(plain, sw.ParallelPlan(strategy=strategy, auto_wrap_policy=wrap, merge_units=False))
    return model.requires_grad_()


def gradients_of_plain(losses: list, num_microbatches: int) -> dict[str, Tensor]:
    """The mean over ranks of the gradients of each rank's own loss, summed over microbatches, in one process."""
    plain = build()
    for rank, loss in enumerate(losses):
        for microbatch in range(num_microbatches):
            (loss(plain, batch(rank, microbatch)) / len(losses)).backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def assert_equal_to_plain(model: nn.Module, losses: list, num_microbatches: int = 1) -> None:
    expected = gradients_of_plain(losses, num_microbatches)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.allclose(found[name], grad, rtol=1e-5, atol=1e-6), name


@on_ranks(1, 2)
def test_a_replicated_parameter_used_outside_of_its_unit_gets_the_plain_gradient():
    rank, world = dist.get_rank(), dist.get_world_size()
    strategies = ["ddp"] if world > 1 else ["ddp", "zero1", "zero3"]  # one rank has every parameter whole
    for (name, loss), strategy in itertools.product(LOSSES.items(), strategies):
        model = parallel(strategy, is_trained_later=name == "fused loss")
        for _ in range(2):  # the second step follows the order that the first one has recorded
            model.zero_grad()
            loss(model, batch(rank, 0)).backward()
            assert_equal_to_plain(model, [loss] * world)
            loss(model, batch(rank, 1)).backward()  # added to what is there
            assert_equal_to_plain(model, [loss] * world, 2)
        model.zero_grad()
        with sw.gradient_sync(model, False):
            loss(model, batch(rank, 0)).backward()
        loss(model, batch(rank, 1)).backward()
        assert_equal_to_plain(model, [loss] * world, 2)


@on_ranks(2)
def test_ranks_may_use_different_parameters_outside_of_their_units():
    model, both = parallel("ddp"), [LOSSES["fused loss"], LOSSES["temperature"]]
    for losses in ([both[0]] * 2, [both[1]] * 2, both, both[::-1]):
        model.zero_grad()
        losses[dist.get_rank()](model, batch(dist.get_rank(), 0)).backward()
        assert_equal_to_plain(model, losses)


@on_ranks(1, 2)
def test_updates_in_backward_take_in_a_use_outside_of_the_unit_or_refuse_it():
    model, plain, loss = parallel("ddp"), build(), LOSSES["fused loss"]
    sw.optimizer_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1))
    gradients = gradients_of_plain([loss] * dist.get_world_size(), 1)
    loss(model, batch(dist.get_rank(), 0)).backward()
    for (name, p), before in zip(model.named_parameters(), plain.parameters(), strict=True):
        expected = before - 0.1 * gradients[name] if name in gradients else before
        assert torch.allclose(p, expected, rtol=1e-5, atol=1e-6), name
    late = LOSSES["before the model"](model, batch(dist.get_rank(), 0))
    with pytest.raises(StateError, match=r"came back to unit 'head' after its parameters"):
        late.backward()


USES = {  # name of the parameter that is used
    "fused loss": ("head.weight", lambda m, x: x @ m.head.weight.T),
    "functional tying": ("embed.weight", lambda m, x: F.linear(x, m.embed.weight)),
    "temperature": ("scale", lambda m, x: m.head(x) * m.scale.exp()),
    "penalty": ("head.weight", lambda m, _: m.head.weight.square().sum()),
}


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@on_ranks(2)
def test_a_sharded_parameter_used_outside_of_its_unit_is_refused_by_name_with_a_way_that_works(strategy):
    model, plain = parallel(strategy), build()
    for use, (name, compute) in USES.items():
        x = model(batch(dist.get_rank(), 0))
        with pytest.raises(StateError, match=rf"(?s)'{name}' \(logical shape .*\n  Comput") as caught:
            compute(model, x)
        assert "sw." in str(caught.value), use
    # what the messages say: whole parameters without gradients, and a method that gathers
    with sw.full_parameters(model):
        for name, compute in (("head.weight", USES["penalty"][1]),):
            assert torch.equal(compute(model, None), compute(plain, None)), name
    wrap = sw.wrap_by_class({Block, nn.Embedding, nn.Linear})
    model = Fused()
    model = sw.parallelize(model, sw.ParallelPlan(strategy=strategy, auto_wrap_policy=wrap, merge_units=False))
    sw.register_fsdp_forward_method(model.head, "scores")
    entropy(model.head.scores(model(batch(dist.get_rank(), 0))), batch(dist.get_rank(), 0)).backward()
    expected = gradients_of_plain([lambda m, t: entropy(m(t) @ m.head.weight.T, t)] * 2, 1)
    with_grad = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert with_grad.keys() <= expected.keys()
    norm = torch.nn.utils.get_total_norm(list(expected.values()))
    assert torch.allclose(sw.clip_grad_norm(model, float("inf")), norm, rtol=1e-5)


class Scores(nn.Linear):
    def scores(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def Fused() -> Model:  # noqa: N802
    model = build()
    model.head.__class__ = Scores
    return model
