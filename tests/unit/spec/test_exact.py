"""What is not held against one process."""

from __future__ import annotations

import pytest

from shardwise.spec.errors import PlanError
from shardwise.spec.exact import check_exact
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.precision import PrecisionPolicy


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (ParallelPlan(pp=2), "here: pp=2 trains in microbatches through stages"),
        (ParallelPlan(mp_policy=PrecisionPolicy(param_dtype="bf16")), "here: mp_policy rounds numbers"),
        (ParallelPlan(quantized_reduce="int8"), "here: quantized_reduce rounds numbers"),
    ],
)
def test_plans_that_would_differ_are_refused(plan: ParallelPlan, said: str) -> None:
    check_exact(ParallelPlan(tp=2), "here")
    with pytest.raises(PlanError, match=said):
        check_exact(plan, "here")
