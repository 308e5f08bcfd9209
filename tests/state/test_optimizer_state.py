"""Optimizer state moves between presets and runs: counters, and parameters of one element or none."""

from __future__ import annotations

import pytest
import torch
from torch import distributed

import shardwise as sw
from shardwise.testing import run_on_ranks
from tests.common import models
from tests.common.oracle import descend

OPTIMIZERS = {
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
