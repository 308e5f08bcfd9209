"""Parameters that change between forwards by ways that no version counter shows."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import shardwise as sw
from shardwise.spec.errors import StateError
from shardwise.testing import probe, run_on_ranks
from tests.common.oracle import PRESETS, Block, Chain, compare_each, plain_loss, sample
from tests.common.ranks import on_ranks, refusal


def fused(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def shift_data(model, _step):
    for parameter in model.parameters():
        parameter.data.add_(0.125)


def shift_no_grad(model, _step):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.75)


def through_a_vector(model, _step):
    is_cut = any(hasattr(p, "to_local") for p in model.parameters())
    if is_cut:  # numel() is that of whole parameters
        vector = parameters_to_vector(model.parameters())
        assert "full_parameters" in refusal(StateError, vector_to_parameters, vector, model.parameters())
    with sw.full_parameters(model, writeback=True) if is_cut else contextlib.nullcontext():
        vector = parameters_to_vector(model.parameters())
        vector_to_parameters(vector * 0.5, model.parameters())


def replace_data(model, _step):
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


@on_ranks(2, 3)
def test_changes_of_shards_between_steps_are_seen_by_the_next_forward():
    compare_each(Chain, plain_loss, optimizer=fused)
    for change in (shift_data, shift_no_grad, through_a_vector, replace_data):
        compare_each(Chain, plain_loss, between=change, steps=3)


class Average:
    """An exponential average of the weights, kept beside the model, swapped in for evaluation and out again."""

    def __init__(self, model: nn.Module) -> None:
        self.averages = [p.detach().clone() for p in model.parameters()]

    def update(self, model: nn.Module) -> None:
        torch._foreach_lerp_(self.averages, [p.detach() for p in model.parameters()], 0.25)

    def swap(self, model: nn.Module) -> None:
        for average, parameter in zip(self.averages, model.parameters(), strict=True):
            values = parameter.detach().clone()
            parameter.data.copy_(average)
            average.copy_(values)


def evaluate_the_average(model, rank, step):
    average = model.__dict__.setdefault("average_of_test", Average(model))
    average.swap(model)
    with torch.no_grad():
        averaged = model(sample(rank, step))
    average.swap(model)
    loss = plain_loss(model, rank, step)
    loss.backward()
    yield averaged, loss


def update_average(model, _step):
    model.__dict__["average_of_test"].update(model)


@on_ranks(2, 3)
def test_an_average_of_the_shards_can_be_swapped_in_evaluated_and_swapped_out():
    compare_each(Chain, evaluate_the_average, between=update_average)


def change_between_forward_and_backward():
    messages = {}
    for strategy in PRESETS:
        model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plain_loss(model, 0, 0).backward()
        late = plain_loss(model, 0, 1)
        optimizer.step()
        messages[strategy] = refusal(StateError, late.backward)
        optimizer.zero_grad()
        plain_loss(model, 0, 2).backward()
    return messages


def test_a_backward_of_a_forward_before_the_step_is_refused_with_the_reason():
    for message in run_on_ranks(change_between_forward_and_backward, 2)[1].values():
        assert "that ran before the last optimizer.step()" in message
        assert message.endswith("Call backward() before optimizer.step().")


class Adversaries(nn.Module):
    """A generator and a discriminator in one model, each trained by an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.generator = nn.Sequential(nn.Linear(8, 8), Block(), Block(), nn.Linear(8, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 8), Block(), Block(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, part: str) -> torch.Tensor:
        return self.get_submodule(part)(x)


def by_part(model, part, x):
    return model.get_submodule(part)(x)


def by_root(model, part, x):
    return model(x, part)


def play(model, call, readers, given=nn.Module.parameters, steps=3):
    """The usual order: the generator's forward is used by both losses, with the discriminator's step between them."""
    losses = []
    parts = {part: model.get_submodule(part) for part in ("generator", "discriminator")}
    optimizers = {part: torch.optim.AdamW(given(module), lr=1e-2) for part, module in parts.items()}

    def step(part, losses_of_part):
        for loss in losses_of_part:
            loss.backward()
            losses.append(loss.detach())
        for parameter in parts[part].parameters():
            if parameter.grad is not None:
                parameter.grad /= len(readers)
        optimizers[part].step()
        model.zero_grad()

    for number in range(steps):
        fakes = {reader: call(model, "generator", sample(reader, number)) for reader in readers}
        real = {reader: sample(reader, number, salt=1) for reader in readers}
        step(
            "discriminator",
            (
                (call(model, "discriminator", fake.detach()) - call(model, "discriminator", real[reader])).mean()
                for reader, fake in fakes.items()
            ),
        )
        step("generator", (call(model, "discriminator", fake).square().mean() for fake in fakes.values()))
    return losses


@on_ranks(2)
def test_a_step_of_one_part_of_the_model_lets_the_backward_of_another_one_pass():
    rank = dist.get_rank()
    plain = Adversaries()
    expected = play(plain, by_part, [0, 1])[rank::2]
    in_units = {"auto_wrap_policy": sw.wrap_by_class(Block), "merge_units": False}
    cases = [(by_part, {"strategy": strategy}) for strategy in PRESETS]  # everything is in the root's unit
    cases += [(by_part, {"strategy": strategy} | in_units) for strategy in ("zero3", "zero1")]
    cases += [(by_root, {"auto_wrap_policy": sw.wrap_by_name("generator", "discriminator")})]
    for call, options in cases:
        model = sw.parallelize(Adversaries(), sw.ParallelPlan(**options))
        losses = play(model, call, [rank])
        assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True)), options
        for name, value in sw.full_state_dict(model).items():
            assert torch.equal(value, plain.state_dict()[name]), (options, name)
    model = sw.parallelize(Adversaries(), sw.ParallelPlan(auto_wrap_policy="none"))
    message = refusal(StateError, play, model, by_root, [rank])
    assert "unit 'root' that ran before the last optimizer.step()" in message
    assert message.endswith("units of their own (auto_wrap_policy=sw.wrap_by_name(...)).")


@on_ranks(2)
def test_data_of_another_dtype_or_shape_is_refused_with_the_name():
    found = []
    for change in (lambda p: p.data.double(), lambda p: torch.zeros(3, 3, 3)):
        model = sw.parallelize(Chain())
        model.blocks[1].up.weight.data = change(model.blocks[1].up.weight)
        found.append(refusal(StateError, model, sample(0, 0)))
    for message in found:
        assert message.startswith("parameter 'blocks.1.up.weight' (logical shape [13, 8]) was moved out of its shard")
        assert "sw.load_full_state_dict()" in message


@on_ranks(2)
def test_a_forward_in_a_second_thread_during_a_forward_is_refused():
    import threading

    model = sw.parallelize(Chain())
    caught: list[BaseException] = []

    def call() -> None:
        try:
            model(sample(0, 0))
        except BaseException as error:  # noqa: BLE001 - it is looked at below
            caught.append(error)

    def start_second(*_args):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    handle = model.blocks[2].register_forward_pre_hook(start_second)
    plain_loss(model, 0, 0).backward()
    handle.remove()
    for step in range(2):
        plain_loss(model, 0, step).backward()
    # A forward that is alone may run in any thread.
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert probe(model).num_open_forwards == 0
    (message,) = [f"{type(error).__name__}: {error}" for error in caught]
    assert message.startswith("StateError: unit 'root' was called from a second thread")
    assert message.endswith("Call the model from one thread at a time.")
