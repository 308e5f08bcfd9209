"""Published peaks of memory beside predicted ones: errors by source, wrong verdicts, and a twelve-line formula."""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from shardwise.cost.hardware import Cluster, find_gpu
from shardwise.cost.workload import Workload
from shardwise.planner.accounting import ZERO, Accounting, StateBytes
from shardwise.planner.memory import MemoryEstimate, estimate_memory
from shardwise.spec.placement import PRESETS
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.schedule import PipelinePolicy
from shardwise.spec.shape import Attention, Block, Mlp, ModelShape

GIB = 1 << 30

#: The one number that is fitted here: the median, over the rows of BigScience's BLOOM chronicles, of what nvidia-smi
#: showed beyond tensors, context and communicators (torch 1.10 to 1.12).
FRAGMENTS_2022 = 0.206
FITTED = ("BigScience BLOOM",)

#: Sources whose first prediction showed that their framework had been misread; they are no proof.
CORRECTED = ("nanotron", "Alpa")

#: What other people's frameworks hold, from their code and papers. All were written down before errors were looked at.
MEGATRON = Accounting(
    states=StateBytes(weight=2, gradient=4, optimizer=12),
    is_fused=True,
    regathers=True,
    logit_bytes=8,
    embedding_blocks=0,
    source="Megatron-LM, distributed optimizer: bf16 weights, fp32 main gradients, fp32 masters and moments sharded;"
    " Transformer Engine's fused layers; the cross entropy's gradient lies where its softmax was",
)
NANOTRON = Accounting(
    states=StateBytes(weight=2, gradient=6, optimizer=12),
    embedding_blocks=0,
    source="nanotron: fp32 gradient accumulator beside 16-bit gradients, ZeRO-1; inputs of products are gathered over"
    " tensor-parallel ranks by an autograd function whose output the product saves (tp_linear_async_communication off)",
)
BLOOM_FP16 = Accounting(
    states=StateBytes(weight=2, gradient=2, optimizer=12, update=6),
    is_fused=True,
    keeps_scores=True,
    embedding_blocks=0,
    bucket_bytes=2 * 500_000_000,
    fragments=FRAGMENTS_2022,
    source="Megatron-DeepSpeed, ZeRO-1 over fp16 gradients, reduced in buckets of 5e8 elements; the step flattens a"
    " rank's part of the gradients and copies it to fp32",
)
BLOOM_BF16 = Accounting(
    states=StateBytes(weight=2, gradient=6, optimizer=12),
    is_fused=True,
    keeps_scores=True,
    embedding_blocks=1,
    fragments=FRAGMENTS_2022,
    source="Megatron-DeepSpeed, BF16_Optimizer: 16-bit gradients and an fp32 sum of them, neither sharded",
)
NO_ZERO = Accounting(
    states=StateBytes(weight=2, gradient=2, optimizer=12),
    is_fused=True,
    keeps_scores=True,
    embedding_blocks=0,
    fragments=FRAGMENTS_2022,
    source="mixed precision of ZeRO's paper, section 3.1: 16 bytes per parameter",
)


@dataclass(frozen=True, slots=True)
class Case:
    """A published run: what it trained, how, and which of the predicted bytes its figure is to be compared with."""

    source: str
    label: str
    shape: ModelShape
    plan: ParallelPlan
    cluster: Cluster
    workload: Workload
    accounting: Accounting
    measures: str
    measured_bytes: float | None
    ran_out: bool = False

    def estimate(self) -> MemoryEstimate:
        """The prediction."""
        return estimate_memory(self.shape, self.plan, self.cluster, self.workload, accounting=self.accounting)


#: Source, its framework's accounting, and what its figure is: bytes of tensors, or those that the device shows.
FRAMEWORKS = {
    "SimuMax": (MEGATRON, "allocated", GIB),
    "nanotron": (NANOTRON, "allocated", GIB),
    "BigScience BLOOM": (BLOOM_FP16, "device", 1e9),
    "BigScience GPT-2": (NO_ZERO, "device", 1e9),
    "Alpa": (NO_ZERO, "allocated", 1e9),
}


def rows() -> list[dict[str, str]]:
    """The published rows."""
    with (resources.files("shardwise.planner") / "data" / "published.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def case(row: dict[str, str]) -> Case | None:
    """The case of a row with a peak of memory, or that ran out of it; ``None``: neither."""
    ran_out = "OOM=true" in row["notes"]
    found = next((held for name, held in FRAMEWORKS.items() if row["source"].startswith(name)), None)
    if found is None or not (row["peak_mem_gb"] or ran_out):
        return None
    accounting, measures, unit = found
    if accounting is BLOOM_FP16 and row["precision"] == "bf16":
        accounting = BLOOM_BF16
    is_sharded = any(word in row["strategy"] for word in ("ZeRO", "dist-opt", "Alpa"))  # Alpa: prefer_reduce_scatter
    strategy = "zero1" if is_sharded else "ddp"
    number = {name: int(row[name] or 1) for name in ("dp", "tp", "pp", "cp", "vpp", "micro_batch", "gpus")}
    shape = shape_of(row)
    microbatches = max(int(row["global_batch"]) // (number["micro_batch"] * number["dp"]), 1)
    pipeline = None
    if number["pp"] > 1:
        schedule = "interleaved-1f1b" if number["vpp"] > 1 else "1f1b"
        virtual = number["vpp"] if number["vpp"] > 1 else None
        pipeline = PipelinePolicy(schedule, num_microbatches=microbatches, num_virtual_stages=virtual)
    plan = ParallelPlan(
        strategy=strategy,
        dp_shard=number["dp"],
        tp=number["tp"],
        pp=number["pp"],
        cp=number["cp"],
        sequence_parallel=number["tp"] > 1 and bool(re.search(r"SP|RS", row["strategy"])),
        pipeline=pipeline,
    )
    workload = Workload(
        seq_len=int(row["seq_len"]),
        global_batch=int(row["global_batch"]),
        micro_batch=number["micro_batch"],
        precision="fp16" if row["precision"].startswith("fp16") else "bf16",
        recompute=row["act_ckpt"] or "none",
    )
    cluster = Cluster(gpu=row["gpu"], num_gpus=number["gpus"], gpus_per_node=int(row["gpus_per_node"] or 8))
    label = f"{row['model']} {row['gpus']} GPUs tp{row['tp']} pp{row['pp']} dp{row['dp']} mbs{row['micro_batch']}"
    measured = float(row["peak_mem_gb"]) * unit if row["peak_mem_gb"] else None
    return Case(row["source"], label, shape, plan, cluster, workload, accounting, measures, measured, ran_out)


def shape_of(row: dict[str, str]) -> ModelShape:
    """A decoder with the row's sizes."""
    hidden, heads, vocab = int(row["hidden"]), int(row["heads"]), int(row["vocab"])
    is_gated = "gated" in row["notes"]
    is_tied = "tied" in row["notes"] or not is_gated
    norm = 1 if is_gated else 2
    block = Block(
        attention=Attention(
            heads=heads,
            head_dim=hidden // heads,
            kv_heads=int(row["kv_heads"] or heads),
            has_qkv_bias=not is_gated,
            has_out_bias=not is_gated,
            has_rotary=is_gated,
        ),
        feed_forward=Mlp(
            ffn=int(row["ffn"]), is_gated=is_gated, has_bias=not is_gated, activation="silu" if is_gated else "gelu"
        ),
        has_norm_bias=not is_gated,
        norm="rms" if is_gated else "layer",
    )
    return ModelShape(
        name=row["model"],
        family="llama" if is_gated else "gpt",
        hidden=hidden,
        vocab=vocab,
        stacks=((int(row["layers"]), block),),
        seq_len=int(row["seq_len"]),
        embedding=vocab * hidden,
        head=norm * hidden + (0 if is_tied else vocab * hidden),
        is_tied=is_tied,
        norm="rms" if is_gated else "layer",
    )


def predicted(found: MemoryEstimate, measures: str) -> int:
    """The bytes that a source's figure is compared with."""
    return {
        "allocated": found.allocated_bytes,
        "reserved": found.reserved_bytes,
        "device": found.device_bytes,
    }[measures]


def formula(row: dict[str, str]) -> float:
    """The twelve lines of the field: 18 bytes for each parameter, and Korthikanti's activations of 16-bit layers."""
    number = {name: int(row[name] or 1) for name in ("dp", "tp", "pp", "cp", "micro_batch", "layers", "heads")}
    h, seq, layers = int(row["hidden"]), int(row["seq_len"]) // number["cp"], number["layers"] // number["pp"]
    parameters = float(row["params_b"]) * 1e9 / (number["tp"] * number["pp"])
    is_sharded = "ZeRO" in row["strategy"] or "dist-opt" in row["strategy"]
    states = parameters * (6 + 12 / (number["dp"] * number["cp"] if is_sharded else 1))
    width = int(row["ffn"]) / h
    block = seq * number["micro_batch"] * h * (18 + 8 * width if "gated" in row["notes"] else 34) / number["tp"]
    if row["act_ckpt"] == "full":
        block = 2 * seq * number["micro_batch"] * h
    held = min(number["pp"], max(int(row["global_batch"]) // (number["micro_batch"] * number["dp"]), 1))
    logits = 4 * seq * number["micro_batch"] * int(row["vocab"]) / number["tp"]
    return states + max(held * layers * block, layers * block + logits)


def role(source: str) -> str:
    """Whether a source's rows were used for anything but judging."""
    if source.startswith(FITTED):
        return "fitted (1 number)"
    return "corrected once" if source.startswith(CORRECTED) else "held out"


def table(found: Mapping[str, Sequence[float]]) -> list[str]:
    """Errors by source, one line each."""
    lines = [f"{'source':<50} {'role':<18} rows  median    mean     p90   worst"]
    for source, signed in found.items():
        errors = sorted(abs(error) for error in signed)
        shown = (statistics.median(errors), statistics.mean(errors), _at(errors, 0.9), errors[-1])
        lines.append(f"{source:<50} {role(source):<18} {len(errors):>4}" + "".join(f"{e:>8.1%}" for e in shown))
    return lines


def _at(ordered: Sequence[float], share: float) -> float:
    """The nearest value of which at least ``share`` are no greater."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def main() -> None:
    """Print the tables."""
    errors: dict[str, list[float]] = {}
    baseline: dict[str, list[float]] = {}
    verdicts: list[str] = []
    ran_out = 0
    for row in rows():
        each = case(row)
        if each is None:
            continue
        estimate = each.estimate()
        capacity = find_gpu(row["gpu"]).memory_bytes
        ran_out += each.ran_out
        if each.ran_out and estimate.device_bytes <= capacity:
            verdicts.append(f"  ran out, said to fit: {each.label}: {estimate.device_bytes / GIB:.1f} GiB")
        if not each.ran_out and estimate.device_bytes > capacity:
            verdicts.append(f"  ran, said not to fit: {each.label}: {estimate.device_bytes / GIB:.1f} GiB")
        if each.measured_bytes is not None:
            errors.setdefault(each.source, []).append(predicted(estimate, each.measures) / each.measured_bytes - 1)
            baseline.setdefault(each.source, []).append(formula(row) / each.measured_bytes - 1)
    print("Memory: peak of the fullest GPU, predicted against published\n")
    print("\n".join(table(errors)))
    held = [abs(error) for source, found in errors.items() if role(source) == "held out" for error in found]
    print(f"{'all held-out rows':<69} {len(held):>4}{statistics.median(held):>8.1%}{statistics.mean(held):>8.1%}")
    print("\nA formula of twelve lines (18 bytes per parameter, Korthikanti's activations)\n")
    print("\n".join(table(baseline)))
    print(
        f"\nWrong verdicts on whether it fits, of {sum(map(len, errors.values()))} that ran and {ran_out} that ran out:"
    )
    print("\n".join(verdicts) or "  none")
    print(f"\nZeRO's table 1: {zero_cells()} of 54 cells reproduced to 4 digits")


def zero_cells() -> int:
    """Cells of table 1 of ZeRO (arXiv 1910.02054) that the placements give."""
    with (resources.files("shardwise.planner") / "data" / "zero_table1.csv").open(encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    right = 0
    for row in found:
        for strategy, column in (("zero1", "pos_gb"), ("zero2", "pos_g_gb"), ("zero3", "pos_g_p_gb")):
            held = sum(ZERO.of(PRESETS[strategy], int(row["dp"]))) * float(row["params_b"])
            right += abs(held / float(row[column]) - 1) < 0.0005
    return right


if __name__ == "__main__":
    main()
