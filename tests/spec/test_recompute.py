"""What is recomputed, as plain data; and the memory of units that are recomputed together."""

from __future__ import annotations

import dataclasses

import pytest

from shardwise.spec.errors import PlanError
from shardwise.spec.layout import GroupLayout, ParamSpec
from shardwise.spec.memory.footprint import gathered_bytes
from shardwise.spec.placement import PRESETS
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.policies import (
    OPERATOR_FAMILIES,
    RecomputePolicy,
    WrapByName,
    recompute_policy,
    wrap_by_class,
    wrap_by_name,
)
from shardwise.spec.traffic.data import step_trace
from shardwise.spec.unit_facts import GroupFacts, UnitFacts


def test_words_wrap_policies_and_mappings_mean_policies() -> None:
    assert ParallelPlan().recompute is None
    assert recompute_policy("full") == RecomputePolicy()
    assert recompute_policy("selective") == RecomputePolicy(save=OPERATOR_FAMILIES)
    assert recompute_policy(wrap_by_class("Block")) == RecomputePolicy(modules=wrap_by_class("Block"))
    assert recompute_policy({"by_name": "layers.*"}).modules == WrapByName(("layers.*",))
    given = {"modules": {"by_name": ["a", "b"]}, "every": 2, "save": ["matmul"]}
    assert recompute_policy(given) == RecomputePolicy(wrap_by_name("a", "b"), 2, ("matmul",))
    assert recompute_policy({"save": "aten.gelu"}) == RecomputePolicy(save=("aten.gelu",))


def test_a_plan_keeps_the_policy_that_a_mapping_means_and_can_be_replaced() -> None:
    plan = ParallelPlan(activation_checkpointing={"every": 2})
    assert plan.activation_checkpointing == RecomputePolicy(every=2)
    assert dataclasses.replace(plan, strategy="ddp").recompute == plan.recompute
    assert dataclasses.replace(plan, activation_checkpointing="none").recompute is None
    assert str(RecomputePolicy(every=2, save="matmul")) == "units, one in 2, keeping what matmul give"


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("all", "activation_checkpointing='all' is not a policy"),
        (True, "activation_checkpointing=True is not a policy"),
        ({"every": 0}, r"every=0\): expected a whole number"),
        ({"every": True}, "every=True"),
        ({"every": 2, "keep": 1}, "no field keep"),
        ({"save": ["products"]}, "'products' is not an operator"),
        ({"modules": "auto"}, "modules='auto' names no modules"),
        ({"by_depth": 3}, "is not a wrap policy"),
    ],
)
def test_what_means_no_policy_is_refused(value: object, fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        ParallelPlan(activation_checkpointing=value)


def group(unit: int, place: str | None, *, numel: int = 640) -> GroupFacts:
    layout = GroupLayout.build([ParamSpec(f"p{unit}", (numel,))], 2)
    return GroupFacts(unit, layout, PRESETS["zero3"], 1, reshards=True, is_trainable=True, recomputed_in=place)


def test_units_that_are_recomputed_together_are_there_together_beside_the_one_that_backward_leaves() -> None:
    apart = [group(unit, None) for unit in range(1, 7)]
    pairs = [group(unit, f"pair{unit // 2}") for unit in range(2, 8)]
    threes = [group(unit, f"three{unit // 3}") for unit in range(3, 9)]
    assert gathered_bytes(apart) == 2 * 4 * 640
    assert gathered_bytes(pairs) == 3 * 4 * 640
    assert gathered_bytes(threes) == 4 * 4 * 640


def test_units_that_are_recomputed_together_are_gathered_in_the_order_of_forward() -> None:
    """Four units in one recomputed unit: the one ahead first, then the others from the front."""
    family = frozenset(range(5))
    units = {0: UnitFacts("stack", family, [])}
    for index in range(1, 5):
        units[index] = UnitFacts(f"u{index}", frozenset({0, index}), [group(index, "stack")], "stack")
    trace = step_trace(units, rank=0, forward_order=[0, 1, 2, 3, 4], backward_order=[0, 4, 3, 2, 1])
    gathers = [event.unit for event in trace if event.kind == "all_gather"]
    assert gathers == ["u1", "u2", "u3", "u4", "u1", "u2", "u3"]
