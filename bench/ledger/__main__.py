"""A ledger: predictions of runs that somebody will publish, frozen beside the commit that made them.

    python -m bench.ledger                # the newest ledger, predicted again now; errors where figures are filled in
    python -m bench.ledger --freeze FILE  # the inputs of FILE, an older ledger for example, as a ledger of today

A ledger is never changed but for its last columns: ``published_*`` and ``source`` take what was published since. A
run whose inputs differ is no answer. MFU is of all products and full attention, over the dense peak of the row's
precision; where a source counts otherwise, its time or tokens per second are filled in instead.
"""

from __future__ import annotations

import argparse
import csv
import datetime as dt
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

import bench.software  # noqa: F401  the names in the column ``software``
from bench.accounting import MEGATRON, TORCHTITAN
from bench.validate_memory import predicted
from shardwise.planner import Cluster, Workload, estimate
from shardwise.planner.explain import BANDS, regime
from shardwise.planner.memory import OURS, estimate_memory
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import find_shape
from shardwise.spec.text import aligned

FOLDER = Path(__file__).parent
INPUTS = (
    *("model", "gpu", "gpus", "gpus_per_node", "gbits_per_node", "software", "seq_len", "micro_batch", "global_batch"),
    *("precision", "recompute", "compile", "lora_rank", "plan"),
)
FIGURES = ("step_s", "tokens_per_s_per_gpu", "peak_gib", "mfu")
COLUMNS = (*INPUTS, *FIGURES, "memory", "band", "commit", *(f"published_{name}" for name in FIGURES), "source")

#: How each framework holds memory, and what its users publish of it.
MEMORY = {
    "torchtitan": (TORCHTITAN, "reserved"),
    "megatron-core": (MEGATRON, "allocated"),
    "pytorch": (OURS, "reserved"),
}

Row = Mapping[str, str]


def figures(row: Row) -> dict[str, str]:
    """The row's predicted columns."""
    numbers = ("seq_len", "global_batch", "micro_batch")
    workload = Workload(
        **{name: int(row[name]) for name in numbers},
        precision=row["precision"],
        recompute=row["recompute"],
        compile=row["compile"] == "yes",
        lora_rank=int(row["lora_rank"]) if row["lora_rank"] else None,
    )
    gbits = float(row["gbits_per_node"]) if row["gbits_per_node"] else None
    cluster = Cluster(
        gpu=row["gpu"],
        num_gpus=int(row["gpus"]),
        gpus_per_node=int(row["gpus_per_node"]),
        inter_gbits_per_s_per_node=gbits,
    )
    shape, software = find_shape(row["model"]), row["software"]
    if software != "pytorch":  # FlexAttention and Transformer Engine have a kernel where transformers has none
        stacks = [
            (count, replace(block, attention=replace(block.attention, plain=""))) for count, block in shape.stacks
        ]
        shape = replace(shape, stacks=tuple(stacks))
    made = estimate(shape, ParallelPlan(**yaml.safe_load(row["plan"])), cluster, workload, software=software)
    accounting, measures = MEMORY[software]
    memory = estimate_memory(shape, made.plan, cluster, made.workload, accounting=accounting)
    band = BANDS.get(regime(shape, made.plan, cluster, made.workload))
    return {
        "step_s": f"{made.step_time_s:.4g}",
        "tokens_per_s_per_gpu": f"{made.tokens_per_s_per_gpu:.5g}",
        "peak_gib": f"{predicted(memory, measures) / 2**30:.1f}",
        "mfu": f"{made.mfu:.3f}",
        "memory": measures,
        "band": f"{band:.2f}" if band else "",
    }


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a ledger, or of a file with its columns of inputs."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def freeze(questions: Sequence[Row], commit: str, day: dt.date) -> Path:
    """Write the questions' predictions as the ledger of a day.

    Raises:
        FileExistsError: There is a ledger of that day. None is ever overwritten.
    """
    rows = [{**{name: row[name] for name in INPUTS}, **figures(row), "commit": commit} for row in questions]
    with (path := FOLDER / f"{day}.csv").open("x", encoding="utf-8", newline="") as file:
        written = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        written.writeheader()
        written.writerows(rows)
    return path


def compared(rows: Sequence[Row]) -> list[list[str]]:
    """The time of each row, and its peak where one was published: frozen, now, published, errors of both."""
    lines = [["run", "", "frozen", "now", "change", "published", "error of frozen", "error of now"]]
    for row in rows:
        name, now = f"{row['model']} on {row['gpus']} x {row['gpu']}, {row['software']}", figures(row)
        for figure, published in (("step_s", published_s(row)), ("peak_gib", float(row["published_peak_gib"] or 0))):
            if published or figure == "step_s":
                both = [float(each[figure]) for each in (row, now)]
                errors = [f"{each / published - 1:+.1%}" for each in both] if published else ["", ""]
                given = f"{published:.4g}" if published else ""
                lines.append([name, figure, *map(str, both), f"{both[1] / both[0] - 1:+.1%}", given, *errors])
    return lines


def published_s(row: Row) -> float:
    """Seconds of a step as published, or as tokens per second or MFU tell; 0: nothing was."""
    if row["published_step_s"]:
        return float(row["published_step_s"])
    given = (name for name in ("tokens_per_s_per_gpu", "mfu") if row[f"published_{name}"])
    return next((float(row["step_s"]) * float(row[name]) / float(row[f"published_{name}"]) for name in given), 0.0)


def main() -> None:
    """Compare the newest ledger, or freeze a new one."""
    parser = argparse.ArgumentParser(description="Predictions of runs that nobody has published yet.")
    parser.add_argument("--freeze", type=Path, metavar="FILE", help="a CSV file with the columns of inputs")
    questions = parser.parse_args().freeze
    if not questions:
        path = max(FOLDER.glob("*.csv"))  # names are dates
        print(f"{path.name}\n", *aligned(compared(read(path)), words=(0, 1)), sep="\n")
        return
    git = ("git", "-C", str(FOLDER))
    if subprocess.run([*git, "status", "--porcelain", ":/src", ":/bench/*.py"], capture_output=True, check=True).stdout:
        sys.exit("src or bench has changes that are in no commit: commit them before predictions are frozen.")
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, check=True, text=True).stdout.strip()
    print(freeze(read(questions), commit, dt.datetime.now(dt.UTC).date()))


if __name__ == "__main__":
    main()
