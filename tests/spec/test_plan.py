"""The plan: fields of this version only, refusals that say what is missing, policies from mappings."""

from __future__ import annotations

import dataclasses
import re

import pytest

from shardwise.spec.errors import MeshError, PlacementError, PlanError
from shardwise.spec.mesh import Mesh
from shardwise.spec.plan import ParallelPlan, plan_fields
from shardwise.spec.policies import WrapByClass, WrapByName, WrapBySize


def test_the_name_of_a_dtype_is_a_policy_that_computes_in_it() -> None:
    assert ParallelPlan(mp_policy="bf16") == ParallelPlan(mp_policy={"param_dtype": "bf16"})
    with pytest.raises(PlanError, match="param_dtype='bf61'"):
        ParallelPlan(mp_policy="bf61")


def test_the_fields_are_those_that_this_version_honours() -> None:
    assert plan_fields() == (
        "strategy",
        "dp_replicate",
        "dp_shard",
        "cp",
        "tp",
        "pp",
        "ep",
        "expert_capacity",
        "tp_plan",
        "sequence_parallel",
        "auto_wrap_policy",
        "ignored",
        "row_sharded",
        "reshard_after_forward",
        "mp_policy",
        "quantize_frozen",
        "quantized_gather",
        "quantized_reduce",
        "granularity",
        "offload_policy",
        "activation_checkpointing",
        "offload_activations",
        "accumulation",
        "pipeline",
        "merge_units",
        "forward_prefetch",
        "backward_prefetch",
        "gradient_buffers",
        "sync",
        "sync_buffers",
        "compile",
    )


def test_what_is_left_alone_is_named_by_patterns_or_given_itself() -> None:
    assert ParallelPlan().ignored == ()
    assert ParallelPlan(ignored="blocks.*.experts").ignored == ("blocks.*.experts",)
    assert ParallelPlan(ignored=["a", "b.*"]).ignored == ("a", "b.*")
    for wrong in (None, 3, [""], ["a", 3], int):
        with pytest.raises(PlanError, match=r"expected names of modules or parameters, modules, or parameters"):
            ParallelPlan(ignored=wrong)


def test_defaults_take_the_whole_world() -> None:
    assert ParallelPlan().mesh(4).dp_shard == 4
    assert ParallelPlan(strategy="ddp").mesh(3).dp_shard == 3


def test_a_plan_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ParallelPlan().strategy = "ddp"  # type: ignore[misc]


@pytest.mark.parametrize("name", ["zero3", "FSDP", "Full_Shard", "ddp", "NO_SHARD", "zero1", "zero2", "SHARD_GRAD_OP"])
def test_presets_and_aliases_are_taken_in_any_case(name: str) -> None:
    assert ParallelPlan(strategy=name).placements == ParallelPlan(strategy=name.lower()).placements


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(PlacementError, match="zero3"):
        ParallelPlan(strategy="zero33")


@pytest.mark.parametrize("name", ["hsdp", "HYBRID_SHARD", "hybrid_shard_grad_op", "_HYBRID_SHARD_ZERO2"])
def test_hybrid_presets_shard_inside_a_machine_and_replicate_over_machines(name: str) -> None:
    plan = ParallelPlan(strategy=name)
    assert plan.is_replicated
    assert plan.mesh(8, 4) == Mesh(dp_replicate=2, dp_shard=4)
    assert plan.mesh(4, 4) == Mesh(dp_shard=4)
    assert plan.mesh(3, 1) == Mesh(dp_replicate=3)
    assert plan.mesh(1) == Mesh()


@pytest.mark.parametrize("local_size", [None, 3])
def test_a_hybrid_preset_that_does_not_know_the_machines_must_be_told(local_size: int | None) -> None:
    with pytest.raises(MeshError, match=r"how many of the 8 ranks share one is .*\n  Set dp_replicate \(groups\)"):
        ParallelPlan(strategy="hsdp").mesh(8, local_size)
    assert ParallelPlan(strategy="hsdp", dp_replicate=2).mesh(8, local_size) == Mesh(dp_replicate=2, dp_shard=4)
    assert ParallelPlan(strategy="hsdp", dp_shard=2).mesh(8, local_size) == Mesh(dp_replicate=4, dp_shard=2)
    assert ParallelPlan(strategy="hsdp", dp_shard=8).mesh(8, local_size) == Mesh(dp_shard=8)


def test_other_strategies_are_replicated_over_dp_replicate_groups() -> None:
    assert ParallelPlan(dp_replicate=2).mesh(6, 6) == Mesh(dp_replicate=2, dp_shard=3)
    assert ParallelPlan(strategy="ddp", dp_replicate=2).is_replicated
    assert not ParallelPlan(strategy="ddp").is_replicated
    with pytest.raises(MeshError, match="dp_shard=3 makes 3 ranks, but the world has 4"):
        ParallelPlan(strategy="hsdp", dp_shard=3).mesh(4)
    with pytest.raises(MeshError, match="axes dp_replicate=3 make groups of 3 ranks, which do not divide the world"):
        ParallelPlan(strategy="hsdp", dp_replicate=3).mesh(4)
    with pytest.raises(MeshError, match="take 8 ranks, more than the 4 of one"):
        ParallelPlan(strategy="hsdp", tp=8).mesh(16, 4)


@pytest.mark.parametrize(
    ("size", "world", "advice"),
    [(3, 4, "one of 2, True"), (4, 4, "one of 2, True"), (2, 2, "Use True"), (2, 1, "Use True"), (5, 12, "2, 3, 4, 6")],
)
def test_an_inner_size_cuts_dp_shard_into_smaller_groups(size: int, world: int, advice: str) -> None:
    with pytest.raises(PlanError, match=f"must divide dp_shard={world} and lie between 1 and it.*\n.*{advice}"):
        ParallelPlan(reshard_after_forward=size).mesh(world)
    assert ParallelPlan(strategy="hsdp", reshard_after_forward=2).mesh(8, 4).dp_shard == 4


@pytest.mark.parametrize(("value", "message"), [(1, "at least 2"), (-2, "at least 2"), (2.0, "number of ranks")])
def test_other_values_of_reshard_after_forward_are_refused(value: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ParallelPlan(reshard_after_forward=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(("strategy", "replicate"), [("zero3", 1), ("zero1", 2), ("ddp", 2)])
def test_sums_over_groups_are_deferred_only_where_there_are_such_sums_of_shards(strategy: str, replicate: int) -> None:
    with pytest.raises(PlanError, match="accumulation='defer_replicate' adds up sharded gradients"):
        ParallelPlan(strategy=strategy, dp_replicate=replicate, accumulation="defer_replicate").mesh(4)
    for good in (ParallelPlan(strategy="zero2", dp_replicate=2), ParallelPlan(strategy="hsdp", dp_shard=4)):
        assert dataclasses.replace(good, accumulation="defer_replicate").mesh(4)


@pytest.mark.parametrize("axis", ["dp_replicate", "cp", "tp", "pp", "ep"])
def test_degrees_are_positive(axis: str) -> None:
    with pytest.raises(PlanError, match="expected a positive integer"):
        ParallelPlan(**{axis: 0})


@pytest.mark.parametrize("size", [0, -2, 1.0, True])
def test_dp_shard_is_positive_or_minus_one(size: object) -> None:
    with pytest.raises(PlanError, match="dp_shard="):
        ParallelPlan(dp_shard=size)  # type: ignore[arg-type]


def test_a_degree_that_does_not_make_the_world_shows_the_arithmetic() -> None:
    with pytest.raises(MeshError, match="dp_shard=3 makes 3 ranks, but the world has 2"):
        ParallelPlan(dp_shard=3).mesh(2)


def test_wrap_policies_come_as_objects_or_mappings() -> None:
    assert ParallelPlan(auto_wrap_policy="none").auto_wrap_policy == "none"
    by_class = ParallelPlan(auto_wrap_policy={"by_class": ["Block"]}).auto_wrap_policy
    assert by_class == WrapByClass(("Block",))
    assert ParallelPlan(auto_wrap_policy={"by_size": 1000}).auto_wrap_policy == WrapBySize(1000)
    by_name = ParallelPlan(auto_wrap_policy={"by_name": "layers.*"}).auto_wrap_policy
    assert by_name == WrapByName(("layers.*",))
    assert ParallelPlan(auto_wrap_policy=by_class).auto_wrap_policy is by_class


@pytest.mark.parametrize(
    "policy", ["blocks", {}, {"by_size": 0}, {"by_size": True}, {"by_name": []}, {"by_class": [1]}, {"by_depth": 1}, 7]
)
def test_other_policies_are_refused_with_the_legal_forms(policy: object) -> None:
    with pytest.raises(PlanError, match="by_class: \\[names\\]"):
        ParallelPlan(auto_wrap_policy=policy)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [("reshard_after_forward", "yes"), ("accumulation", "deferred"), ("sync", "yes"), ("sync_buffers", "sum")],
)
def test_strangers_are_refused(field: str, value: object) -> None:
    with pytest.raises(PlanError, match=field):
        ParallelPlan(**{field: value})  # type: ignore[arg-type]


def test_styles_of_tensor_parallelism_are_checked_when_the_plan_is_made() -> None:
    table = {"layers.*.up": "packed_colwise:3", "layers.*": "divide:num_heads, width"}
    assert ParallelPlan(tp=2, tp_plan=table).tp_plan == table
    for wrong, message in (
        ({"up": "colwize"}, "'up' has the style 'colwize', which is not known"),
        ({"up": "colwise:2"}, "whose argument is not right"),
        ({"up": "packed_colwise:x"}, "Write for example 'packed_colwise:3'"),
        ({"up": "divide"}, "Write for example 'divide:num_heads'"),
        ({}, "expected a mapping from name patterns to styles"),
        (["up"], "expected a mapping from name patterns to styles"),
    ):
        with pytest.raises(PlanError, match=message):
            ParallelPlan(tp=2, tp_plan=wrong)
    with pytest.raises(PlanError, match="compile=True with tp=2"):
        ParallelPlan(tp=2, compile=True)


def test_sequence_parallelism_needs_ranks_to_divide_over() -> None:
    assert ParallelPlan(tp=2, sequence_parallel=True).sequence_parallel
    for wrong in ({"sequence_parallel": True}, {"tp": 2, "sequence_parallel": 1}):
        with pytest.raises(PlanError, match="expected True or False, and True divides positions over tp"):
            ParallelPlan(**wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_capacity": 0}, "expert_capacity=0: expected None or a positive factor"),
        ({"expert_capacity": True}, "expert_capacity=True: expected None or a positive factor"),
        ({"ep": 2, "compile": True}, "ep=2 does not go with compile=True"),
        ({"ep": 2, "strategy": "data_parallel"}, "ep=2 does not go with strategy 'data_parallel'"),
        ({"ep": 2, "reshard_after_forward": 2}, "ep=2 does not go with reshard_after_forward=2"),
        ({"ep": 2, "tp": 2, "sequence_parallel": True}, "ep=2 does not go with sequence_parallel=True"),
        ({"expert_capacity": 1.25, "compile": True}, "expert_capacity=1.25 does not go with compile=True"),
        ({"expert_capacity": 1.25, "cp": 2}, "expert_capacity=1.25 with cp=2: an expert would take other tokens"),
    ],
)
def test_what_does_not_go_with_experts_is_refused(options: dict, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        ParallelPlan(**options)
