"""Published peaks of memory beside predicted ones: errors by source, wrong verdicts, and a twelve-line formula."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bench.accounting import BLOOM_BF16, BLOOM_FP16, MEGATRON, MOSAIC, NANOTRON, NO_ZERO, TORCHTITAN, ZERO
from bench.predictions import Errors
from bench.published import TABLE, PublishedRow, published_rows
from shardwise.cost.hardware import GIB
from shardwise.planner.memory import OURS, Accounting, MemoryEstimate, estimate_memory
from shardwise.planner.planned import MARGIN
from shardwise.spec.placement import PRESETS
from shardwise.spec.shape import Mlp

FITTED = ("bloom",)

#: Sources whose first prediction showed that their framework had been misread; they are no proof.
CORRECTED = ("nanotron", "alpa")


@dataclass(frozen=True, slots=True)
class Case:
    """A published run with its framework's accounting.

    Attributes:
        row: What it trained, and how.
        accounting: What its framework holds.
        measures: Which of the predicted bytes its figure is to be compared with.
        measured_bytes: Its figure; ``None``: there is none.
        ran_out: It ran out of memory.
    """

    row: PublishedRow
    accounting: Accounting
    measures: str
    measured_bytes: float | None
    ran_out: bool

    @property
    def label(self) -> str:
        """The run in a few words."""
        row = self.row
        degrees = f"tp {row.plan.tp} pp {row.plan.pp} cp {row.plan.cp}, microbatch {row.workload.micro_batch}"
        return f"{row.source}: {row.shape.num_parameters / 1e9:.0f}B on {row.cluster.num_gpus}, {degrees}"

    def estimate(self) -> MemoryEstimate:
        """The prediction."""
        row = self.row
        mesh = row.plan.mesh(row.cluster.num_gpus, row.cluster.gpus_per_node)
        plan = replace(row.plan, dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard)
        return estimate_memory(row.shape, plan, row.cluster, row.workload, accounting=self.accounting)


#: By source: its framework's accounting, what its figure counts, and in which unit.
FRAMEWORKS = {
    "simumax": (MEGATRON, "allocated", GIB),
    "nanotron": (NANOTRON, "allocated", GIB),
    "nanotron-16": (NANOTRON, "allocated", GIB),
    "bloom": (BLOOM_FP16, "device", 1e9),
    "bigscience-gpt2": (NO_ZERO, "device", 1e9),
    "alpa": (NO_ZERO, "allocated", 1e9),
}


#: How the others hold memory, by their software; no figure of theirs is compared, but their runs ran.
SOFTWARE = {
    "megatron-2021": MEGATRON,
    "megatron-deepspeed": MEGATRON,
    "megatron-core": MEGATRON,
    "nanotron": NANOTRON,
    "pytorch-2023": MOSAIC,
    "torchtitan": TORCHTITAN,
    "torchtitan-async-tp": TORCHTITAN,
}


def cases() -> list[Case]:
    """The published rows with a peak of memory, those that ran out of it, and those that say all that memory needs."""
    found = []
    for row in published_rows():
        ran_out = "OOM=true" in row.notes
        is_known = (row.is_core or row.source == "mosaic") and "recompute not listed" not in row.notes
        if not (is_known or ran_out or (row.peak_memory and row.source in FRAMEWORKS)):
            continue
        default = SOFTWARE.get(row.software, OURS)
        accounting, measures, unit = FRAMEWORKS.get(row.source, (default, "device", GIB))
        if accounting is BLOOM_FP16 and row.workload.precision == "bf16":
            accounting = BLOOM_BF16
        plan = replace(row.plan, strategy="zero1") if row.source == "alpa" else row.plan  # its prefer_reduce_scatter
        measured = row.peak_memory * unit if row.peak_memory and row.source in FRAMEWORKS else None
        found.append(Case(replace(row, plan=plan), accounting, measures, measured, ran_out))
    return found


def predicted(found: MemoryEstimate, measures: str) -> int:
    """The bytes that a source's figure is compared with."""
    return {
        "allocated": found.allocated_bytes,
        "reserved": found.reserved_bytes,
        "device": found.device_bytes,
    }[measures]


def formula(row: PublishedRow) -> float:
    """The twelve lines of the field: 18 bytes for each parameter, and Korthikanti's activations of 16-bit layers."""
    plan, work, h = row.plan, row.workload, row.shape.hidden
    ranks = row.cluster.num_gpus / (plan.tp * plan.pp)
    sharded = ranks if plan.placements.shards_optimizer else 1
    states = row.shape.num_parameters / (plan.tp * plan.pp) * (6 + 12 / sharded)
    mlp = row.shape.blocks[0].feed_forward
    assert isinstance(mlp, Mlp)
    tokens, layers = work.micro_batch * work.seq_len / plan.cp, row.shape.num_layers / plan.pp
    block = tokens * h * (18 + 8 * mlp.ffn / h if mlp.is_gated else 34) / plan.tp
    if work.recompute == "full":
        block = 2 * tokens * h
    alive = min(plan.pp, work.global_batch * plan.tp * plan.pp * plan.cp // (work.micro_batch * row.cluster.num_gpus))
    return states + max(alive * layers * block, layers * block + 4 * tokens * row.shape.vocab / plan.tp)


def role(source: str) -> str:
    """Whether a source's rows were used for anything but judging."""
    if source.startswith(FITTED):
        return "fitted (1 number)"
    return "corrected once" if source.startswith(CORRECTED) else "held out"


def table(found: Mapping[str, Sequence[float]]) -> list[str]:
    """Errors by source, one line each."""
    lines = [f"{'source':<18} {'role':<18} {'meaning':<10} rows  median    mean  8 of 10     p90   worst"]
    for source, signed in found.items():
        errors = Errors.of(signed)
        shown = (errors.median, errors.mean, errors.p80, errors.p90, errors.worst)
        meaning = FRAMEWORKS[source][1]
        figures = "".join(f"{e:>8.1%}" for e in shown)
        lines.append(f"{source:<18} {role(source):<18} {meaning:<10} {errors.count:>4}{figures}")
    return lines


def main() -> None:
    """Print the tables."""
    errors: dict[str, list[float]] = {}
    baseline: dict[str, list[float]] = {}
    verdicts: list[str] = []
    every = cases()
    for each in every:
        estimate = each.estimate()
        capacity = each.row.cluster.device.memory_bytes
        shown = f"{each.label}: {estimate.device_bytes / GIB:.1f} GiB of {capacity / GIB:.1f}"
        if each.ran_out and estimate.device_bytes <= capacity:
            verdicts.append(f"  ran out, said to fit: {shown}")
        if not each.ran_out and estimate.device_bytes > capacity:
            is_near = estimate.device_bytes * (1 - MARGIN) <= capacity
            verdicts.append(
                f"  ran, said {f'to need up to {MARGIN:.0%} too much' if is_near else 'not to fit'}: {shown}"
            )
        if each.measured_bytes is not None:
            errors.setdefault(each.row.source, []).append(predicted(estimate, each.measures) / each.measured_bytes - 1)
            baseline.setdefault(each.row.source, []).append(formula(each.row) / each.measured_bytes - 1)
    ran_out = sum(each.ran_out for each in every)
    print("Memory: peak of the fullest GPU, predicted against published\n")
    print("\n".join(table(errors)))
    held_out = [abs(error) for source, found in errors.items() if role(source) == "held out" for error in found]
    all_held_out = Errors.of(held_out)
    shown = (all_held_out.median, all_held_out.mean, all_held_out.p80, all_held_out.p90, all_held_out.worst)
    print(f"{'all held_out-out rows':<48} {len(held_out):>4}" + "".join(f"{each:>8.1%}" for each in shown))
    print("\nA formula of twelve lines (18 bytes per parameter, Korthikanti's activations)\n")
    print("\n".join(table(baseline)))
    print(f"\nWrong verdicts on whether it fits, of {len(every) - ran_out} that ran and {ran_out} that ran out:")
    print("\n".join(verdicts) or "  none")
    print(f"\nZeRO's table 1: {zero_cells()} of 54 cells reproduced to 4 digits")


def zero_cells() -> int:
    """Cells of table 1 of ZeRO (arXiv 1910.02054) that the placements give."""
    with (TABLE.parent / "zero_table1.csv").open(encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    right = 0
    for row in found:
        for strategy, column in (("zero1", "pos_gb"), ("zero2", "pos_g_gb"), ("zero3", "pos_g_p_gb")):
            predicted_bytes = sum(ZERO.of(PRESETS[strategy], int(row["dp"]))) * float(row["params_b"])
            right += abs(predicted_bytes / float(row[column]) - 1) < 0.0005
    return right


if __name__ == "__main__":
    main()
