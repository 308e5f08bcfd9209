"""Measure shardwise beside its peers, and set the results beside the targets. ``make bench`` calls this.

Every group of engines is one ``bench.compare``: engines take turns within one run, and a ratio is taken in each
round. What is not timed, bytes held and sent, is counted for every preset on 2, 3 and 4 ranks (``bench.counts``).
Writes ``bench/results/DATE.md`` (targets first, then every table) and ``DATE.json``; where they are there already, with
-2, -3, ... behind the date.

    python -m bench.targets [--short] [--rounds 5] [--only wide] [--profile] [--out bench/results]

Takes about an hour on two cores, with ``--short`` (torch's engines on two ranks, no counts) about eleven minutes;
nothing else should run meanwhile. Runs whose peers are not installed are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import counts, profiles
from bench.files import free_stem

Rows = dict[str, dict[str, Any]]

UNMERGED = "zero3+merge_units=false"
ONE_BUFFER = "zero3+gradient_buffers=1"

#: One comparison each: name, case, ranks, our variants, peers.
RUNS = {
    "host-1": ("host", 1, f"zero3,zero3+flat,{UNMERGED}", "single,torch-fsdp2"),
    "host": ("host", 2, f"zero3,zero3+flat,{UNMERGED}", "torch-ddp,torch-fsdp2"),
    "compute": ("compute", 2, "zero3,ddp", "torch-ddp,torch-fsdp2"),
    "wide": ("wide", 2, f"zero3,{ONE_BUFFER},ddp", "torch-ddp,torch-fsdp2"),
    "wide-zero1": ("wide", 2, "zero1", "torch-zero1"),
    "wide-zero": ("wide", 2, "zero2,zero3", "deepspeed-2,deepspeed-3"),
}
#: The cases that are counted, as runs of their own.
COUNTS = {"counts-host": "host", "counts-compute": "compute", "counts-wide": "wide"}
#: The cases whose live tensors are counted beside FSDP2's.
LIVE = {"live-host": "host", "live-compute": "compute", "live-wide": "wide"}
#: What ``--short`` runs, and in how many rounds.
SHORT = {"host": 5, "compute": 4, "wide": 4, "wide-zero1": 5}


def step_ratio(rows: Rows, ours: str, peer: str) -> list[float]:
    """By round."""
    return rows[ours]["ratio_to"][peer]["all"]


def unit_cost(rows: Rows, ours: str, peer: str) -> list[float]:
    """By round, what ours costs above one plain process, over what the peer does."""
    mine, plain, theirs = (_round_minima(rows[name]) for name in (ours, "single", peer))
    return [(a - p) / (b - p) for a, p, b in zip(mine, plain, theirs, strict=True)]


def _round_minima(row: dict[str, Any]) -> list[float]:
    times = row["step_time_s"]["all"]
    size = len(times) // row["rounds"]
    return [min(times[start : start + size]) for start in range(0, len(times), size)]


def resident(rows: Rows, ours: str, peer: str) -> list[float]:
    """One number of a whole run."""
    return [rows[ours]["peak_rss_above_start_bytes"] / rows[peer]["peak_rss_above_start_bytes"]]


@dataclass(frozen=True)
class Target:
    """A number that a run gives, and what it is to be at most; without a limit it is only shown."""

    what: str
    run: str
    limit: float | None
    measure: Callable[[Rows, str, str], list[float]]
    ours: str
    peer: str

    def is_missed(self, rows: Rows) -> bool:
        return self.limit is not None and self.value(rows) > self.limit

    def value(self, rows: Rows) -> float:
        return statistics.median(self.measure(rows, self.ours, self.peer))


TARGETS = [
    Target("host unit cost, zero3 / FSDP2 (world 1)", "host-1", 0.10, unit_cost, "zero3", "torch-fsdp2"),
    Target("the same, every block by itself / FSDP2", "host-1", None, unit_cost, UNMERGED, "torch-fsdp2"),
    Target("step, zero3 with flat_parameters / one plain process", "host-1", 0.90, step_ratio, "zero3+flat", "single"),
    Target("step, zero3 / torch DDP", "host", 1.20, step_ratio, "zero3", "torch-ddp"),
    Target("the same, every block by itself / torch DDP", "host", None, step_ratio, UNMERGED, "torch-ddp"),
    Target("step, zero3 with flat_parameters / torch DDP", "host", 1.50, step_ratio, "zero3+flat", "torch-ddp"),
    Target("step, zero3 / FSDP2", "compute", 0.80, step_ratio, "zero3", "torch-fsdp2"),
    Target("step, zero3 / torch DDP", "compute", 1.03, step_ratio, "zero3", "torch-ddp"),
    Target("step, ddp / torch DDP", "compute", 1.00, step_ratio, "ddp", "torch-ddp"),
    Target("step, ddp / torch DDP", "wide", 1.00, step_ratio, "ddp", "torch-ddp"),
    Target("step, zero3 / FSDP2", "wide", 0.40, step_ratio, "zero3", "torch-fsdp2"),
    Target("step, zero3 / torch DDP", "wide", 1.00, step_ratio, "zero3", "torch-ddp"),
    Target("step, zero1 / DDP + ZeroRedundancyOptimizer", "wide-zero1", 0.85, step_ratio, "zero1", "torch-zero1"),
    Target("step, zero2 / DeepSpeed 2", "wide-zero", 0.85, step_ratio, "zero2", "deepspeed-2"),
    Target("step, zero3 / DeepSpeed 3", "wide-zero", 0.70, step_ratio, "zero3", "deepspeed-3"),
    Target("resident above start, zero3 / FSDP2", "wide", 0.75, resident, "zero3", "torch-fsdp2"),
    Target("resident above start, zero3 / torch DDP", "wide", 0.75, resident, "zero3", "torch-ddp"),
    Target("the same with one gradient buffer / FSDP2", "wide", 0.75, resident, ONE_BUFFER, "torch-fsdp2"),
    Target("the same with one gradient buffer / torch DDP", "wide", 0.75, resident, ONE_BUFFER, "torch-ddp"),
    Target("step, zero3 with one gradient buffer / torch DDP", "wide", None, step_ratio, ONE_BUFFER, "torch-ddp"),
]


# -- running


def measure(name: str, rounds: int, folder: Path) -> tuple[dict[str, Any], str, str]:
    """One comparison: its JSON, its tables, its command."""
    case, ranks, strategies, peers = RUNS[name]
    arguments = ["-m", "bench.compare", "--case", case, "--nproc", str(ranks), "--rounds", str(rounds)]
    arguments += ["--strategies", strategies, "--peers", peers]
    files = ["--json", str(folder / f"{name}.json"), "--markdown", str(folder / f"{name}.md")]
    subprocess.run([sys.executable, *arguments, *files], check=True)
    text = (folder / f"{name}.md").read_text("utf-8")
    tables = text[text.index(f"## {case}") :].replace(f"## {case}", f"## {name}", 1)
    values = json.loads((folder / f"{name}.json").read_text("utf-8"))
    return values, tables, " ".join(["python", *arguments])


def rows_of(values: dict[str, Any]) -> Rows:
    return {
        row["strategy"] if row["engine"] == "shardwise" else row["engine"]: row | {"rounds": values["rounds"]}
        for row in values["rows"]
    }


def profiled(found: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """For every missed target of time a name and the profiles of its two engines, each pair once."""
    done = set()
    for target in TARGETS:
        if target.run not in found or target.measure is resident or not target.is_missed(rows_of(found[target.run])):
            continue
        case, ranks, *_ = RUNS[target.run]
        if (case, ranks, target.ours, target.peer) not in done:
            done.add((case, ranks, target.ours, target.peer))
            name = f"{target.run}-{target.ours}-{target.peer}".replace("+", "-").replace("=", "-")
            yield name, profiles.profiles(case, ranks, (target.ours, target.peer))


# -- writing


def target_lines(
    found: dict[str, dict[str, Any]], counted: list[counts.Count], live: Sequence[counts.Live] = ()
) -> list[str]:
    """The table of targets, for the runs that were made."""
    lines = ["| what | run | target | measured (rounds: lowest to highest) | |", "| --- | --- | ---: | ---: | --- |"]
    for target in TARGETS:
        if target.run in found:
            rows = rows_of(found[target.run])
            each = target.measure(rows, target.ours, target.peer)
            shown = f"{target.value(rows):.3f}"
            if len(each) > 1:
                shown += f" ({len(each)}: {min(each):.2f} to {max(each):.2f})"
            limit, verdict = "-", ""
            if target.limit is not None:
                limit, verdict = f"≤ {target.limit:.2f}", "MISSED" if target.is_missed(rows) else "met"
            lines.append(f"| {target.what} | {target.run} | {limit} | {shown} | {verdict} |")
    lines += [each.line for each in live]
    if counted:
        lines += counts.target_lines(counted)
    if found:
        lines.append(_loss_line(found))
    return lines


def _loss_line(found: dict[str, dict[str, Any]]) -> str:
    gaps = [gap for values in found.values() for gap in values["losses"]["differences"].values()]
    bitwise = all(values["losses"]["ours_bitwise"] for values in found.values())
    is_met = bitwise and max(gaps, default=0.0) <= 1e-6
    shown = f"peers within {max(gaps, default=0.0):.1e}, ours {'bitwise' if bitwise else 'DIFFER'}"
    return f"| final loss | {', '.join(found)} | 1e-6, ours bitwise | {shown} | {'met' if is_met else 'MISSED'} |"


def remarks(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What the table of targets does not say, with the numbers of these runs."""
    if found:
        yield (
            "Ratios are medians over the rounds of a run; engines take turns within it. Each kind of run has its own "
            "number of steps in a round (below)."
        )
    for name in ("host-1", "host"):
        if name in found:
            rows = rows_of(found[name])
            merged, alone = rows["zero3"]["num_units"], rows[UNMERGED]["num_units"]
            yield (
                f"In {name}, zero3 as it comes lets its {alone} blocks travel as {merged} units; the targets are for "
                f"that. `{UNMERGED}` is the same with {alone} units."
            )
    if "wide" in found:
        yield _memory_remark(rows_of(found["wide"]))


def _memory_remark(rows: Rows) -> str:
    zero3, fsdp2 = rows["zero3"], rows["torch-fsdp2"]
    parts = zero3["predicted_bytes"]
    shards = sum(parts[name] for name in ("parameters", "gradients", "optimizer"))
    return (
        "The targets of memory are for resident memory (RSS), which holds what Gloo allocates for its own collectives: "
        f"above the start zero3 {_mb(zero3['peak_rss_above_start_bytes'])}, FSDP2 "
        f"{_mb(fsdp2['peak_rss_above_start_bytes'])}. Counted tensors, which leave that out: "
        f"{_mb(zero3['peak_tensor_bytes'])} against {_mb(fsdp2['peak_tensor_bytes'])}. Beside shards and their "
        f"optimizer state ({_mb(shards)}), zero3 has gathered units ({_mb(parts['gathered'])}) and buffers for "
        f"gradients and what is received ({_mb(parts['reduce'])}) at the peak; with one gradient buffer it is "
        f"{_mb(rows[ONE_BUFFER]['peak_tensor_bytes'])}."
    )


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def is_possible(name: str) -> bool:
    """Whether the peers of a run are installed; says so where they are not."""
    if "deepspeed" not in RUNS[name][3] or importlib.util.find_spec("deepspeed") is not None:
        return True
    sys.stderr.write(f"{name} is left out: the package deepspeed is not installed\n")
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="of every run; 5 by default, with --short as many as there is time")
    parser.add_argument("--only", choices=[*RUNS, *LIVE, *COUNTS], action="append", help="this run; may be repeated")
    parser.add_argument("--short", action="store_true", help="the targets beside torch's engines on two ranks")
    parser.add_argument("--profile", action="store_true", help="profile both engines of each missed target of time")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    chosen = options.only or ([*SHORT, *LIVE] if options.short else [*filter(is_possible, RUNS), *LIVE, *COUNTS])
    found, tables, commands = {}, [], []
    counted: list[counts.Count] = []
    live: list[counts.Live] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            if name in RUNS:
                rounds = options.rounds or (SHORT.get(name, 5) if options.short else 5)
                found[name], text, command = measure(name, rounds, Path(folder))
                tables.append(text)
                commands.append(command)
                continue
            commands.append(f"python -m bench.targets --only {name}")
            if name in LIVE:
                live.append(counts.live(LIVE[name]))
            else:
                counted += [each for world in counts.WORLDS for each in counts.count(COUNTS[name], world)]
    if counted:
        tables.append(counts.tables(counted))
    write(options.out, found, counted, live, tables=tables, commands=commands, is_profiling=options.profile)


def write(
    folder: Path,
    found: dict[str, dict[str, Any]],
    counted: list[counts.Count],
    live: list[counts.Live],
    *,
    tables: list[str],
    commands: list[str],
    is_profiling: bool,
) -> None:
    """The files of one set of results."""
    stem = free_stem(folder, dt.datetime.now(tz=dt.UTC).date().isoformat())
    lines = [f"# Measurements of {stem}", "", *target_lines(found, counted, live), ""]
    for remark in remarks(found):
        lines += [remark, ""]
    if found:
        lines += [str(next(iter(found.values()))["machine"]), ""]
    lines += ["Commands (`make bench` runs them all):", "", *(f"- `{command}`" for command in commands), ""]
    folder.mkdir(parents=True, exist_ok=True)
    if is_profiling:
        names = []
        for name, text in profiled(found):
            (folder / f"{stem}.{name}.profile.txt").write_text(text, "utf-8")
            names.append(f"- `{stem}.{name}.profile.txt`")
        lines += ["Profiles of missed targets of time:", "", *(names or ["- none was missed"]), ""]
    values = found | {
        "counts": [dataclasses.asdict(each) for each in counted],
        "live": [dataclasses.asdict(each) for each in live],
    }
    (folder / f"{stem}.md").write_text("\n".join(lines) + "\n" + "\n".join(tables), "utf-8")
    (folder / f"{stem}.json").write_text(json.dumps(values, indent=1) + "\n", "utf-8")
    print("\n".join(target_lines(found, counted, live)))
    print(f"written: {folder / stem}.md")


if __name__ == "__main__":
    main()
