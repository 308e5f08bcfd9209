"""``ParallelPlan.offload_activations``: what may be written, and what is refused."""

from __future__ import annotations

import re

import pytest

from shardwise.spec.errors import PlanError
from shardwise.spec.plan import ParallelPlan, check_plan
from shardwise.spec.policies import ActivationOffloadPolicy, wrap_by_class, wrap_by_name


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (False, None),
        (True, ActivationOffloadPolicy()),
        (wrap_by_class("Block"), ActivationOffloadPolicy(modules=wrap_by_class("Block"))),
        ({"by_name": ["a", "b"]}, ActivationOffloadPolicy(modules=wrap_by_name("a", "b"))),
        ({"every": 2, "pin_memory": False}, ActivationOffloadPolicy(every=2, pin_memory=False)),
        ({"modules": {"by_class": "Block"}}, ActivationOffloadPolicy(modules=wrap_by_class("Block"))),
    ],
)
def test_a_value_as_a_file_or_a_program_writes_it_is_a_policy(given: object, meant: object) -> None:
    assert ParallelPlan(offload_activations=given).activation_offload == meant


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("cpu", "offload_activations='cpu' is not a policy"),
        (1, "offload_activations=1 is not a policy"),
        ({"ever": 2}, "offload_activations={'ever': 2} is not a wrap policy"),
        ({"every": 0}, "ActivationOffloadPolicy(every=0)"),
        ({"least_bytes": True}, "ActivationOffloadPolicy(least_bytes=True)"),
        ({"pin_memory": 1}, "ActivationOffloadPolicy(pin_memory=1)"),
        ({"modules": "auto"}, "offload_activations: modules='auto' names no modules"),
    ],
)
def test_other_values_are_refused(value: object, words: str) -> None:
    with pytest.raises(PlanError, match=re.escape(words)):
        ParallelPlan(offload_activations=value)


def test_what_cannot_be_combined_is_refused() -> None:
    with pytest.raises(PlanError, match="outputs of operators: those would stay on the device"):
        ParallelPlan(offload_activations=True, activation_checkpointing="selective")
    with pytest.raises(PlanError, match="offload_activations and compile do not act on them"):
        check_plan(ParallelPlan(strategy="data_parallel", offload_activations=True))
    assert ParallelPlan(offload_activations=True, activation_checkpointing="full").activation_offload is not None
