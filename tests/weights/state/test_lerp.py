"""``sw.lerp_parameters``: a teacher follows its student under every strategy as in one process, to the last bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.spec.errors import StateError
from shardwise.testing import run_on_ranks
from tests.common.ranks import on_ranks, refusal

WEIGHT = 0.25


class Net(nn.Module):
    def __init__(self, hidden: int = 24) -> None:
        super().__init__()
        self.stem = nn.Linear(8, hidden)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(hidden, hidden), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(hidden, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Distillation(nn.Module):
    """A student with a predictor, which its teacher lacks, so that their shards begin in different places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student = Net()
        self.teacher = copy.deepcopy(self.student).requires_grad_(requires_grad=False)
        self.predictor = nn.Sequential(nn.Linear(8, 17), nn.ReLU(), nn.Linear(17, 8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(x.flip(-1))
        return F.mse_loss(self.predictor(self.student(x)), wanted)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """The same samples on every rank, so that means over ranks are exact."""
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(number))).backward()
    optimizer.step()
    optimizer.zero_grad()
    sw.lerp_parameters(model.teacher, model.student, WEIGHT)


def train(options: dict[str, Any] | None) -> dict[str, Tensor]:
    """What three steps leave of the whole model."""
    model: nn.Module = Distillation()
    if options is not None:
        model = sw.parallelize(model, sw.ParallelPlan(**options))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for number in range(3):
        step(model, optimizer, number)
    whole = model.state_dict() if options is None else sw.full_state_dict(model)
    return {name: value.clone() for name, value in whole.items()}


def by_hand() -> dict[str, Tensor]:
    model = Distillation()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for number in range(3):
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(number))).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                slow.lerp_(fast, WEIGHT)
    return model.state_dict()


PLANS: tuple[dict[str, Any], ...] = (
    {"strategy": "ddp"},
    {"strategy": "zero1"},
    {"strategy": "zero2"},
    {"strategy": "shard_grad_op"},
    {"strategy": "zero3"},
    {"strategy": "zero3", "granularity": "row"},
    {"strategy": "zero3", "auto_wrap_policy": "none"},
    {"strategy": "zero3", "offload_policy": "cpu"},
)


def train_all(plans: tuple[dict[str, Any], ...]) -> list[dict[str, Tensor]]:
    return [train(options) for options in plans]


def check(world: int, plans: tuple[dict[str, Any], ...]) -> None:
    expected = by_hand()
    assert not torch.equal(expected["teacher.stem.weight"], Distillation().teacher.stem.weight)
    for options, got in zip(plans, run_on_ranks(train_all, world, plans)[0], strict=True):
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(got[name], value), (options, name)


def test_a_plain_teacher_follows_its_student():
    expected = by_hand()
    assert all(torch.equal(value, expected[name]) for name, value in train(None).items())


def test_under_every_strategy_a_teacher_follows_as_in_one_process():
    check(2, PLANS)


def test_so_it_does_on_a_mesh_with_replicas():
    check(4, ({"strategy": "hsdp", "dp_replicate": 2}, {"strategy": "zero3"}))


def sent_by(options: dict[str, Any], *, is_apart: bool) -> list[str]:
    """The units of which ``lerp_parameters`` gathers something: in one model, or between two models."""
    if is_apart:
        torch.manual_seed(0)
        plan = sw.ParallelPlan(**options)
        student, teacher = sw.parallelize(Net(), plan), sw.parallelize(Net().requires_grad_(requires_grad=False), plan)
        with sw.record_collectives(student) as events:
            sw.lerp_parameters(teacher, student, WEIGHT)
    else:
        model = sw.parallelize(Distillation(), sw.ParallelPlan(**options))
        with sw.record_collectives(model) as events:
            sw.lerp_parameters(model.teacher, model.student, WEIGHT)
    assert {event.kind for event in events} <= {"all_gather"}
    return [event.unit for event in events]


def sent_by_all() -> list[list[str]]:
    zero3, ddp = {"strategy": "zero3", "auto_wrap_policy": "none"}, {"strategy": "ddp"}
    return [sent_by(zero3, is_apart=True), sent_by(zero3, is_apart=False), sent_by(ddp, is_apart=False)]


def test_nothing_is_sent_where_ranks_hold_the_same_parts_of_both():
    alike, other, replicated = run_on_ranks(sent_by_all, 2)[1]
    assert alike == replicated == []
    assert other == ["root"]


def mixed() -> tuple[list[Tensor], list[Tensor]]:
    """A plain teacher of a student in shards, and the other way round; each beside the plain result."""
    torch.manual_seed(0)
    plain, sharded = Net(), Net()
    expected = [torch.lerp(a, b, WEIGHT) for a, b in zip(plain.parameters(), sharded.parameters(), strict=True)]
    back = [torch.lerp(b, a, 1.0) for a, b in zip(expected, sharded.parameters(), strict=True)]
    model = sw.parallelize(sharded, strategy="zero3")
    sw.lerp_parameters(plain, model, WEIGHT)
    found = [p.detach().clone() for p in plain.parameters()]
    sw.lerp_parameters(model, plain, 1.0)
    return [*found, *sw.full_state_dict(model).values()], [*expected, *back]


def test_one_of_the_two_may_be_plain():
    found, expected = run_on_ranks(mixed, 2)[0]
    assert len(found) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def under_tp() -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    size = {"num_layers": 1, "hidden": 32, "num_heads": 4, "vocab_size": 32, "seq_len": 8}
    models = [sw.models.gpt("gpt-tiny", **size) for _ in range(2)]
    expected = [torch.lerp(a, b, WEIGHT) for a, b in zip(*(m.state_dict().values() for m in models), strict=True)]
    target, source = sw.parallelize(models[0], tp=2), sw.parallelize(models[1], tp=2)
    sw.lerp_parameters(target, source, WEIGHT)
    return [*sw.full_state_dict(target).values()], expected


def test_slices_of_tensor_parallelism_follow_too():
    found, expected = run_on_ranks(under_tp, 4)[0]
    assert len(found) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Cut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16, bias=False)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.stem(x))))


@on_ranks(4)
def test_parts_of_equal_size_on_other_ranks_are_gathered():
    """Of a layer that both models divide over two ranks: each over two others."""
    torch.manual_seed(0)
    target, source = Cut(), Cut()
    expected = torch.lerp(target.stem.weight, source.stem.weight, WEIGHT).detach()
    alone = {"auto_wrap_policy": sw.wrap_by_name("stem"), "merge_units": False, "dp_shard": 2}
    table = {"up": "colwise", "down": "rowwise"}
    sw.parallelize(target, sw.ParallelPlan(strategy="hsdp", dp_replicate=2, **alone))
    sw.parallelize(source, sw.ParallelPlan(tp=2, tp_plan=table, **alone))
    sw.lerp_parameters(target.stem, source.stem, WEIGHT)
    assert torch.equal(sw.full_state_dict(target).get("stem.weight", expected), expected)


@on_ranks(2)
def test_slices_that_are_cut_otherwise_are_refused():
    plans = [sw.ParallelPlan(tp=2, tp_plan={"up": style, "down": "rowwise"}) for style in ("colwise", "packed_colwise")]
    models = [sw.parallelize(Cut(), plan) for plan in plans]
    message = refusal(StateError, sw.lerp_parameters, models[0].up, models[1].up, WEIGHT)
    assert "'weight' has shape [16, 16] with strides [16, 1], cut" in message


def test_a_plain_parameter_may_be_a_view_of_more():
    base = torch.zeros(3, 4)
    target, source = nn.Module(), nn.Module()
    target.register_parameter("weight", nn.Parameter(base[:, :2]))
    source.register_parameter("weight", nn.Parameter(torch.ones(3, 2)))
    sw.lerp_parameters(target, source, 1.0)
    assert torch.equal(base, torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 3))


def test_what_does_not_fit_is_refused():
    lerp = sw.lerp_parameters
    assert "weight=1.5: expected a number from 0 to 1" in refusal(StateError, lerp, Net(), Net(), 1.5)
    assert "such as 'bias' in the source" in refusal(StateError, lerp, Net(), Net().stem, WEIGHT)
    message = refusal(StateError, lerp, Net(), Net(hidden=32), WEIGHT)
    assert "'stem.weight' has shape [24, 8] with strides [8, 1] and shape [32, 8] with strides [8, 1]" in message


def refused() -> list[str]:
    model = sw.parallelize(Distillation(), sw.ParallelPlan(quantize_frozen="int8"))
    found = [refusal(StateError, sw.lerp_parameters, model.teacher, model.student, WEIGHT)]
    model = sw.parallelize(Distillation(), sw.ParallelPlan())
    with sw.full_parameters(model):
        found.append(refusal(StateError, sw.lerp_parameters, model.teacher, model.student, WEIGHT))
    return found


def test_a_quantized_teacher_and_whole_parameters_are_refused():
    quantized, whole = run_on_ranks(refused, 2)[0]
    assert "which loses small changes" in quantized
    assert "outside of sw.full_parameters()" in whole


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_the_ends_change_nothing_and_copy(weight):
    torch.manual_seed(0)
    target, source = Net(), Net()
    expected = copy.deepcopy(source if weight else target)
    sw.lerp_parameters(target, source, weight)
    assert all(torch.equal(a, b) for a, b in zip(target.parameters(), expected.parameters(), strict=True))
