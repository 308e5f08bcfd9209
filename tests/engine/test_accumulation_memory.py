"""What microbatches of a step make a rank hold besides, by how they are added up, is in the closed form."""

from __future__ import annotations

from unittest import mock

import pytest
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing import run_on_ranks
from tests.common.oracle import PRESETS
from tests.engine import test_memory as memory

pytestmark = pytest.mark.slow

LOW = sw.PrecisionPolicy(param_dtype="bf16", reduce_dtype="bf16")
GROUPS = {"dp_replicate": 2}
#: Preset, microbatches per step, accumulation (``plain``: repeated backwards that all synchronise), further fields.
QUICK = (
    ("zero3", 1, "unsharded", {}),
    ("zero3", 3, "unsharded", {}),
    ("zero2", 2, "unsharded", {}),
    ("ddp", 1, "sharded", {}),
    ("ddp", 2, "sharded", {}),
    ("zero1", 2, "plain", {}),
    ("zero1", 2, "sharded", {"mp_policy": LOW}),
    ("zero2", 2, "sharded", GROUPS),
    ("hsdp", 1, "defer_replicate", {**GROUPS, "mp_policy": LOW}),
)
WAYS = ("sharded", "unsharded", "plain")
EVERY = tuple(
    (preset, 2, way, options)
    for options in ({}, {"mp_policy": LOW}, {"gradient_buffers": 3}, GROUPS, {**GROUPS, "mp_policy": LOW})
    for preset in PRESETS
    for way in WAYS
) + tuple(
    ("hsdp", count, "defer_replicate", {**GROUPS, **more}) for count in (1, 2) for more in ({}, {"mp_policy": LOW})
)


def repeat(model: nn.Module, inputs: tuple[Tensor, ...], num_microbatches: int = 1) -> None:
    for _ in range(num_microbatches):
        model(*inputs).backward()


def measure(cases):
    found = []
    for preset, count, way, options in cases:
        plan = dict(options) if way == "plain" else {"accumulation": way, **options}
        backward = repeat if way == "plain" else memory.backward
        with mock.patch.object(memory, "backward", backward):
            found.append(memory.measure_categories(preset, count, **plan))
    return found


def check(world, cases):
    results = run_on_ranks(measure, world, cases, timeout_s=280)
    for rank, result in enumerate(results):
        for case, (measured, predicted) in zip(cases, result, strict=True):
            if "mp_policy" in case[3] and case[0] in {"ddp", "zero1", "zero2"}:
                # An onlooker takes the replica in 16 bit for a gathered unit, and the buffer of sums for a pooled one.
                assert sum(measured.values()) == sum(predicted.values()), f"rank {rank}: {case}"
            else:
                assert measured == predicted, f"rank {rank}: {case}"
    return [measured for measured, _ in results[0]]


def test_microbatches_take_what_the_closed_form_says():
    held = {case[:3]: measured["reduce"] for case, measured in zip(QUICK, check(2, QUICK), strict=True)}
    whole = 4 * sum(parameter.numel() for parameter in memory.build().parameters())
    assert held["zero3", 3, "unsharded"] > whole > held["zero3", 1, "unsharded"]  # all gradients wait in full size
    assert held["ddp", 2, "sharded"] > 2 * held["ddp", 1, "sharded"]


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_every_way_takes_what_the_closed_form_says(world):
    for preset in (*PRESETS, "hsdp"):
        check(world, tuple(case for case in EVERY if case[0] == preset))
