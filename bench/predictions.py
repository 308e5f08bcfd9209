"""Predictions beside published measurements: errors by source, ranking, regret, and two baselines.

``FITTED`` names the sources whose rows ``bench.fit`` has seen; every other source is held out: none of its rows has
touched a constant. ``LEFT_OUT`` has a prediction of every usable row by constants fitted without its source
(``python -m bench.fit --loso``): these are the errors by regime.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.published import PublishedRow, published_rows
from shardwise.planner.explain import regime
from shardwise.planner.time import estimate_time, model_flops
from shardwise.spec.plan import ParallelPlan

LEFT_OUT = Path(__file__).parent / "data" / "left_out.csv"

#: Sources on which constants were fitted.
FITTED = frozenset({"mosaic", "vtrain", "bloom", "nemo-24.07", "megatron-bridge", "fms-fsdp", "shardwise"})

#: Rows that say nothing about a model of time, and why (planner.md, *Known traps*).
EXCLUDED = {
    "fsdp-blog": "the run of 1T is bound by torch's allocator and by offload",
    "bigscience-gpt2": "the authors state 40% between repetitions",
    "zero-offload": "sizes are not given",
    "nanotron-16": "one log has the same step at 2.13 and 8.65 s: a network of 25 to 50 Gbit/s a node",
}


@dataclass(frozen=True, slots=True)
class Compared:
    """One row: seconds of a step, predicted and measured."""

    row: PublishedRow
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Of the prediction, over the measurement; more than 0 is too slow."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class Errors:
    """Absolute errors of some rows."""

    count: int
    median: float
    mean: float
    p80: float
    p90: float
    worst: float

    @classmethod
    def of(cls, errors: Iterable[float]) -> Errors:
        """Of these."""
        found = sorted(abs(error) for error in errors)
        return cls(
            len(found),
            statistics.median(found),
            statistics.fmean(found),
            found[min(int(0.8 * len(found)), len(found) - 1)],
            found[min(int(0.9 * len(found)), len(found) - 1)],
            found[-1],
        )


def resolved(row: PublishedRow) -> ParallelPlan:
    """The row's plan with every degree filled in."""
    mesh = row.plan.mesh(row.cluster.num_gpus, min(row.cluster.gpus_per_node, row.cluster.num_gpus))
    return dataclasses.replace(row.plan, dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard)


def compare_times(*, core_only: bool = True) -> list[Compared]:
    """Every row with a time; ``core_only``: those whose configuration is known entirely."""
    return [
        Compared(
            row,
            estimate_time(row.shape, resolved(row), row.cluster, row.workload, row.software).step_time_s,
            row.step_time_s,
        )
        for row in published_rows()
        if row.step_time_s is not None and (row.is_core or not core_only) and "parallel block" not in row.notes
    ]


def left_out() -> list[Compared]:
    """Every usable row with its prediction by constants that were fitted without its source."""
    rows = published_rows()
    with LEFT_OUT.open(encoding="utf-8", newline="") as file:
        return [
            Compared(rows[int(each["row"])], float(each["predicted_s"]), float(each["measured_s"]))
            for each in csv.DictReader(file)
        ]


def by_regime(compared: Sequence[Compared]) -> dict[str, list[Compared]]:
    """Rows by the regime whose band a plan of theirs would be printed with."""
    found: dict[str, list[Compared]] = {}
    for each in compared:
        row = each.row
        found.setdefault(regime(row.shape, row.plan, row.cluster, row.workload), []).append(each)
    return found


def by_source(compared: Sequence[Compared]) -> dict[str, list[Compared]]:
    """Rows by source, in the table's order."""
    found: dict[str, list[Compared]] = {}
    for each in compared:
        found.setdefault(each.row.source, []).append(each)
    return found


def held_out(compared: Sequence[Compared]) -> list[Compared]:
    """Those rows that no constant has seen and that say something about time."""
    return [each for each in compared if each.row.source not in FITTED and each.row.source not in EXCLUDED]


def constant_rate(compared: Sequence[Compared]) -> list[float]:
    """Errors of the baseline of one constant rate for each GPU and precision, fitted on these very rows."""
    kinds: dict[tuple[str, str], list[Compared]] = {}
    for each in compared:
        kinds.setdefault((each.row.cluster.gpu, each.row.workload.precision), []).append(each)
    errors = []
    for rows in kinds.values():
        seconds = [(each, model_flops(each.row.shape, each.row.workload) / each.row.cluster.num_gpus) for each in rows]
        rate = math.exp(statistics.median(math.log(flops / each.measured) for each, flops in seconds))
        errors += [flops / rate / each.measured - 1 for each, flops in seconds]
    return errors


def _ratio(pair: tuple[Compared, Compared]) -> float:
    return math.log(pair[0].measured / pair[1].measured)


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one source, model, cluster and batch, which a planner could have chosen from."""

    name: str
    rows: tuple[Compared, ...]

    @property
    def tau(self) -> float:
        """Kendall's tau between predicted and measured order."""
        score = pairs = 0
        for one, other in itertools.combinations(self.rows, 2):
            if one.measured == other.measured:
                continue
            pairs += 1
            agree = (one.predicted - other.predicted) * (one.measured - other.measured)
            score += (agree > 0) - (agree < 0)
        return score / pairs if pairs else 1.0

    @property
    def pairs(self) -> tuple[int, int]:
        """Pairs whose times differ by more than 10%, and those of them that are predicted in the right order."""
        far = [pair for pair in itertools.combinations(self.rows, 2) if abs(_ratio(pair)) > math.log(1.1)]
        return len(far), sum((a.predicted - b.predicted) * (a.measured - b.measured) > 0 for a, b in far)

    @property
    def regret(self) -> float:
        """How much slower the row that is predicted fastest was than the one that was fastest."""
        chosen = min(self.rows, key=lambda each: each.predicted)
        return chosen.measured / min(each.measured for each in self.rows) - 1


def choices(compared: Sequence[Compared]) -> list[Group]:
    """Groups of rows that differ in plan, microbatch or recomputation alone, and that are not left out."""
    found: dict[tuple[object, ...], list[Compared]] = {}
    for each in compared:
        row = each.row
        if row.source in EXCLUDED:
            continue
        key = (
            row.source,
            row.shape.num_parameters,
            row.cluster,
            row.workload.seq_len,
            row.workload.global_batch,
            row.workload.precision,
        )
        found.setdefault(key, []).append(each)
    return [
        Group(f"{key[0]} {rows[0].row.shape.num_parameters / 1e9:.1f}B on {rows[0].row.cluster.num_gpus}", tuple(rows))
        for key, rows in found.items()
        if len({(each.row.plan, each.row.workload) for each in rows}) > 1
    ]


def summary(compared: Sequence[Compared]) -> Mapping[str, Errors]:
    """Errors by source, then of all that were fitted and of all that were held out."""
    found = {source: Errors.of(each.error for each in rows) for source, rows in by_source(compared).items()}
    fitted = [each.error for each in compared if each.row.source in FITTED]
    unseen = [each.error for each in held_out(compared)]
    return {**found, "all fitted": Errors.of(fitted), "all held out": Errors.of(unseen)}
