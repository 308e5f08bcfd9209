"""The whole matrix of families, ways to wrap them, strategies and worlds, run as data for a table."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import dataclass

from torch import distributed

from shardwise.testing import RankFailure, run_on_ranks
from tests.common.families import FAMILIES
from tests.common.oracle import PRESETS, compare_each

WORLDS = (1, 2, 3, 4)
#: On four ranks also as two groups of two.
HYBRID = ("hsdp", "hybrid_shard_grad_op")
STEPS = 4


def strategies(world: int) -> tuple[str, ...]:
    """What is run on so many ranks."""
    return (*PRESETS, *HYBRID) if world == 4 else PRESETS


def fingerprint() -> str:
    """Changes with everything that the matrix is made of."""
    rows = [
        [name, family.package, family.version, family.model, family.classes, dict(family.options), family.sizes]
        for name, family in FAMILIES.items()
    ]
    held = json.dumps([rows, WORLDS, strategies(4), STEPS], sort_keys=True, default=str)
    return hashlib.sha256(held.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Cell:
    """One family, wrapped in one way, on one world.

    Attributes:
        num_parameters: Of the model.
        found: Classes of the modules that became units, and how many of each.
        num_units: Units made of them; fewer than modules where small ones travel together.
        failures: By strategy, what was not equal to one process, or did not run.
    """

    num_parameters: int
    found: dict[str, int]
    num_units: int
    failures: dict[str, str]


def run(name: str, way: str, world: int) -> Cell:
    """Run every strategy; the first error ends a run, so what is left is then run one by one."""
    names = strategies(world)
    try:
        return Cell(*run_on_ranks(train, world, name, way, names, timeout_s=60.0 * len(names))[0], failures={})
    except RankFailure:
        failures: dict[str, str] = {}
        looks = (0, {}, 0)
        for strategy in names:
            try:
                looks = run_on_ranks(train, world, name, way, (strategy,), timeout_s=90.0)[0]
            except RankFailure as failure:
                failures[strategy] = failure.causes[failure.rank].splitlines()[0]
        return Cell(*looks, failures=failures)


def train(name: str, way: str, names: tuple[str, ...]) -> tuple[int, dict[str, int], int]:
    """On a rank: train under each strategy beside one plain process; returns what was found of the model."""
    warnings.simplefilter("ignore")
    family = FAMILIES[name]
    num_units = 0
    num_parameters, classes = 0, {}
    plain = [name for name in names if name not in HYBRID]
    found = compare_each(family.build, family.loss, plain, steps=STEPS, **family.wrappings[way])
    hybrid = [name for name in names if name in HYBRID]
    found |= compare_each(family.build, family.loss, hybrid, steps=STEPS, dp_replicate=2, **family.wrappings[way])
    for trained in found.values():
        units = trained.probe.units
        num_parameters = sum(parameter.numel() for parameter in trained.plain.parameters())
        kinds = [kind for unit in units[1:] for kind in unit.module_types]
        classes, num_units = {kind: kinds.count(kind) for kind in kinds}, len(units)
    distributed.barrier()
    return num_parameters, classes, num_units
