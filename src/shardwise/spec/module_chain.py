"""Chains of modules: which small neighbours are merged into one unit, and where pipeline stages begin.

Both are computed from the model alone, the same on every rank.

A message has a fixed cost: over Gloo between two processes on one machine at least 0.3 ms, in which 1 MB could be sent.
A collective of n ranks over NCCL has n - 1 steps of some microseconds each. A model of many small blocks is therefore
limited by the number of messages, not by bytes. Merging turns neighbouring blocks into one unit: one flat buffer, one
all-gather, one reduction. The price is memory, because a unit is gathered as one. So large units are not merged, and
no merged unit has more than 1/``LEAST_UNITS`` of the model.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.spec.errors import PlanError

#: Most bytes of parameters in a merged unit. Over Gloo a message of this size takes several times the fixed cost.
MERGED_BYTES = 1 << 21

#: On CUDA, most bytes of a rank's slice of a merged unit, if that allows more. At 50 GB/s such a slice takes
#: 20 microseconds, a few times the fixed cost of a step.
MERGED_SLICE_BYTES = 1 << 20

#: A merged unit has at most the model's bytes divided by this number.
LEAST_UNITS = 8


@dataclass(frozen=True, slots=True)
class Mergeable:
    """A unit that may be merged with its neighbours.

    Attributes:
        name: Qualified name.
        chain: The chain of modules to which the unit belongs; only neighbours in one chain are merged. ``None``: the
            unit is never merged, because it encloses other units or a rank may skip it.
        kind: Dtypes and trainability of the unit's groups. Only units of one kind are merged, so that each group of a
            merged unit has parameters of every member.
        num_bytes: Bytes of the unit's parameters.
    """

    name: str
    chain: str | None
    kind: object
    num_bytes: int


def default_limit(total_bytes: int, *, device_type: str = "cpu", num_ranks: int = 1) -> int:
    """The most bytes of a merged unit in a model with ``total_bytes`` of parameters, sharded over ``num_ranks``."""
    worthwhile = MERGED_BYTES if device_type == "cpu" else max(MERGED_BYTES, MERGED_SLICE_BYTES * num_ranks)
    return min(worthwhile, total_bytes // LEAST_UNITS)


def merge(units: Sequence[Mergeable], limit: int) -> list[tuple[str, ...]]:
    """The names of the units to merge, each unit in exactly one tuple, in order.

    Each run of neighbours is cut into the fewest parts of at most ``limit`` bytes. Parts have about equal size, because
    the largest one decides how much memory gathered units take.
    """
    merged: list[tuple[str, ...]] = []
    start = 0
    for index, unit in enumerate(units):
        following = units[index + 1] if index + 1 < len(units) else None
        is_end = following is None or unit.chain is None or (unit.chain, unit.kind) != (following.chain, following.kind)
        if is_end:
            merged += _cut(units[start : index + 1], limit)
            start = index + 1
    return merged


def _cut(run: Sequence[Mergeable], limit: int) -> list[tuple[str, ...]]:
    total = sum(unit.num_bytes for unit in run)
    target = -(-total // max(1, -(-total // limit))) if limit > 0 else 0
    parts: list[list[str]] = []
    part_bytes = 0
    for unit in run:
        if parts and part_bytes < target and part_bytes + unit.num_bytes <= limit:
            parts[-1].append(unit.name)
            part_bytes += unit.num_bytes
        else:
            parts.append([unit.name])
            part_bytes = unit.num_bytes
    return [tuple(part) for part in parts]


def merged_name(names: Sequence[str]) -> str:
    """The name of a merged unit: ``blocks.0-5`` for ``blocks.0`` to ``blocks.5``."""
    return names[0] if len(names) == 1 else f"{names[0]}-{names[-1].rpartition('.')[2]}"


#: Best division of the elements from one place to the end into some number of stages: (largest cost of a stage, sum of
#: squared costs, place where the second of these stages begins).
_Best = tuple[int, int, int]


def balance(costs: Sequence[int], num_stages: int) -> list[int]:
    """The first layer of each stage, such that the most expensive stage costs as little as possible.

    Ties are broken by the most even costs (least sum of squares) among the divisions compared. Each stage gets at least
    one element with a cost. An element without cost stays in one stage with the element that follows it where possible.

    Raises:
        PlanError: There are fewer elements with a cost than stages.
    """
    return list(_balance(tuple(costs), num_stages))


@functools.lru_cache(maxsize=32)
def _balance(costs: tuple[int, ...], num_stages: int) -> list[int]:
    """See :func:`balance`. Cached, because a dry run divides the same model once for each stage."""
    num_costly = sum(cost > 0 for cost in costs)
    if num_costly < num_stages:
        raise PlanError(
            f"a chain of {num_costly} elements that compute cannot be divided into {num_stages} pipeline stages.\n"
            "  Use fewer stages (pp, or virtual stages per rank)."
        )
    total = [0, *itertools.accumulate(costs)]
    count = len(costs)
    tails = [total[count] - total[i] for i in range(count)]
    tables: list[list[_Best | None]] = [[(cost, cost * cost, count) if cost else None for cost in tails]]
    for _ in range(num_stages - 1):
        after, best = tables[-1], []
        for i in range(count):
            found: _Best | None = None
            for j in range(i + 1, count):
                rest, cost = after[j], total[j] - total[i]
                if rest is None or not cost:
                    continue
                candidate = (max(cost, rest[0]), cost * cost + rest[1], j)
                if found is None or candidate[:2] < found[:2]:
                    found = candidate
            best.append(found)
        tables.append(best)
    starts, start = [0], 0
    for table in reversed(tables[1:]):
        entry = table[start]
        assert entry is not None
        start = entry[2]
        starts.append(start)
    return starts
