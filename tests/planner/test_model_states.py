"""A few units of a run stand for all of them."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.planner.model_states import Parameters, Rules, _footprint, _Run, merged_runs, states
from shardwise.spec.placement import PRESETS

ROWS = ["ddp", "zero1", "zero2", "shard_grad_op", "zero3"]


@settings(max_examples=100, deadline=None)
@given(
    row=st.sampled_from(ROWS),
    counts=st.lists(st.integers(1, 24), min_size=1, max_size=2),
    numels=st.lists(st.integers(1, 5000), min_size=2, max_size=2),
    experts=st.sampled_from([0, 640]),
    shard_size=st.sampled_from([1, 2, 4, 6]),
    ep=st.sampled_from([1, 2]),
    replicas=st.sampled_from([1, 2]),
    accumulation=st.sampled_from([None, "sharded", "unsharded"]),
    reshards=st.booleans(),
    in_backward=st.booleans(),
    buffers=st.integers(1, 4),
    device=st.sampled_from(["cpu", "cuda"]),
    reduce_dtype=st.sampled_from(["fp32", "bf16"]),
    limit=st.sampled_from([0, None]),
)
def test_a_few_units_give_the_footprint_of_all(  # noqa: PLR0917 - what hypothesis draws
    row, counts, numels, experts, shard_size, ep, replicas, accumulation, reshards, in_backward, buffers, device,
    reduce_dtype, limit,
):  # fmt: skip
    rules = Rules(
        placements=PRESETS[row],
        shard_size=shard_size,
        num_replicas=replicas,
        is_replicated=replicas > 1,
        ep=ep if shard_size % ep == 0 else 1,
        compute_dtype="bf16",
        reduce_dtype=reduce_dtype,
        reshards=reshards,
        in_backward=in_backward and accumulation is None,
        num_gradient_buffers=buffers,
        accumulation=accumulation,
        merge_limit=limit,
        device_type=device,
    )
    root = Parameters(1000)
    runs = tuple((count, Parameters(numel, experts)) for count, numel in zip(counts, numels, strict=False))
    merged = merged_runs(root, runs, rules)
    whole = _footprint((root, rules), [_Run(*run, rules) for run in merged], [count for count, _, _ in merged])
    assert dataclasses.asdict(states(root, runs, rules).footprint) == dataclasses.asdict(whole)


def test_merged_units_hold_every_block():
    rules = Rules(placements=PRESETS["zero3"], shard_size=2, device_type="cpu")
    runs = ((48, Parameters(50_000)), (3, Parameters(70_000)))
    merged = merged_runs(Parameters(10_000), runs, rules)
    assert sum(count * blocks for count, blocks, _ in merged) == 51
    assert sum(count * unit.numel for count, _, unit in merged) == 48 * 50_000 + 3 * 70_000
    assert any(blocks > 1 for _, blocks, _ in merged)
