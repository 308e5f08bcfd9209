"""The optimizer's step inside backward gives, to the last bit, what a step after backward gives in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import shardwise as sw
from shardwise.testing import run_on_ranks
from tests.common import models
from tests.common.oracle import PRESETS, presets
from tests.common.training import VARIANTS, train

#: Preset, flat parameters or not, further fields of the plan.
Case = tuple[str, bool, dict[str, Any]]


def train_in_backward(name: str, cases: Sequence[Case]) -> None:
    for place, (preset, is_flat, options) in enumerate(cases):
        train(name, preset, VARIANTS[0], is_debugging=place % 2 == 0, is_flat=is_flat, is_in_backward=True, **options)


def check(name: str, world: int, cases: Sequence[Case]) -> None:
    run_on_ranks(train_in_backward, world, name, cases, timeout_s=150)


SHORT = (("tied", 2), ("odd", 3))
#: Every strategy with a policy that keeps its optimizer on the host, whole or in part.
ON_HOST: Sequence[Case] = (
    ("ddp", True, {"offload_policy": "cpu"}),
    ("zero1", False, {"offload_policy": sw.OffloadPolicy(ratio=0.5)}),
    ("zero2", True, {"offload_policy": "cpu"}),
    ("shard_grad_op", False, {"offload_policy": sw.OffloadPolicy(parameters=False)}),
    ("zero3", True, {"offload_policy": "cpu"}),
    ("zero3", False, {"offload_policy": sw.OffloadPolicy(ratio=0.5)}),
)


@pytest.mark.parametrize(("name", "world"), SHORT)
def test_updates_in_backward_are_bitwise_equal_to_one_process(name, world):
    check(name, world, [*((preset, place % 2 == 0, {}) for place, preset in enumerate(presets())), *ON_HOST])


def test_updates_in_backward_are_bitwise_on_two_groups_of_two():
    cases = (("hsdp", {}), ("zero1", {}), ("hsdp", {"offload_policy": "cpu"}))
    check("odd", 4, [(preset, True, {"dp_replicate": 2, **options}) for preset, options in cases])


@pytest.mark.long
@pytest.mark.parametrize(("name", "world"), [(n, w) for n in models.NAMES for w in (1, 2, 3, 4) if (n, w) not in SHORT])
def test_updates_in_backward_are_bitwise_on_every_world(name, world):
    check(name, world, [*((preset, is_flat, {}) for preset in PRESETS for is_flat in (False, True)), *ON_HOST])
