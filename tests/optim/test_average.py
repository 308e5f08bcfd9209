"""Averages of sharded weights: torch's own of one process, to the bit, on any layout."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardwise as sw
from shardwise.spec.errors import CheckpointError, StateError
from shardwise.testing import run_on_ranks
from tests.common import models
from tests.common.oracle import Chain, plain_loss, presets, sample
from tests.common.ranks import on_ranks

DECAY = 0.9


def train(model, optimizer, step):
    plain_loss(model, dist.get_rank(), step).backward()
    optimizer.step()
    optimizer.zero_grad()


def differing(expected, got):
    assert expected.keys() == got.keys()
    return [name for name, value in expected.items() if not torch.equal(value, got[name])]


class Averaged:
    """torch's average of one plain process, which takes the weights that the ranks have after each step."""

    def __init__(self, build, model) -> None:
        self.plain = build()
        state = sw.full_state_dict(model)
        self.average = None
        if state:
            self.plain.load_state_dict(state)
            self.average = AveragedModel(self.plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
            self.average.update_parameters(self.plain)  # the first takes the weights as they are

    def update(self, model) -> None:
        state = sw.full_state_dict(model)
        if self.average is not None:
            self.plain.load_state_dict(state)
            self.average.update_parameters(self.plain)

    def state(self):
        return self.average.module.state_dict() if self.average is not None else {}


def follow(build, strategy, **options):
    """What differs from torch's average, and from the weights of a run without one."""
    wrong = []
    model = sw.parallelize(build(), sw.ParallelPlan(strategy=strategy, **options))
    undisturbed = sw.parallelize(build(), sw.ParallelPlan(strategy=strategy, **options))
    optimizers = [torch.optim.AdamW(sw.flat_parameters(each), lr=1e-2) for each in (model, undisturbed)]
    average = sw.ExponentialMovingAverage(model, decay=DECAY)
    expected = Averaged(build, model)
    for step in range(4):
        for each, optimizer in zip((model, undisturbed), optimizers, strict=True):
            train(each, optimizer, step)
        average.update()
        expected.update(model)
        weights = sw.full_state_dict(model)
        with average.swapped_in(), torch.no_grad():
            wrong += differing(expected.state(), sw.full_state_dict(model))
            output = model(sample(0, step))
        is_cast = "mp_policy" in options  # computes in another dtype than the plain model
        if expected.average is not None and not is_cast and not torch.equal(output, expected.average(sample(0, step))):
            wrong.append("output")
        wrong += differing(weights, sw.full_state_dict(model))
    wrong += differing(sw.full_state_dict(undisturbed), sw.full_state_dict(model))
    assert average.num_updates == 4
    return wrong


@on_ranks(1, 2, 3)
def test_the_average_is_torchs_of_one_process_and_training_is_not_disturbed():
    """Lightning#21414."""
    found = {strategy: follow(Chain, strategy) for strategy in presets()}
    found["zero1 in bf16"] = follow(Chain, "zero1", mp_policy=sw.PrecisionPolicy(param_dtype="bf16"))
    assert {case: wrong for case, wrong in found.items() if wrong} == {}


@on_ranks(2)
def test_a_growing_decay_gives_the_mean_that_torch_takes_by_default():
    model = sw.parallelize(Chain(), sw.ParallelPlan(strategy="zero3"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = sw.ExponentialMovingAverage(model)
    plain = Chain()
    expected = AveragedModel(plain)
    for step in range(3):
        train(model, optimizer, step)
        average.decay = average.num_updates / (average.num_updates + 1)
        average.update()
        if state := sw.full_state_dict(model):
            plain.load_state_dict(state)
            expected.update_parameters(plain)
    with average.swapped_in():
        for name, mean in sw.full_state_dict(model).items():
            torch.testing.assert_close(mean, expected.module.state_dict()[name])


@on_ranks(2)
def test_sixteen_bit_weights_are_averaged_in_fp32_and_come_back_as_they_were():
    """bf16 weights, where an average in bf16 would never move."""
    model = sw.parallelize(Chain().bfloat16(), sw.ParallelPlan(strategy="zero3"))
    average = sw.ExponentialMovingAverage(model, decay=0.999)
    start = sw.full_state_dict(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    for _ in range(2000):
        average.update()
    moved = sw.full_state_dict(model)
    with average.swapped_in():
        found = sw.full_state_dict(model)
    for name, value in start.items():
        expected = value + (moved[name] - value) * (1 - 0.999**2000)
        torch.testing.assert_close(found[name].float(), expected.float(), rtol=0.02, atol=0.02)
    assert differing(moved, sw.full_state_dict(model)) == []


def odd_parts():
    """Frozen weights and buffers are the model's."""
    model = sw.parallelize(models.build("frozen"), sw.ParallelPlan(strategy="zero3"))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    average = sw.ExponentialMovingAverage(model, decay=0.0)
    before = sw.full_state_dict(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    weights = sw.full_state_dict(model)
    with average.swapped_in():
        found = sw.full_state_dict(model)
    average.decay = 0.5
    average.update()
    with average.swapped_in():
        half = sw.full_state_dict(model)
    if not before:
        return []
    wrong = [n for n, value in found.items() if not torch.equal(value, weights[n] if n in frozen else before[n])]
    return wrong + [n for n in found if n not in frozen and not torch.equal(half[n], before[n] * 1.5)]


def test_frozen_weights_are_the_models():
    assert run_on_ranks(odd_parts, 2)[0] == []


# -- checkpoints


def save(folder, strategy):
    model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))
    optimizer = torch.optim.AdamW(sw.flat_parameters(model), lr=1e-2)
    average = sw.ExponentialMovingAverage(model, decay=DECAY)
    for step in range(3):
        train(model, optimizer, step)
        average.update()
    sw.save(f"{folder}/with", model, optimizer, average=average)
    sw.save(f"{folder}/without", model, optimizer)
    weights = sw.full_state_dict(model)
    with average.swapped_in():
        return weights, sw.full_state_dict(model)


def load(folder, strategy):
    model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = sw.ExponentialMovingAverage(model, decay=0.5)
    with pytest.raises(CheckpointError, match="holds no averaged weights"):
        sw.load(f"{folder}/without", model, optimizer, average=average)
    sw.load(f"{folder}/with", model)  # the average may be left unread
    sw.load(f"{folder}/with", model, optimizer, average=average)
    assert (average.decay, average.num_updates) == (DECAY, 3)
    weights = sw.full_state_dict(model)
    with average.swapped_in():
        averages = sw.full_state_dict(model)
    train(model, optimizer, 3)
    average.update()
    return weights, averages


@pytest.mark.parametrize(
    ("source", "target"), [(("zero3", 3), ("ddp", 2)), (("ddp", 1), ("zero3", 2)), (("zero1", 2), ("zero2", 3))]
)
def test_an_average_loads_on_any_other_layout(source, target, tmp_path):
    expected = run_on_ranks(save, source[1], str(tmp_path), source[0])[0]
    got = run_on_ranks(load, target[1], str(tmp_path), target[0])[0]
    for one, other in zip(expected, got, strict=True):
        assert differing(one, other) == []
    assert differing(*expected) != []


# -- what is refused, what is restored


@on_ranks(1)
def test_misuse_is_refused_and_weights_come_back_after_an_exception():
    model = sw.parallelize(Chain(), sw.ParallelPlan(strategy="zero3"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    other = nn.Parameter(torch.ones(2))
    elsewhere = torch.optim.SGD([other], lr=0.1)
    average = sw.ExponentialMovingAverage(model)
    train(model, optimizer, 0)
    weights = sw.full_state_dict(model)
    with pytest.raises(RuntimeError, match="on purpose"), average.swapped_in():  # noqa: PT012
        with pytest.raises(StateError, match=r"update\(\) inside swapped_in\(\): the model holds the average"):
            average.update()
        with pytest.raises(StateError, match="the model holds the average"), average.swapped_in():
            pass
        plain_loss(model, 0, 1).backward()
        with pytest.raises(StateError, match=r"optimizer.step\(\) inside ExponentialMovingAverage.swapped_in"):
            optimizer.step()
        elsewhere.step()  # nobody else's optimizer minds
        optimizer.zero_grad()
        raise RuntimeError("on purpose")
    assert differing(weights, sw.full_state_dict(model)) == []
    train(model, optimizer, 1)
    with sw.full_parameters(model), pytest.raises(StateError, match="works on shards"):
        average.update()
    for decay in (1.0, -0.1, float("nan")):
        with pytest.raises(StateError, match="expected a number from 0 up to, but not, 1"):
            sw.ExponentialMovingAverage(model, decay=decay)
    with pytest.raises(StateError, match="is not parallelized"):
        sw.ExponentialMovingAverage(Chain())
    del model
    with pytest.raises(StateError, match="the model is gone"):
        average.update()


@on_ranks(1)
def test_it_follows_updates_made_in_backward():
    model = sw.parallelize(Chain(), sw.ParallelPlan(strategy="zero3"))
    optimizer = torch.optim.AdamW(sw.flat_parameters(model), lr=1e-2)
    sw.optimizer_in_backward(model, optimizer)
    average = sw.ExponentialMovingAverage(model, decay=DECAY)
    expected = Averaged(Chain, model)
    wrong = []
    for step in range(3):
        train(model, optimizer, step)
        average.update()
        expected.update(model)
        with average.swapped_in():
            wrong += differing(expected.state(), sw.full_state_dict(model))
    with average.swapped_in(), pytest.raises(StateError, match="it would change the average"):
        plain_loss(model, dist.get_rank(), 3).backward()
    assert wrong == []
