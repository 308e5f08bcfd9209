"""Optimizer state moves between presets and runs: counters, and parameters of one element or none."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import distributed

import shardwise as sw
from shardwise.testing import run_on_ranks
from tests.common import models
from tests.common.oracle import descend
from tests.common.ranks import refusal


class Counting(torch.optim.SGD):
    """Counts steps in its groups from the first one on, as apex and pytorch_optimizer do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["lr"] = 0.1 / group["step"]
        return super().step(closure)


class Wrapper(torch.optim.Optimizer):
    """Is no whole optimizer, as pytorch_optimizer's Lookahead."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.defaults, self.state = inner, inner.param_groups, {}, {}
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self._patch_step_function()

    def step(self, closure=None):
        return self.inner.step(closure)


OPTIMIZERS = {
    "counting": lambda parameters: Counting(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),  # a product of momenta beside the step
    "asgd": lambda parameters: torch.optim.ASGD(parameters, lr=1e-2),  # two more scalars
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),  # no scalar at all
}


def parallelize(preset):
    plan = sw.ParallelPlan(strategy=preset, auto_wrap_policy=models.wrap_policy("odd"))
    return sw.parallelize(models.build("odd"), plan)


def train(model, optimizer, first, last):
    descend(optimizer, (model(*models.batch(step, 0, distributed.get_rank())) for step in range(first, last)))


def continue_elsewhere(folder, source, target):
    """Train four steps with ``source``; and two, save, load into ``target``, and two more."""
    sw.declare_elementwise(Counting)
    different = {}
    for name, make in OPTIMIZERS.items():
        whole = parallelize(source)
        train(whole, make(whole.parameters()), 0, 4)
        expected = sw.full_state_dict(whole)

        model = parallelize(source)
        optimizer = make(model.parameters())
        train(model, optimizer, 0, 2)
        sw.save(f"{folder}/{name}", model, optimizer, state={})
        model = parallelize(target)
        optimizer = make(model.parameters())
        sw.load(f"{folder}/{name}", model, optimizer)
        train(model, optimizer, 2, 4)
        got = sw.full_state_dict(model)
        different[name] = [key for key, value in expected.items() if not torch.equal(value, got[key])]
    return different


@pytest.mark.parametrize(("source", "target"), [("ddp", "zero3"), ("zero3", "ddp"), ("ddp", "ddp"), ("zero1", "zero3")])
def test_state_saved_with_one_preset_continues_bit_for_bit_with_another(source, target, tmp_path):
    results = run_on_ranks(continue_elsewhere, 2, str(tmp_path), source, target)
    assert results[0] == {name: [] for name in OPTIMIZERS}


def plain(model, optimizer):
    return [p.detach().clone() for p in model.parameters()] + [group["lr"] for group in optimizer.param_groups]


def continue_with_a_scheduler(folder):
    """Three steps under OneCycleLR; two, save, load and one more; what a load says that comes before the scheduler."""

    def begin():
        model = parallelize("zero3")
        groups = [{"params": [p], "lr_scale": 0.5} for p in model.parameters()]  # as timm gives them
        return model, torch.optim.AdamW(groups, lr=1e-2)

    def schedule(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=8)

    def steps(model, optimizer, scheduler, first, last):
        for step in range(first, last):
            train(model, optimizer, step, step + 1)
            scheduler.step()

    model, optimizer = begin()
    scheduler = schedule(optimizer)
    steps(model, optimizer, scheduler, 0, 2)
    sw.save(f"{folder}/scheduled", model, optimizer, state={"scheduler": scheduler.state_dict()})
    steps(model, optimizer, scheduler, 2, 3)
    wanted = plain(model, optimizer)

    model, optimizer = begin()
    texts = []
    texts.append(refusal(sw.CheckpointError, sw.load, f"{folder}/scheduled", model, optimizer))
    scheduler = schedule(optimizer)  # as the message says
    scheduler.load_state_dict(sw.load(f"{folder}/scheduled", model, optimizer)["scheduler"])
    steps(model, optimizer, scheduler, 2, 3)
    is_same = all(map(lambda a, b: (a == b) if isinstance(a, float) else a.equal(b), wanted, plain(model, optimizer)))

    model = parallelize("zero3")
    without = torch.optim.AdamW([{"params": [p]} for p in model.parameters()], lr=3e-3)
    schedule(without)
    texts.append(refusal(sw.CheckpointError, sw.load, f"{folder}/scheduled", model, without))
    rates = [group["lr"] for group in without.param_groups]
    sw.load(f"{folder}/scheduled", model, without, keep_settings=True)  # as it says too
    is_kept = rates == [group["lr"] for group in without.param_groups] and "lr_scale" not in without.param_groups[0]
    used = [p for name, p in model.named_parameters() if p.shape.numel() and name != "never_used"]
    return texts, is_same, is_kept and all("exp_avg" in without.state[p] for p in used)


def test_settings_that_the_optimizer_does_not_have_yet_are_named_and_the_advice_continues_bit_for_bit(tmp_path):
    (early, other), is_same, is_kept = run_on_ranks(continue_with_a_scheduler, 2, str(tmp_path))[0]
    assert "settings that the optimizer does not have: groups.0." in early
    assert "groups.0.max_lr" in early
    assert "make the scheduler before sw.load" in early
    assert "groups.0.lr_scale" in other
    assert "max_lr," not in other.partition(". A scheduler")[0]
    assert not any("damaged" in text for text in (early, other))
    assert is_same
    assert is_kept


def save_wrapped(path):
    model = parallelize("zero3")
    optimizer = sw.declare_elementwise(Wrapper)(torch.optim.AdamW(model.parameters()))
    train(model, optimizer, 0, 1)
    text = refusal(sw.CheckpointError, sw.save, path, model, optimizer)
    sw.save(path, model, optimizer.inner)
    return text


def test_an_optimizer_around_another_one_steps_and_is_not_saved_without_it(tmp_path):
    text = run_on_ranks(save_wrapped, 2, str(tmp_path / "one"))[0]
    assert text.startswith("sw.save got a Wrapper around a AdamW, and each keeps state of its own: that of the AdamW")
    assert "Pass the AdamW to sw.save and sw.load (optimizer.inner)." in text
