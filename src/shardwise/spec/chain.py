"""Chains of modules: which small neighbours are merged into one unit, and where pipeline stages begin.

Both are computed from the model alone, the same on every rank.

An exchange takes a fixed time however few bytes it has: between two processes on one machine over Gloo at least 0.3 ms,
in which 1 MB could be sent. Over NCCL a collective of n ranks passes slices around in n - 1 steps of some microseconds
each. A model of many small blocks therefore waits for messages, not for bytes. Neighbouring blocks become one unit: one
flat buffer, one all-gather, one reduction. The price is memory, because a unit is gathered as a whole. So large units
are not merged, and a model keeps at least ``LEAST_UNITS`` units of equal size.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.spec.errors import PlanError

#: Most bytes of parameters in a merged unit: over Gloo such a message takes several times the fixed cost.
MERGED_BYTES = 1 << 21

#: On CUDA: most bytes for each rank, if that is more. At 50 GB/s such a slice takes 20 microseconds, a few times the
#: fixed cost of a step.
MERGED_SLICE_BYTES = 1 << 20

#: A merged unit holds at most the parameters of the model divided by this.
LEAST_UNITS = 8


@dataclass(frozen=True, slots=True)
class Mergeable:
    """A unit that may be merged with those beside it.

    Attributes:
        name: Qualified name.
        chain: The chain of modules that the unit is a member of; only members of one chain are merged, in their order.
            ``None``: never merged (it encloses other units, or a rank may skip it).
        kind: Dtypes and trainability of the unit's groups; only units of one kind are merged, so that each group of a
            merged unit has parameters of every member.
        num_bytes: Bytes of the unit's parameters.
    """

    name: str
    chain: str | None
    kind: object
    num_bytes: int


def default_limit(total_bytes: int, *, device_type: str = "cpu", num_ranks: int = 1) -> int:
    """The most bytes of a merged unit in a model with ``total_bytes`` of parameters.

    Args:
        total_bytes: Bytes of all parameters.
        device_type: Type of the device that computes.
        num_ranks: Ranks over which a unit is sharded.
    """
    worthwhile = MERGED_BYTES if device_type == "cpu" else max(MERGED_BYTES, MERGED_SLICE_BYTES * num_ranks)
    return min(worthwhile, total_bytes // LEAST_UNITS)


def merge(units: Sequence[Mergeable], limit: int) -> list[tuple[str, ...]]:
    """The names of the units to merge, each unit in exactly one tuple, in order.

    Runs of neighbours are cut into as few parts of at most ``limit`` bytes as they need, of about equal size: the
    largest decides how much memory gathered units take.
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
    held = 0
    for unit in run:
        if parts and held < target and held + unit.num_bytes <= limit:
            parts[-1].append(unit.name)
            held += unit.num_bytes
        else:
            parts.append([unit.name])
            held = unit.num_bytes
    return [tuple(part) for part in parts]


def merged_name(names: Sequence[str]) -> str:
    """The name of a merged unit: ``blocks.0-5`` for ``blocks.0`` to ``blocks.5``."""
    return names[0] if len(names) == 1 else f"{names[0]}-{names[-1].rpartition('.')[2]}"


#: For the elements from one on, in the stages that are left: (largest cost, sum of squares, start of the second stage).
_Best = tuple[int, int, int]


def balance(costs: Sequence[int], num_stages: int) -> list[int]:
    """The first layer of each stage, such that the most expensive stage costs as little as possible.

    Among divisions equal in that, one with the most even costs (by the sum of their squares) of those compared.
    Elements without cost stay with the element behind them where possible.

    Args:
        costs: Costs of the elements, in order.
        num_stages: Stages; each gets at least one element with a cost.

    Raises:
        PlanError: There are fewer elements with a cost than stages.
    """
    return list(_balance(tuple(costs), num_stages))


@functools.lru_cache(maxsize=32)
def _balance(costs: tuple[int, ...], num_stages: int) -> list[int]:
    """See :func:`balance`. A dry run divides the same model once for each stage."""
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
    starts, place = [0], 0
    for table in reversed(tables[1:]):
        entry = table[place]
        assert entry is not None
        place = entry[2]
        starts.append(place)
    return starts
