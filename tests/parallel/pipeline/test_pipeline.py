"""Pipelines give, to the last bit, what one process gives that accumulates the same microbatches in order."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.spec.tolerances import Tolerance
from shardwise.testing import Comparison, compare_with_one_process, run_on_ranks, train_step
from tests.common import models
from tests.common.ranks import on_ranks
from tests.common.training import make_optimizer

NUM_MICROBATCHES = 4
MAX_NORM = 0.3


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    parts = [models.batch(step, microbatch, replica) for microbatch in range(NUM_MICROBATCHES)]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([targets for _, targets in parts])


def script(model: nn.Module, reader: int, step: int) -> Any:
    yield train_step(model, batch(step, reader), num_microbatches=NUM_MICROBATCHES)


def train(name: str, options: dict[str, Any], tolerance: Tolerance | None = None) -> Comparison:
    clips = options.pop("clips", True)
    plan = sw.ParallelPlan(**options)
    return compare_with_one_process(
        lambda: models.build(name) if tolerance is None else models.build(name).double(),
        script,
        lambda model: sw.parallelize(model, plan),
        steps=5,
        optimizer=make_optimizer,
        max_norm=MAX_NORM if clips else math.inf,
        tolerance=tolerance,
        where=f"{name}, {options}",
    )


def train_all(cases) -> list[int]:
    """The most microbatches that this rank holds at a time, for each case."""
    peaks = []
    for name, options in cases:
        result = train(name, dict(options))
        sw.eval_step(result.model, batch(0, result.probe.reader[0]), num_microbatches=2)
        peaks.append(result.probe.peak_microbatches)
    return peaks


def check(world: int, cases) -> list[list[int]]:
    return run_on_ranks(train_all, world, cases, timeout_s=120.0)


STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


def test_two_stages_and_two_replicas():
    cases = [("gpt", {"strategy": strategy, "pp": 2}) for strategy in STRATEGIES]
    cases += [("gpt", {"strategy": "zero3", "pp": 2, "pipeline": "gpipe", "clips": False}), ("frozen", {"pp": 2})]
    check(4, cases)


@pytest.mark.transports
def test_four_stages():
    cases = [("gpt", {"strategy": "zero3", "pp": 4}), ("gpt", {"pp": 4, "pipeline": "gpipe"})]
    cases += [("frozen", {"strategy": "ddp", "pp": 4})]
    ranks = check(4, cases)
    assert [results[0] for results in ranks] == [4, 3, 2, 1]  # 1F1B
    assert [results[1] for results in ranks] == [4, 4, 4, 4]  # GPipe


@pytest.mark.transports
def test_several_stages_of_a_rank():
    cases = [("gpt", {"strategy": s, "pp": 2, "pipeline": "interleaved-1f1b"}) for s in ("zero3", "zero1")]
    again = {"activation_checkpointing": "full"}
    cases += [("gpt", {"pp": 2, "pipeline": name, **again}) for name in ("interleaved-1f1b", "zb-v")]
    cases += [("gpt", {"pp": 2, "pipeline": "interleaved-1f1b", "activation_checkpointing": "selective"})]
    check(2, cases)


def test_backward_in_two_parts():
    cases = [("gpt", {"strategy": s, "pp": 2, "pipeline": "zb-h1"}) for s in ("zero3", "ddp")]
    cases += [("gpt", {"pp": 2, "pipeline": "zb-v"}), ("frozen", {"pp": 2, "pipeline": "zb-v"})]
    check(2, cases)


# -- parameters that several stages hold

TIED: tuple[dict[str, Any], ...] = (
    {"strategy": "zero3", "pp": 2},
    {"strategy": "zero1", "pp": 2, "pipeline": "zb-v"},
    {"strategy": "ddp", "pp": 4, "pipeline": "gpipe"},
)


@pytest.mark.transports
@on_ranks(4, timeout_s=120)
def test_tied_parameters_get_the_sum_of_their_copies():
    for options in TIED:
        train("tied", dict(options), Tolerance(relative=1e-9, absolute=1e-8))
