"""The bytes held on a mesh of two axes, and with units kept over an inner group, are those of the closed form."""

from __future__ import annotations

import pytest

import shardwise as sw
from shardwise.testing import run_on_ranks
from tests.contract.test_memory import build, measure_categories
from tests.parity.training import PRESETS

pytestmark = pytest.mark.slow

LOW = sw.PrecisionPolicy(param_dtype="bf16", reduce_dtype="bf16")
#: Preset, microbatches per step, further fields of the plan.
ON_2_X_2 = [
    ("hsdp", 1, {}),
    ("hsdp", 3, {"accumulation": "defer_replicate"}),
    ("hsdp", 1, {"mp_policy": LOW}),
    ("hsdp", 2, {"mp_policy": LOW, "accumulation": "defer_replicate"}),
    ("hybrid_shard_grad_op", 1, {}),
    ("zero2", 2, {"accumulation": "defer_replicate"}),
    ("zero1", 1, {}),
    ("ddp", 1, {}),
]
KEPT = [("zero3", 1, {}), ("zero3", 1, {"mp_policy": LOW}), ("shard_grad_op", 1, {})]


def measure(cases, common):
    return [measure_categories(preset, count, **options, **common) for preset, count, options in cases]


def check(world, cases, common):
    for rank, results in enumerate(run_on_ranks(measure, world, cases, common, timeout_s=250)):
        for case, (measured, predicted) in zip(cases, results, strict=True):
            assert measured == predicted, f"rank {rank}: {case}"


def test_two_groups_of_two_hold_what_is_predicted():
    check(4, ON_2_X_2, {"dp_replicate": 2})


def test_units_kept_over_two_of_four_ranks_hold_what_is_predicted():
    check(4, KEPT, {"reshard_after_forward": 2})


@pytest.mark.long
@pytest.mark.parametrize(("world", "replicate"), [(1, 1), (2, 2), (2, 1), (3, 3), (6, 2), (6, 3)])
def test_every_mesh_holds_what_is_predicted(world, replicate):
    cases = [(preset, 1, {}) for preset in PRESETS if replicate > 1] + ON_2_X_2[:5]
    check(world, cases, {"dp_replicate": replicate, "dp_shard": world // replicate})


def measure_one(preset, common):
    return measure_categories(preset, 1, **common)[0]


def test_groups_replicate_and_inner_groups_hold_a_share_of_their_size():
    """Of 4 ranks: hsdp on 2 x 2 holds halves, zero3 quarters, and over an inner group of 2 another half gathered."""
    psi = sum(parameter.numel() for parameter in build().parameters())
    hybrid = run_on_ranks(measure_one, 4, "hsdp", {"dp_replicate": 2})[0]
    kept = run_on_ranks(measure_one, 4, "zero3", {"reshard_after_forward": 2})[0]
    whole = run_on_ranks(measure_one, 4, "zero3", {})[0]
    assert hybrid["parameters"] == pytest.approx(4 * psi / 2, rel=0.02)
    assert hybrid["optimizer"] == pytest.approx(8 * psi / 2, rel=0.02)
    assert kept["parameters"] == pytest.approx(4 * psi / 4, rel=0.02)
    # The root is one of them: as a number the field is for every unit.
    assert kept["gathered"] - whole["gathered"] == pytest.approx(4 * psi / 2, rel=0.02)
