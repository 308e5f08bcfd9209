"""The bytes held on a mesh of two axes, and with units kept over an inner group, are those of the closed form."""

from __future__ import annotations

import pytest

import shardwise as sw
from shardwise.testing import run_on_ranks
from tests.common.oracle import PRESETS
from tests.engine.test_memory import build, measure_categories

pytestmark = pytest.mark.slow

HYBRID = ("hsdp", "hybrid_shard_grad_op")
LOW = sw.PrecisionPolicy(param_dtype="bf16", reduce_dtype="bf16")
GROUPS, INNER = {"dp_replicate": 2}, {"reshard_after_forward": 2}
DEFERRED = {"accumulation": "defer_replicate"}
#: Preset, microbatches per step, further fields of the plan.
QUICK = [
    ("hsdp", 1, GROUPS),
    ("hsdp", 2, {**GROUPS, **DEFERRED, "mp_policy": LOW}),
    ("zero2", 2, {**GROUPS, **DEFERRED}),
    ("zero3", 1, INNER),
]


def measure(cases):
    return [measure_categories(preset, count, **options) for preset, count, options in cases]


def check(world, cases):
    results = run_on_ranks(measure, world, cases, timeout_s=280)
    for rank, result in enumerate(results):
        for case, (measured, predicted) in zip(cases, result, strict=True):
            assert measured == predicted, f"rank {rank}: {case}"
    return results


def test_two_groups_of_two_and_inner_groups_of_two_hold_what_is_predicted():
    """hsdp on 2 x 2 holds halves of everything; zero3 on 4 ranks quarters, and over inner groups of 2 half gathered."""
    hybrid, _, _, kept = (measured for measured, _ in check(4, QUICK)[0])
    model = build()
    psi = sum(parameter.numel() for parameter in model.parameters())
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    root = psi - 6 * block
    for held, ranks in ((hybrid, 2), (kept, 4)):
        assert held["parameters"] == pytest.approx(4 * psi / ranks, rel=0.02)
        assert held["optimizer"] == pytest.approx(8 * psi / ranks, rel=0.02)
    assert hybrid["gathered"] == pytest.approx(4 * (2 * block + root), rel=0.02)
    assert kept["gathered"] == pytest.approx(4 * (2 * block + root + psi / 2), rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize(("world", "replicate"), [(1, 1), (2, 2), (2, 1), (3, 3), (4, 2), (6, 2), (6, 3)])
def test_every_mesh_holds_what_is_predicted(world, replicate):
    mesh = {"dp_replicate": replicate, "dp_shard": world // replicate}
    cases = [(preset, 1, mesh) for preset in (*HYBRID, *(PRESETS if replicate > 1 else ()))]
    cases += [("hsdp", 3, {**mesh, **DEFERRED}), ("hsdp", 2, {**mesh, **DEFERRED, "mp_policy": LOW})]
    cases += [("hsdp", 1, {**mesh, "mp_policy": LOW})]
    if world == 4:
        cases += [("zero3", 1, {**INNER, "mp_policy": LOW}), ("shard_grad_op", 1, INNER)]
    check(world, cases)
