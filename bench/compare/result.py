"""From what the ranks measured to rows. Arithmetic only.

A step has taken as long as on the rank where it took longest. A turn counts by its median or minimum step (the case
says which), engines are compared turn by turn, and what is quoted is the median over the rounds: a machine that gets
slower between rounds moves times, not ratios.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.compare.request import OURS, SINGLE, Entrant, Request

#: What one rank found out about one entrant: the answers of ``compare.process``.
Found = Mapping[str, Any]

_STATISTICS = {"median": median, "min": min}
#: Final losses of different engines are to agree to this, absolutely.
LOSS_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the engines computed the same.

    Attributes:
        is_bitwise: Every loss of every rank is the same under each of our strategies that adds gradients in the same
            groups of ranks, and, over the steps that it made, in one plain process that adds them likewise.
        group_sizes: Ranks of such a group, under each of our strategies.
        differences: By peer, and of ``data_parallel``, how far the last common loss (mean over ranks) is from that of
            our first strategy.
    """

    is_bitwise: bool
    group_sizes: Sequence[int]
    differences: Mapping[str, float]

    @property
    def is_equal(self) -> bool:
        """Ours bitwise, the peers within the tolerance."""
        return self.is_bitwise and all(gap <= LOSS_TOLERANCE for gap in self.differences.values())


@dataclass(frozen=True, slots=True)
class Result:
    """A case, measured."""

    request: Request
    machine: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    verdict: Verdict

    def as_dict(self) -> dict[str, Any]:
        """What ``compare --json`` writes."""
        return {
            "machine": dict(self.machine),
            "case": self.request.case.name,
            "rows": [dict(row) for row in self.rows],
            "model": self.request.case.as_dict(),
            "rounds": self.request.rounds,
            "losses": {"ours_bitwise": self.verdict.is_bitwise, "differences": dict(self.verdict.differences)},
        }


def make_result(request: Request, machine: Mapping[str, Any], found: Sequence[Mapping[int, Found]]) -> Result:
    """Rows and verdict.

    Args:
        request: What was asked.
        machine: Facts.
        found: By rank, then by number of the entrant.
    """
    by_entrant = [
        [found[rank][index] for rank in range(request.size_of(entrant))]
        for index, entrant in enumerate(request.entrants)
    ]
    statistic = _STATISTICS[request.case.statistic]
    rounds = [merge_rounds([part["rounds"] for part in parts]) for parts in by_entrant]
    marks = [[statistic(steps) for steps in turns] for turns in rounds]
    sizes = [parts[0]["check"]["group_size"] for parts in by_entrant if "group_size" in parts[0]["check"]]
    alone = next((_alone(parts) for parts in by_entrant if "losses" in parts[0]["check"]), {})
    losses = [rank_losses(entrant, parts, sizes) for entrant, parts in zip(request.entrants, by_entrant, strict=True)]
    rows = []
    for index, parts in enumerate(by_entrant):
        row = _row(request.entrants[index], parts, rounds[index], losses[index])
        rows.append(row | _against_others(request.entrants, index, marks))
    return Result(request, machine, rows, judge(request.entrants, losses, sizes, alone))


def merge_rounds(ranks: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Seconds by round and step: the longest of all ranks."""
    return [[max(step) for step in zip(*turn, strict=True)] for turn in zip(*ranks, strict=True)]


def ratios(marks: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """Round by round one engine's time over another's, and the median of that."""
    each = [mine / theirs for mine, theirs in zip(marks, other, strict=True)]
    return {"median": median(each), "all": each}


def rank_losses(entrant: Entrant, parts: Sequence[Found], group_sizes: Sequence[int]) -> list[list[float]]:
    """Losses by step and rank. One plain process has made a few steps with the batches of all ranks for this."""
    if entrant.engine == SINGLE:
        alone = _alone(parts)
        return [list(step) for step in alone[group_sizes[0] if group_sizes else max(alone)]]
    return [list(step) for step in zip(*(part["losses"] for part in parts), strict=True)]


def _alone(parts: Sequence[Found]) -> dict[int, Sequence[Sequence[float]]]:
    """Losses of one plain process, by the ranks whose gradients it adds before it adds those of other groups."""
    return {int(size): losses for size, losses in parts[0]["check"]["losses"].items()}


def judge(
    entrants: Sequence[Entrant],
    losses: Sequence[Sequence[Sequence[float]]],
    group_sizes: Sequence[int],
    alone: Mapping[int, Sequence[Sequence[float]]],
) -> Verdict:
    """Compare losses.

    Args:
        entrants: Ours first.
        losses: By entrant, step and rank.
        group_sizes: Of our strategies but ``data_parallel``: ranks whose gradients are added up first.
        alone: Losses of one process by the group size with which it adds; empty where it does not take part.
    """
    first = losses[0]
    is_bitwise = True
    differences = {}
    for place, size in enumerate(group_sizes):
        for other in (losses[group_sizes.index(size)], *([alone[size]] if alone else [])):
            common = min(len(losses[place]), len(other))
            is_bitwise = is_bitwise and list(losses[place][:common]) == list(other[:common])
    for entrant, other in zip(entrants, losses, strict=True):
        common = min(len(first), len(other))
        if entrant.engine != OURS or entrant.is_threaded:
            gap = abs(_mean(first[common - 1]) - _mean(other[common - 1]))
            differences[entrant.name] = gap if gap == gap else float("inf")  # noqa: PLR0124  not a number
    return Verdict(is_bitwise, tuple(group_sizes), differences)


def _row(
    entrant: Entrant,
    parts: Sequence[Found],
    rounds: Sequence[Sequence[float]],
    losses: Sequence[Sequence[float]],
) -> dict[str, Any]:
    times = [seconds for turn in rounds for seconds in turn]
    checks = [part["check"] for part in parts]
    is_predicted = entrant.engine == OURS and not entrant.is_threaded
    return {
        "engine": entrant.engine,
        "strategy": entrant.strategy,
        "world_size": len(parts),
        "step_time_s": {"median": median(times), "min": min(times), "all": times},
        "peak_rss_bytes": max(part["peak_rss_bytes"] for part in parts),
        "peak_rss_above_start_bytes": max(part["peak_rss_bytes"] - part["start_rss_bytes"] for part in parts),
        "peak_tensor_bytes": max(check["peak_tensor_bytes"] for check in checks),
        "predicted_peak_tensor_bytes": predicted_bytes(checks),
        "predicted_bytes": _categories(checks[0]),
        "collectives": checks[0]["collectives"],
        "predicted_collectives": checks[0].get("predicted_collectives"),
        "trace_is_predicted": all(check["trace_is_predicted"] for check in checks) if is_predicted else None,
        "num_units": checks[0].get("num_units"),
        "loss": [_mean(step) for step in losses],
    }


def _against_others(entrants: Sequence[Entrant], index: int, marks: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Ratios to every peer, and the difference to the plain process, round by round."""
    others = {other.name: marks[i] for i, other in enumerate(entrants) if other.engine != OURS and i != index}
    values: dict[str, Any] = {"ratio_to": {name: ratios(marks[index], other) for name, other in others.items()}}
    if SINGLE in others:
        over = [mine - alone for mine, alone in zip(marks[index], others[SINGLE], strict=True)]
        values["over_single_s"] = {"median": median(over), "all": over}
    return values


def predicted_bytes(checks: Sequence[Mapping[str, Any]]) -> int | None:
    """The layout's bytes and those of activations and waiting gradients (``spec.memory``), on the fullest rank."""
    totals = [sum(categories.values()) for check in checks if (categories := _categories(check)) is not None]
    return max(totals) if len(totals) == len(checks) else None


def _categories(check: Mapping[str, Any]) -> dict[str, int] | None:
    if check["predicted"] is None or check["activation_bytes"] is None:
        return None
    return {**check["predicted"], "activations": check["activation_bytes"]}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
