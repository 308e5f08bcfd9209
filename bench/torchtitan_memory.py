"""Reserved memory of torchtitan's published runs beside what this engine would hold with the same degrees.

A check on runs that are not in ``published.csv``: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 to
4 (H100 with 96 GB; reserved GiB of the fullest GPU). Nothing is fitted on them. torchtitan runs FSDP2, not this engine,
and its selective checkpointing keeps every second product, where ours keeps all.
"""

from __future__ import annotations

from typing import NamedTuple

from bench.accounting import TORCHTITAN
from shardwise.cost.workload import Workload
from shardwise.planner.memory import memory_on
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.policies import PrecisionPolicy
from shardwise.spec.shape import ModelShape

GIB = 1 << 30


class Run(NamedTuple):
    """A row of the tables."""

    model: str
    gpus: int
    seq_len: int
    micro_batch: int
    recompute: str
    is_compiled: bool
    reserved_gib: float
    cp: int = 1
    tp: int = 1


RUNS = (
    Run("llama-3-8b", 8, 8192, 2, "selective", is_compiled=False, reserved_gib=82.4),
    Run("llama-3-8b", 8, 8192, 2, "selective", is_compiled=True, reserved_gib=77.0),
    Run("llama-3-8b", 128, 8192, 2, "selective", is_compiled=False, reserved_gib=67.0),
    Run("llama-3-8b", 128, 8192, 2, "selective", is_compiled=True, reserved_gib=62.0),
    Run("llama-3-8b", 8, 32768, 1, "full", is_compiled=True, reserved_gib=83.9),
    Run("llama-3-8b", 8, 65536, 1, "full", is_compiled=True, reserved_gib=84.2, cp=2),
    Run("llama-3-8b", 8, 131072, 1, "full", is_compiled=True, reserved_gib=84.0, cp=4),
    Run("llama-3-8b", 8, 262144, 1, "full", is_compiled=True, reserved_gib=84.5, cp=8),
    Run("llama-3-70b", 256, 8192, 16, "full", is_compiled=True, reserved_gib=71.9, tp=8),
)


def predicted_gib(run: Run) -> float:
    """Reserved memory that the planner predicts for this engine."""
    ranks = run.gpus // (run.tp * run.cp)
    plan = ParallelPlan(
        strategy="zero3",
        dp_shard=ranks,
        tp=run.tp,
        cp=run.cp,
        sequence_parallel=run.tp > 1,
        mp_policy=PrecisionPolicy(param_dtype="bf16", reduce_dtype="fp32"),
    )
    workload = Workload(
        seq_len=run.seq_len,
        global_batch=run.micro_batch * ranks,
        micro_batch=run.micro_batch,
        recompute=run.recompute,
        compile=run.is_compiled,
    )
    found = memory_on("cuda", ModelShape.from_config(run.model), plan, workload, accounting=TORCHTITAN)
    return found.reserved_bytes / GIB


def main() -> None:
    """Print the runs."""
    print("model        GPUs  seq_len  tp  cp  recompute  compiled  published  predicted   error")
    for run in RUNS:
        found = predicted_gib(run)
        print(
            f"{run.model:<12} {run.gpus:>4} {run.seq_len:>8} {run.tp:>3} {run.cp:>3}  {run.recompute:<10}"
            f" {'yes' if run.is_compiled else 'no':<8} {run.reserved_gib:>9.1f} {found:>10.1f}"
            f" {found / run.reserved_gib - 1:>+7.1%}"
        )


if __name__ == "__main__":
    main()
