"""Models of others under every strategy: to the last bit what one plain process gives, dropout included.

``docs/models.md`` shows the same matrix, from runs on 1 to 4 ranks (``make models``).
"""

from __future__ import annotations

import warnings

import pytest

from shardwise.testing import run_on_ranks
from tests.parity.families import FAMILIES
from tests.ranks.oracle import PRESETS, compare


def train(name, strategies):
    """Wrapped automatically and by class, one strategy after the other."""
    warnings.simplefilter("ignore")  # what the libraries think of sizes that nobody would train
    family = FAMILIES[name]
    for policy in family.policies.values():
        for strategy in strategies:
            compare(family.build, family.loss, strategy, auto_wrap_policy=policy, **family.options)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_like_one_process_under_every_strategy(name):
    run_on_ranks(train, 2, name, PRESETS, timeout_s=150)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("world", [3, 4])
def test_a_family_trains_like_one_process_on_more_ranks(world, name):
    run_on_ranks(train, world, name, PRESETS, timeout_s=280)
