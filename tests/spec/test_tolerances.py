"""What is not held against one process."""

from __future__ import annotations

import pytest

from shardwise.spec.errors import PlanError
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.policies import PrecisionPolicy
from shardwise.spec.tolerances import Tolerance, check_exact, splits_sums, tolerance


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (ParallelPlan(mp_policy=PrecisionPolicy(param_dtype="bf16")), "here: mp_policy rounds numbers"),
        (ParallelPlan(quantized_reduce="int8"), "here: quantized_reduce rounds numbers"),
        (ParallelPlan(expert_capacity=1.25), "here: expert_capacity=1.25 drops tokens"),
    ],
)
def test_plans_that_would_differ_are_refused(plan: ParallelPlan, said: str) -> None:
    check_exact(ParallelPlan(tp=2, pp=2), "here")
    with pytest.raises(PlanError, match=said):
        check_exact(plan, "here")


def test_sums_in_another_order_may_differ_as_much_as_was_agreed_at_a_learning_rate_of_a_thousandth() -> None:
    assert tolerance("fp32", 1e-3) == Tolerance(1e-5, 5e-4)
    assert tolerance("fp64", 1e-3) == Tolerance(1e-9, pytest.approx(1e-8))
    assert tolerance("fp32", 2e-3).absolute == 1e-3
    with pytest.raises(PlanError, match="the model is in bf16"):
        tolerance("bf16", 1e-3)


def test_stages_and_replicas_split_no_sum() -> None:
    assert splits_sums(ParallelPlan(tp=2, pp=2))
    assert not splits_sums(ParallelPlan(pp=4, dp_replicate=2))
