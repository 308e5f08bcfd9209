"""What the model's own forward computes from activations and weights of other stages: handed on, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwise.parallel.pipeline.marks import FlowMarks
from shardwise.spec.errors import PlanError
from tests.parallel.pipeline.test_stages import call, check, split


class Net(nn.Module):
    """``forward`` keeps what ``early`` finds in the embedded tokens, and ``late`` uses it after the blocks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)
        nn.init.normal_(self.norm.bias)

    def forward(self, ids):
        x = self.embedding(ids)
        early = self.early(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.logits(self.late(self.norm(x), early)).flatten(0, 1), ids.flatten())

    def early(self, x):
        return None

    def late(self, x, _kept):
        return x

    def logits(self, x):
        return self.head(x)


class Detached(Net):
    def early(self, x):
        return x.detach()

    def late(self, x, early):
        return x + early


class OfData(Detached):
    def early(self, x):
        return x.data


class WithoutGrad(Net):
    def early(self, x):
        with torch.no_grad():
            return x.abs().mean((1, 2), keepdim=True)

    def late(self, x, early):
        return x * early


class Masked(Net):
    def early(self, x):
        return x > 0

    def late(self, x, early):
        return torch.where(early, x, -x)


class Sorted(Net):
    def early(self, x):
        return x.sum(-1).argsort(-1)

    def late(self, x, early):
        return x.gather(1, early[..., None].expand_as(x))


class Written(Net):
    def early(self, x):
        early = torch.zeros(2, 6, 8)
        early[:, :3].copy_(x.detach()[:, :3])
        return early

    def late(self, x, early):
        return x + early


class Listed(Net):
    def early(self, x):
        lists = [torch.zeros(8), torch.zeros(8)]
        torch._foreach_add_(lists, [x.detach()[0, 0], x.detach()[0, 1]])
        return lists

    def late(self, x, early):
        return x + early[1]


class Item(Net):
    def early(self, x):
        return x.abs().mean().item()

    def late(self, x, early):
        return x * (early + 1)


class List(Item):
    def early(self, x):
        return x.detach().tolist()[0][0][0]


class Array(Item):
    def early(self, x):
        return float(x.detach().numpy().mean())


class Equal(Net):
    def early(self, x):
        return torch.equal(x, torch.zeros_like(x))

    def late(self, x, early):
        return x if early else x * 2


class Attribute(Net):
    def early(self, x):
        self.first = x.detach().mean()

    def late(self, x, _kept):
        return x * self.first


class InModule(Net):
    """A module without parameters gives a mask."""

    def __init__(self):
        super().__init__()
        self.positive = Positive()

    def early(self, x):
        return self.positive(x)

    def late(self, x, early):
        return x * early


class Positive(nn.Module):
    def forward(self, x):
        return (x > 0).float()


CARRIED = (Detached, OfData, WithoutGrad, Masked, Sorted, Written, Listed, Attribute, InModule)


@pytest.mark.parametrize("kind", CARRIED)
def test_what_has_no_graph_is_handed_on(kind):
    check(kind(), (torch.arange(12).view(2, 6) % 11,), 3)


class Branch(Net):
    def forward(self, ids):
        x = self.embedding(ids)
        for place, block in enumerate(self.blocks):
            x = block(x)
            if place == 3 and x.square().mean() > 0:
                x = x * 2
        return self.head(x).sum()


@pytest.mark.parametrize("kind", [Item, List, Array, Equal, Branch])
def test_reading_values_of_activations_is_refused(kind):
    maker = "blocks.3" if kind is Branch else "embedding"
    for _, stages in split(kind(), 3):
        with pytest.raises(PlanError, match=rf"reads values of what '{maker}' returns.*\n  Read them inside"):
            stages.flow((torch.arange(12).view(2, 6) % 11,), call)


class Shapes(Net):
    """Takes from activations what a stand-in for them has, too: nothing more goes from stage to stage."""

    def early(self, x):
        return torch.ones_like(x) + x.new_zeros(x.shape, dtype=x.dtype) + torch.ones(8).to(x).expand_as(x)

    def late(self, x, early):
        return x + early


def test_shapes_alone_are_not_handed_on():
    parts = check(Shapes(), (torch.arange(12).view(2, 6) % 11,), 3)
    flow = parts[0][1].flow((torch.arange(12).view(2, 6) % 11,), call)
    assert [len(sources) for sources in flow.boundary] == [1, 1]


class OwnHead(Net):
    """The last stage has the head's weight and bias, but its forward does not call the head."""

    def logits(self, x):
        return F.linear(x, self.head.weight, self.head.bias)


class OwnTable(Net):
    def __init__(self):
        super().__init__()
        self.blocks.insert(0, nn.Identity())
        self.embedding = nn.Embedding(11, 8)

    def early(self, x):
        return x + self.embedding.weight[0].detach()

    def late(self, x, early):
        return x + early


class Tied(Net):
    """The embedding's weight is the head's: the last stage has it."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.embedding.weight

    def logits(self, x):
        return x @ self.embedding.weight.T


class Functional(Net):
    def logits(self, x):
        return x @ self.embedding.weight.T


class FunctionalNorm(Net):
    def late(self, x, _kept):
        return F.layer_norm(x, (8,), self.embedding.weight[0])


class Slice(Net):
    def __init__(self):
        super().__init__()
        self.positions = nn.Embedding(6, 8)  # registered behind the blocks

    def forward(self, ids):
        x = self.embedding(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum()


class Value(Net):
    def late(self, x, _kept):
        return x * self.embedding.weight.norm().item()


class Penalty(Net):
    def forward(self, ids):
        return super().forward(ids) + sum(parameter.square().sum() for parameter in self.parameters())


class PenaltyOfBlocks(Net):
    def forward(self, ids):
        return super().forward(ids) + sum(block[0].weight.square().sum() for block in self.blocks)


@pytest.mark.parametrize(
    ("kind", "weight", "owner"),
    [
        (Functional, "embedding.weight", "embedding"),
        (OwnHead, r"head\.bias' \(and 1 more weights\)", "head"),
        (OwnTable, "embedding.weight", "embedding"),
        (Tied, "embedding.weight", "embedding"),
        (FunctionalNorm, "embedding.weight", "embedding"),
        (Slice, "positions.weight", "positions"),
        (Value, "embedding.weight", "embedding"),
        (Penalty, r"blocks\.0\.0\.bias' \(and \d+ more weights\)", "blocks.0"),
        (PenaltyOfBlocks, r"blocks\.0\.0\.weight' \(and 4 more weights\)", "blocks.0"),
    ],
)
def test_weights_of_other_stages_are_refused_by_name(kind, weight, owner):
    for _, stages in split(kind(), 3):
        with pytest.raises(PlanError, match=rf"computes with '{weight}.*\n.*call '{owner}' instead of"):
            stages.flow((torch.arange(12).view(2, 6) % 11,), call)


class Rescales(Net):
    def forward(self, ids):
        with torch.no_grad():
            self.blocks[2][0].weight.div_(2)
        return super().forward(ids)


def test_a_forward_that_writes_to_weights_of_other_stages_is_refused():
    _, stages = split(Rescales(), 3)[0]
    with pytest.raises(PlanError, match=r"own forward writes to a weight \(aten\.div_"):
        stages.flow((torch.arange(12).view(2, 6) % 11,), call)


def test_marks_go_with_memory():
    marks, other = FlowMarks(lambda read: ValueError(f"reads {read}")), torch.ones(3)
    marks.add(tensor := torch.ones(2, 3, requires_grad=True), {"a"})
    marks.add(other, {"b"})
    with marks.propagate():
        assert marks.of([(tensor.detach()[0] + other).round()]) == {"a", "b"}
        assert marks.of([tensor.data, torch.empty_like(tensor), 3]) == {"a"}
        with marks.paused():
            assert not marks.of([tensor * 2])
        with pytest.raises(ValueError, match=r"reads \{'b'\}"):
            assert other.sum() > 0
    assert not marks.of([tensor * 2])
