"""Measure shardwise beside its peers, and set the results beside the targets. ``make bench`` calls this.

Every group of engines is one ``shardwise compare``: engines take turns within one run, and a ratio is taken in each
round. Writes ``bench/results/DATE.md`` (targets first, then every table) and ``DATE.json``.

    python bench/targets.py [--rounds 5] [--only wide] [--out bench/results]

Takes about half an hour on two cores; nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Rows = dict[str, dict[str, Any]]

#: One comparison each: name, case, ranks, our variants, peers.
RUNS = {
    "host-1": ("host", 1, "zero3,zero3+flat", "single,torch-fsdp2"),
    "host": ("host", 2, "zero3,zero3+flat", "torch-ddp,torch-fsdp2"),
    "compute": ("compute", 2, "zero3,ddp", "torch-ddp,torch-fsdp2"),
    "wide": ("wide", 2, "zero3,zero3+gradient_buffers=1,ddp", "torch-ddp,torch-fsdp2"),
    "wide-zero": ("wide", 2, "zero1,zero2,zero3", "torch-zero1,deepspeed-2,deepspeed-3"),
}


def ratio(ours: str, peer: str) -> Callable[[Rows], float]:
    return lambda rows: rows[ours]["ratio_to"][peer]["median"]


def unit_cost(rows: Rows) -> float:
    """What zero3 costs above one plain process, over what FSDP2 does; per round, then the median."""
    ours, plain, fsdp2 = (_round_minima(rows[name]) for name in ("zero3", "single", "torch-fsdp2"))
    return statistics.median((a - p) / (b - p) for a, p, b in zip(ours, plain, fsdp2, strict=True))


def _round_minima(row: dict[str, Any]) -> list[float]:
    times = row["step_time_s"]["all"]
    size = len(times) // row["rounds"]
    return [min(times[start : start + size]) for start in range(0, len(times), size)]


def resident(ours: str, peer: str) -> Callable[[Rows], float]:
    return lambda rows: rows[ours]["peak_rss_above_start_bytes"] / rows[peer]["peak_rss_above_start_bytes"]


@dataclass(frozen=True)
class Target:
    """A number that a run gives, and what it is to be at most."""

    what: str
    run: str
    limit: float
    value: Callable[[Rows], float]


ONE_BUFFER = "zero3+gradient_buffers=1"

TARGETS = [
    Target("host unit cost, zero3 / FSDP2 (world 1)", "host-1", 0.10, unit_cost),
    Target(
        "step, zero3 with flat_parameters / one plain process (world 1)", "host-1", 0.90, ratio("zero3+flat", "single")
    ),
    Target("step, zero3 / torch DDP", "host", 1.50, ratio("zero3", "torch-ddp")),
    Target("step, zero3 with flat_parameters / torch DDP", "host", 1.50, ratio("zero3+flat", "torch-ddp")),
    Target("step, zero3 / FSDP2", "compute", 0.80, ratio("zero3", "torch-fsdp2")),
    Target("step, zero3 / torch DDP", "compute", 1.03, ratio("zero3", "torch-ddp")),
    Target("step, ddp / torch DDP", "compute", 1.00, ratio("ddp", "torch-ddp")),
    Target("step, ddp / torch DDP", "wide", 1.00, ratio("ddp", "torch-ddp")),
    Target("step, zero3 / FSDP2", "wide", 0.40, ratio("zero3", "torch-fsdp2")),
    Target("step, zero3 / torch DDP", "wide", 1.00, ratio("zero3", "torch-ddp")),
    Target("step, zero1 / DDP + ZeroRedundancyOptimizer", "wide-zero", 0.85, ratio("zero1", "torch-zero1")),
    Target("step, zero2 / DeepSpeed 2", "wide-zero", 0.85, ratio("zero2", "deepspeed-2")),
    Target("step, zero3 / DeepSpeed 3", "wide-zero", 0.70, ratio("zero3", "deepspeed-3")),
    Target("resident above start, zero3 / FSDP2", "wide", 0.80, resident("zero3", "torch-fsdp2")),
    Target("resident above start, zero3 / torch DDP", "wide", 0.80, resident("zero3", "torch-ddp")),
    Target("the same with one gradient buffer / FSDP2", "wide", 0.75, resident(ONE_BUFFER, "torch-fsdp2")),
    Target("the same with one gradient buffer / torch DDP", "wide", 0.75, resident(ONE_BUFFER, "torch-ddp")),
    Target(
        "step, zero3 with one gradient buffer / torch DDP (no target)",
        "wide",
        float("inf"),
        ratio(ONE_BUFFER, "torch-ddp"),
    ),
]


def measure(name: str, rounds: int, folder: Path) -> tuple[dict[str, Any], str, str]:
    """One comparison: its JSON, its tables, its command."""
    case, ranks, strategies, peers = RUNS[name]
    arguments = ["compare", "--case", case, "--nproc", str(ranks), "--strategies", strategies, "--peers", peers]
    arguments += ["--rounds", str(rounds)]
    files = ["--json", str(folder / f"{name}.json"), "--markdown", str(folder / f"{name}.md")]
    subprocess.run([sys.executable, "-m", "shardwise", *arguments, *files], check=True)
    text = (folder / f"{name}.md").read_text("utf-8")
    tables = text[text.index(f"## {case}") :].replace(f"## {case}", f"## {name}", 1)
    values = json.loads((folder / f"{name}.json").read_text("utf-8"))
    return values, tables, "shardwise " + " ".join(arguments)


def rows_of(values: dict[str, Any]) -> Rows:
    return {
        row["strategy"] if row["engine"] == "shardwise" else row["engine"]: row | {"rounds": values["rounds"]}
        for row in values["rows"]
    }


def target_lines(found: dict[str, dict[str, Any]]) -> list[str]:
    """The table of targets, for the runs that were made."""
    lines = ["| what | run | target | measured | |", "| --- | --- | ---: | ---: | --- |"]
    for target in TARGETS:
        if target.run in found:
            value = target.value(rows_of(found[target.run]))
            limit = "-" if target.limit == float("inf") else f"≤ {target.limit:.2f}"
            verdict = "" if limit == "-" else ("met" if value <= target.limit else "MISSED")
            lines.append(f"| {target.what} | {target.run} | {limit} | {value:.3f} | {verdict} |")
    tensors = [
        row["peak_tensor_bytes"] / row["predicted_peak_tensor_bytes"]
        for values in found.values()
        for row in values["rows"]
        if row.get("predicted_peak_tensor_bytes")
    ]
    span = f"{min(tensors):.3f} to {max(tensors):.3f}"
    is_met = min(tensors) >= 0.98 and max(tensors) <= 1.02
    lines.append(
        f"| peak bytes in tensors / the formula's | all | 0.98 to 1.02 | {span} | {'met' if is_met else 'MISSED'} |"
    )
    gaps = [gap for values in found.values() for gap in values["losses"]["differences"].values()]
    bitwise = all(values["losses"]["ours_bitwise"] for values in found.values())
    is_met = bitwise and max(gaps, default=0.0) <= 1e-6
    shown = f"peers within {max(gaps, default=0.0):.1e}, ours {'bitwise' if bitwise else 'DIFFER'}"
    lines.append(f"| final loss | all | 1e-6, ours bitwise | {shown} | {'met' if is_met else 'MISSED'} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=list(RUNS), action="append")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    found, tables, commands = {}, [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only or RUNS:
            values, text, command = measure(name, options.rounds, Path(folder))
            found[name] = values
            tables.append(text)
            commands.append(command)
    date = dt.datetime.now(tz=dt.UTC).date().isoformat()
    machine = next(iter(found.values()))["machine"]
    lines = [f"# Measurements of {date}", "", *target_lines(found), ""]
    lines += ["Ratios are medians of per-round ratios; engines take turns within one run. " + str(machine), ""]
    lines += ["Commands (`make bench` runs them all):", "", *(f"- `{command}`" for command in commands), ""]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{date}.md").write_text("\n".join(lines) + "\n" + "\n".join(tables), "utf-8")
    (options.out / f"{date}.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print("\n".join(target_lines(found)))


if __name__ == "__main__":
    main()
