"""Models of others under every strategy: to the last bit what one plain process gives, dropout included.

``bench/results/models.md`` shows the same matrix, from runs on 1 to 4 ranks (``make models``).
"""

from __future__ import annotations

import warnings

import pytest

from shardwise.testing import run_on_ranks
from tests.common.families import FAMILIES, PRELOAD_ALL
from tests.common.matrix import HYBRID
from tests.common.oracle import PRESETS, compare_each
from tests.common.ranks import on_ranks

pytestmark = PRELOAD_ALL


def train(name, strategies, **mesh):
    """Under each strategy the family is wrapped in the ways that are named with it."""
    warnings.simplefilter("ignore")  # what the libraries think of sizes that nobody would train
    family = FAMILIES[name]
    ways = dict(zip(("auto", "class"), family.wrappings.values(), strict=True))
    for way, options in ways.items():
        some = [strategy for strategy, wrapped in strategies.items() if way in wrapped]
        compare_each(family.build, family.loss, some, steps=3, **options, **mesh)


BY_CLASS, BOTH = ("class",), ("auto", "class")
IN_TURN = ("ddp", "zero2", "shard_grad_op")


@pytest.mark.parametrize(("place", "name"), list(enumerate(FAMILIES)))
def test_a_family_trains_like_one_process(place, name):
    """Kept whole and gathered anew, wrapped in both ways; under what lies between, every family under one of three."""
    turn = IN_TURN[place % len(IN_TURN)]
    run_on_ranks(train, 2, name, {"zero1": BOTH, "zero3": BOTH, turn: BY_CLASS}, timeout_s=150)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_family_trains_like_one_process_on_any_world_however_it_is_wrapped(world, name):
    run_on_ranks(train, world, name, dict.fromkeys(PRESETS, BOTH), timeout_s=280)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
@on_ranks(4, timeout_s=280)
def test_a_family_trains_like_one_process_on_two_groups_of_two(name):
    train(name, dict.fromkeys(HYBRID, BOTH), dp_replicate=2)
