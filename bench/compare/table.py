"""A result for reading: aligned text, cells for a terminal's table, Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.compare.request import OURS
from bench.compare.result import LOSS_TOLERANCE, Result
from shardwise.spec.text import aligned, printable, size

#: By whether the engine is one process with a replica for each device.
_SENDERS = {False: "each rank", True: "all by way of its first device"}


@dataclass(frozen=True, slots=True)
class Grid:
    """A header and rows of cells; the first column is a name, the others are numbers."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        """Columns aligned by spaces."""
        return "\n".join(aligned((self.header, *self.rows)))

    def markdown(self) -> str:
        """A Markdown table."""
        lines = [self.header, ("---", *("---:" for _ in self.header[1:])), *self.rows]
        return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines)


def engines(result: Result) -> Grid:
    """Time and memory of every engine."""
    header = (
        "engine",
        "strategy",
        "ranks",
        "step median",
        "step min",
        "peak RSS",
        "above start",
        "peak tensors",
        "predicted",
        "sent per step",
    )
    return Grid(header, tuple(_cells(row) for row in result.rows))


def comparisons(result: Result) -> Grid:
    """Our strategies over each peer: medians of the rounds' ratios, and their range."""
    peers = [str(row["engine"]) for row in result.rows if row["engine"] != OURS]
    rows = []
    for row in result.rows:
        if row["engine"] == OURS:
            ratios = [row["ratio_to"][peer] for peer in peers]
            rows.append((f"{OURS} {row['strategy']}", *(_ratio(ratio) for ratio in ratios)))
    return Grid(("step time over", *peers), tuple(rows))


def notes(result: Result) -> list[str]:
    """What the tables do not say: how it was timed, and whether all computed the same."""
    case, verdict = result.request.case, result.verdict
    mark = "median" if case.statistic == "median" else "shortest"
    lines = [
        f"{result.request.rounds} rounds of {case.steps} steps, engines in turns",
        f"ratios are of the {mark} step of each round: their median (lowest to highest)",
    ]
    if verdict.group_sizes:
        lines.append(
            f"losses of {OURS}'s strategies{' and of one process' if 'single' in verdict.differences else ''}: "
            + ("equal to the last bit" if verdict.is_bitwise else "they DIFFER")
            + _grouping(result)
        )
    if verdict.differences:
        worst = max(verdict.differences, key=lambda name: verdict.differences[name])
        gap = verdict.differences[worst]
        mark = "" if gap <= LOSS_TOLERANCE else f", MORE than {LOSS_TOLERANCE:g}"
        lines.append(f"last common loss, largest difference to ours: {gap:.3g} ({worst}){mark}")
    lines += [
        f"sent per step by {row['engine']} {row['strategy']}, {_SENDERS[entrant.is_threaded]}: {_exchanges(row)}"
        for entrant, row in zip(result.request.entrants, result.rows, strict=True)
        if row["collectives"]
    ]
    costs = unit_costs(result)
    if costs:
        lines.append("step time above one plain process: " + ", ".join(f"{k} {_ms(v)}" for k, v in costs.items()))
    return lines


def _grouping(result: Result) -> str:
    sizes = sorted(set(result.verdict.group_sizes))
    if all(size == result.request.num_ranks for size in sizes):
        return ""
    return (
        f", where sums are taken alike: first in groups of {' or '.join(map(str, sizes))} ranks, then over the groups"
    )


def unit_costs(result: Result) -> dict[str, float]:
    """At a world of one, what each engine adds to the plain process's step, by name."""
    if result.request.num_ranks != 1:
        return {}
    return {
        f"{row['engine']} {row['strategy']}" if row["engine"] == OURS else row["engine"]: row["over_single_s"]["median"]
        for row in result.rows
        if "over_single_s" in row
    }


def text(result: Result) -> str:
    """Everything, for a plain stream."""
    return "\n".join(
        [str(result.request.case), "", str(engines(result)), "", str(comparisons(result)), "", *notes(result)]
    )


def markdown(results: Sequence[Result], *, date: str, command: str) -> str:
    """A file for ``bench/results``: machine, command, and each case's tables."""
    machine = results[0].machine
    lines = [f"# Comparison of {date}", "", f"Command: `{printable(command)}`", "", "| machine | |", "| --- | --- |"]
    lines += [f"| {name} | {_fact(name, value)} |" for name, value in machine.items()]
    for result in results:
        lines += ["", f"## {result.request.case.name}", "", str(result.request.case), ""]
        lines += [engines(result).markdown(), "", comparisons(result).markdown(), ""]
        lines += [f"- {note}" for note in notes(result)]
    return "\n".join(lines) + "\n"


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    times, sent = row["step_time_s"], row["collectives"]
    predicted = row["predicted_peak_tensor_bytes"]
    return (
        row["engine"],
        row["strategy"],
        str(row["world_size"]),
        _ms(times["median"]),
        _ms(times["min"]),
        size(row["peak_rss_bytes"]),
        size(row["peak_rss_above_start_bytes"]),
        size(row["peak_tensor_bytes"]),
        "-" if predicted is None else f"{size(predicted)} ({row['peak_tensor_bytes'] / predicted:.3f})",
        "-" if sent is None else _traffic(sent),
    )


def _traffic(sent: Mapping[str, Mapping[str, int]]) -> str:
    count = sum(entry["count"] for entry in sent.values())
    return f"{size(sum(entry['sent_bytes'] for entry in sent.values()))} in {count}"


def _exchanges(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{kind} {size(entry['sent_bytes'])}" for kind, entry in row["collectives"].items())


def _ratio(ratio: Mapping[str, Any]) -> str:
    each = ratio["all"]
    return f"{median(each):.2f} ({min(each):.2f} to {max(each):.2f})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if abs(seconds) < 1 else f"{seconds:.3f} s"


def _fact(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / 2**30:.1f} GiB"
    return printable(value)
