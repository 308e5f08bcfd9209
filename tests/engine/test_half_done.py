"""What a failure in the middle of a move leaves behind, and what comes when nobody expects it any more."""

import threading
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.engine.attach import Observer
from shardwise.engine.engine import Engine
from shardwise.engine.group import Form
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.unit import State
from shardwise.testing import run_on_ranks
from tests.common.ranks import on_ranks


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        return self.inner(self(x, times - 1) if times else x)


def build(block: type[nn.Module] = Recursive) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[block() for _ in range(5)])


def sharded(block: type[nn.Module], strategy: str = "zero3", **fields: int) -> tuple[nn.Module, nn.Module, Engine]:
    policy = sw.wrap_by_class(block)
    plan = sw.ParallelPlan(strategy=strategy, auto_wrap_policy=policy, merge_units=False, **fields)
    model = sw.parallelize(build(block), plan)
    return build(block), model, engine_of(model, "a test")


def step_alike(plain: nn.Module, model: nn.Module, x: Tensor) -> bool:
    """Whether one SGD step from here leaves both models with the same parameters."""
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.125)
        optimizer.zero_grad()
        each(x).sum().backward()
        optimizer.step()
    with sw.full_parameters(model):
        return all(torch.allclose(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


# -- a gather that raises


@on_ranks(2)
def test_after_a_gather_that_raised_a_unit_may_be_called_inside_itself() -> None:
    plain, model, engine = sharded(Recursive)
    x = torch.ones(2, 4)
    with mock.patch.object(Form, "gather", side_effect=RuntimeError("no gather")), pytest.raises(RuntimeError):
        model(x)
    open_calls = [member.num_frames for unit in engine.units for member in unit.members]
    assert (open_calls, torch.equal(model(x), plain(x)) and step_alike(plain, model, x)) == ([0] * 6, True)


class HalfFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(4, 4).requires_grad_(requires_grad=False), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.trained(self.frozen(x)).tanh()


class RaisesOnce(Observer):
    def __init__(self) -> None:
        self.num_gathers = 0

    def before_gather(self, engine: Engine, unit: object, group: object, *, is_kept: bool) -> None:
        self.num_gathers += 1
        if self.num_gathers == 4:
            raise RuntimeError("no second group")


@on_ranks(2)
def test_of_a_unit_of_which_half_was_gathered_nothing_is_under_way() -> None:
    plain, model, engine = sharded(HalfFrozen)
    observer, x = RaisesOnce(), torch.ones(2, 4)
    engine.extras.add(observer)
    with pytest.raises(RuntimeError, match="no second group"):
        model(x)
    left = sum(len(unit.handles) for unit in engine.units)
    states = {unit.state for unit in engine.units if unit.parent is not None}
    assert (states - {State.UNSHARDED}, left, torch.equal(model(x), plain(x)) and step_alike(plain, model, x)) == (
        {State.SHARDED},
        0,
        True,
    )


# -- a second thread


class Meanwhile(nn.Module):
    """Calls the model in a second thread from the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.other: list[nn.Module] = []
        self.refused: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        for other in self.other:
            thread = threading.Thread(target=self._call, args=(other, x))
            thread.start()
            thread.join()
        return self.inner(x)

    def _call(self, other: nn.Module, x: Tensor) -> None:
        try:
            other(x)
        except sw.StateError as error:
            self.refused.append(str(error))


def call_from_two_threads() -> tuple[list[str], list[int], bool]:
    plain, model, engine = sharded(Meanwhile)
    x = torch.ones(2, 4)
    model[1].other = [model[1], model]
    same = torch.equal(model(x), plain(x))
    refused = [text.partition(" from a second thread")[0] for text in model[1].refused]
    open_calls = [len(unit.calls.frames) for unit in engine.units]
    model[1].other = []
    return refused, open_calls, same and step_alike(plain, model, x)


def test_a_call_from_a_second_thread_is_refused_and_leaves_the_first_one_as_it_is() -> None:
    refused = ["unit '1' was called", "unit 'root' was called"]
    assert run_on_ranks(call_from_two_threads, 2) == [(refused, [0] * 6, True)] * 2


# -- a gradient that comes after its unit was reduced


class Keeps(nn.Module):
    """Keeps a value that is no output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.kept = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        self.kept = (self.inner[0].weight * 3).sum()
        return out


def keep_and_use(model: nn.Module) -> None:
    """Run the backward of what the last block has kept in the middle of the first block's."""

    def use_what_was_kept(gradient: Tensor) -> Tensor:
        model[4].kept.backward()  # the last block was reduced when backward entered the one before
        return gradient

    model[0].register_forward_hook(lambda _module, _args, output: output.register_hook(use_what_was_kept) and None)


@on_ranks(2)
def test_a_gradient_that_comes_after_its_unit_was_reduced_is_reduced_as_well() -> None:
    plain, model, _ = sharded(Keeps, "ddp", gradient_buffers=6)
    for each in (plain, model):
        keep_and_use(each)
    assert step_alike(plain, model, torch.ones(2, 4))


# -- a backward that raises while sums travel between the groups of a hybrid mesh


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: object, _grad: Tensor) -> Tensor:
        raise ValueError("no gradient today")


def fail_between_two_sums() -> tuple[list[tuple[str, str, str]], bool]:
    plain, model, engine = sharded(Recursive, "hsdp", dp_replicate=2)
    x = torch.ones(2, 4)
    hook = model[0].register_forward_hook(lambda _module, _args, output: Fails.apply(output))
    with sw.record_collectives(model) as events:
        with pytest.raises(ValueError, match="no gradient today"):
            model(x).sum().backward()
        is_pending = len(engine.reducing) > 0
        hook.remove()
        same = torch.equal(model(x), plain(x))
    model.zero_grad()
    trace = [(event.kind, event.axis, event.unit) for event in events]
    return trace, is_pending and same and step_alike(plain, model, x)


def test_ranks_that_fail_at_one_place_drop_their_sums_with_the_same_messages() -> None:
    results = run_on_ranks(fail_between_two_sums, 4)
    assert [works for _, works in results] == [True] * 4
    assert all(trace == results[0][0] for trace, _ in results)
