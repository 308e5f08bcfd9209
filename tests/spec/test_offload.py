"""What is kept on the host: what a policy means, which units a ratio chooses, and the bytes of either side."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.errors import PlanError
from shardwise.spec.layout import GroupLayout, ParamSpec
from shardwise.spec.memory.footprint import footprint
from shardwise.spec.placement import PRESETS
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.policies import OffloadPolicy, check_offload, choose, offload_policy
from shardwise.spec.unit_facts import GroupFacts


def test_words_and_mappings_mean_policies() -> None:
    assert ParallelPlan().offload is None
    assert offload_policy("cpu") == OffloadPolicy()
    plan = ParallelPlan(offload_policy={"ratio": 0.5, "pin_memory": False})
    assert plan.offload_policy == plan.offload == OffloadPolicy(ratio=0.5, pin_memory=False)
    assert dataclasses.replace(plan, strategy="ddp").offload == plan.offload


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("gpu", "offload_policy='gpu': expected"),
        (None, "offload_policy=None: expected"),
        ({"fraction": 0.5}, "no field fraction"),
        ({"ratio": 0}, r"ratio=0\).*\n.*offload_policy='none'"),
        ({"ratio": 1.5}, r"ratio=1.5\)"),
        ({"ratio": True}, r"ratio=True\)"),
        ({"parameters": "yes"}, r"parameters='yes'\)"),
        ({"pin_memory": 1}, r"pin_memory=1\)"),
        ({"gradients": False}, "gradients=False, optimizer=True.*\n.*same value"),
        ({"parameters": False, "gradients": False, "optimizer": False}, "offloads nothing"),
    ],
)
def test_what_means_no_policy_or_cannot_work_is_refused(value: object, fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        ParallelPlan(offload_policy=value)


@pytest.mark.parametrize("preset", PRESETS)
def test_shards_can_be_offloaded_where_there_are_shards(preset: str) -> None:
    row = PRESETS[preset]
    check_offload(OffloadPolicy(), row)
    check_offload(OffloadPolicy(parameters=False), row)
    only_frozen = OffloadPolicy(gradients=False, optimizer=False)
    for policy in (OffloadPolicy(parameters=True), only_frozen):
        if row.shards_parameters:
            check_offload(policy, row)
            continue
        with pytest.raises(PlanError, match="zero3 or shard_grad_op"):
            check_offload(policy, row)


def test_what_a_policy_covers() -> None:
    sharded, replicated = PRESETS["zero3"], PRESETS["zero2"]
    everything, frozen = OffloadPolicy(), OffloadPolicy(gradients=False, optimizer=False)
    stays = OffloadPolicy(parameters=False)
    assert everything.covers(sharded, is_trainable=True)
    assert everything.covers(sharded, is_trainable=False)
    assert everything.covers(replicated, is_trainable=True)
    assert not everything.covers(replicated, is_trainable=False)
    assert not frozen.covers(sharded, is_trainable=True)
    assert frozen.covers(sharded, is_trainable=False)
    assert stays.covers(sharded, is_trainable=True)
    assert not stays.covers(sharded, is_trainable=False)
    assert stays.keeps_shard(sharded)
    assert not everything.keeps_shard(sharded)
    assert not stays.keeps_shard(replicated)


@given(st.lists(st.integers(0, 1000), max_size=40), st.floats(0.01, 1.0))
def test_a_ratio_chooses_units_whose_bytes_come_to_it(sizes: list[int], ratio: float) -> None:
    chosen = choose(sizes, ratio)
    offloaded = sum(size for size, is_chosen in zip(sizes, chosen, strict=True) if is_chosen)
    assert abs(offloaded - ratio * sum(sizes)) <= max(sizes, default=0) / 2 + 1e-6
    assert not any(is_chosen for size, is_chosen in zip(sizes, chosen, strict=True) if not size)
    if ratio == 1:
        assert offloaded == sum(sizes)


def test_a_ratio_spreads_its_choice_over_the_model() -> None:
    assert choose([8] * 8, 0.5) == [True, False] * 4
    assert choose([8] * 8, 0.25) == [False, True, False, False] * 2


PSI = 1 << 20


def bytes_of(preset: str, policy: OffloadPolicy | None, *, compute: str | None = None, world: int = 4):
    row = PRESETS[preset]
    layout = GroupLayout.build([ParamSpec("p", (PSI,))], world)
    group = GroupFacts(0, layout, row, 0, reshards=False, is_trainable=True, compute_dtype=compute)
    group = dataclasses.replace(
        group, is_offloaded=policy is not None, keeps_shard=policy is not None and policy.keeps_shard(row)
    )
    return footprint([group], rank=0)


def test_the_host_takes_master_gradient_and_state_and_the_device_what_the_row_needs() -> None:
    header = 256
    for preset, shares in (("zero3", 4), ("shard_grad_op", 4), ("zero2", 4), ("zero1", 4), ("ddp", 1)):
        plain, moved = bytes_of(preset, None), bytes_of(preset, OffloadPolicy())
        headers = header if shares == 4 else 4 * header
        assert moved.host == 16 * PSI // shares + headers + 4  # 4 each: master, gradient, two states; Adam's step
        assert moved.optimizer == 0
        # Sums that go to the host are received apart from where .grad lives.
        received = 4 * PSI // shares + header if PRESETS[preset].pools_gradients else 0
        assert (moved.gathered, moved.reduce) == (plain.gathered, plain.reduce + received)
        whole = 4 * PSI
        assert moved.parameters == (0 if preset in ("zero3", "shard_grad_op") else whole)
        full_gradients = {"ddp": whole + 4 * header, "zero1": whole + 4 * header}
        assert moved.gradients == full_gradients.get(preset, 0)
        assert moved.on_device == moved.total - moved.host


def test_with_casts_the_device_stages_masters_and_may_keep_its_shard() -> None:
    plain, moved = bytes_of("zero3", None, compute="bf16"), bytes_of("zero3", OffloadPolicy(), compute="bf16")
    assert moved.gathered == plain.gathered + 4 * PSI // 4  # the stage, of the largest shard
    stays = bytes_of("zero3", OffloadPolicy(parameters=False), compute="bf16")
    assert stays.parameters == 2 * PSI // 4
    assert stays.host == moved.host
