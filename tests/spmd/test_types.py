"""Every family of models under every degree that it takes: what the ranks hold has the types that it needs.

Types are inferred from operations, not from values: what passes here is right for all values, on any number of ranks on
each axis. One process is one rank of each pipeline stage of up to 1,024 ranks (``checked``).
"""

from __future__ import annotations

import pytest

import shardwise as sw
from shardwise.planner.legal import SUPPORT
from tests.spmd.checked import check
from tests.spmd.families import DEGREES, batch, build, degrees_of

#: Degrees that `make test` checks for every family.
ALWAYS = ("tp", "sequence")
CASES = [(family, name) for family in SUPPORT for name in DEGREES if degrees_of(family, name) is not None]


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", SUPPORT)
def test_a_family_on_a_large_world_makes_every_sum_once(family: str) -> None:
    check_case(family, "all")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, marks=() if name in ALWAYS else pytest.mark.long)
        for family, name in CASES
        if name != "all"
    ],
)
def test_a_family_under_each_degree_makes_every_sum_once(family: str, name: str) -> None:
    check_case(family, name)


def check_case(family: str, name: str) -> None:
    fields = degrees_of(family, name)
    assert fields is not None
    plan = sw.ParallelPlan(**fields)
    found = check(lambda: build(family, fields), plan, world_size=DEGREES[name][1], batch=batch(family))
    assert found.num_typed
    assert found.sums
    assert bool(found.num_crossings) == (plan.pp > 1)
