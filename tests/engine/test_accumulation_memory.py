"""What microbatches of a step make a rank hold besides, groups of ranks and inner groups: as the closed form says."""

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
    peak = {case[:3]: measured["reduce"] for case, measured in zip(QUICK, check(2, QUICK), strict=True)}
    whole = 4 * sum(parameter.numel() for parameter in memory.build().parameters())
    assert peak["zero3", 3, "unsharded"] > whole > peak["zero3", 1, "unsharded"]  # all gradients wait in full size
    assert peak["ddp", 2, "sharded"] > 2 * peak["ddp", 1, "sharded"]


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_every_way_takes_what_the_closed_form_says(world):
    for preset in (*PRESETS, "hsdp"):
        check(world, tuple(case for case in EVERY if case[0] == preset))


# -- on a mesh of two axes, and with units kept over an inner group

HYBRID, INNER = ("hsdp", "hybrid_shard_grad_op"), {"reshard_after_forward": 2}
ON_FOUR_RANKS = (
    ("hsdp", 1, "auto", GROUPS),
    ("hsdp", 2, "defer_replicate", {**GROUPS, "mp_policy": LOW}),
    ("zero2", 2, "defer_replicate", GROUPS),
    ("zero3", 1, "auto", INNER),
)


def test_two_groups_of_two_and_inner_groups_of_two_hold_what_is_predicted():
    """hsdp on 2 x 2 holds halves of everything; zero3 on 4 ranks quarters, and over inner groups of 2 half gathered."""
    hybrid, _, _, kept = check(4, ON_FOUR_RANKS)
    model = memory.build()
    psi = sum(parameter.numel() for parameter in model.parameters())
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    root = psi - 6 * block
    for categories, ranks in ((hybrid, 2), (kept, 4)):
        assert categories["parameters"] == pytest.approx(4 * psi / ranks, rel=0.02)
        assert categories["optimizer"] == pytest.approx(8 * psi / ranks, rel=0.02)
    assert hybrid["gathered"] == pytest.approx(4 * (2 * block + root), rel=0.02)
    assert kept["gathered"] == pytest.approx(4 * (2 * block + root + psi / 2), rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize(("world", "replicate"), [(1, 1), (2, 2), (2, 1), (3, 3), (4, 2), (6, 2), (6, 3)])
def test_every_mesh_holds_what_is_predicted(world, replicate):
    mesh = {"dp_replicate": replicate, "dp_shard": world // replicate}
    cases = [(preset, 1, "auto", mesh) for preset in (*HYBRID, *(PRESETS if replicate > 1 else ()))]
    cases += [("hsdp", 3, "defer_replicate", mesh), ("hsdp", 2, "defer_replicate", {**mesh, "mp_policy": LOW})]
    cases += [("hsdp", 1, "auto", {**mesh, "mp_policy": LOW})]
    if world == 4:
        cases += [("zero3", 1, "auto", {**INNER, "mp_policy": LOW}), ("shard_grad_op", 1, "auto", INNER)]
    check(world, cases)
