"""Published measurements as the planner's own objects: each row a model, a plan, a cluster and a workload.

The table is ``data/published.csv``; every row names its source. What a source does not say is left at the default of
the framework that it used (``FRAMEWORKS``), never chosen by what fits its time.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench.software  # noqa: F401  the names below
from shardwise.cost.hardware import Cluster
from shardwise.cost.workload import Workload
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.policies import PrecisionPolicy
from shardwise.spec.schedule import PipelinePolicy
from shardwise.spec.shape import ModelShape

#: Where the rows lie, and the table of ZeRO's model states.
TABLE = Path(__file__).with_name("data") / "published.csv"

#: The beginning of a source's name, a short name for it, and the software that it ran (``bench.software``).
FRAMEWORKS = (
    ("MosaicML", "mosaic", "pytorch-2023"),
    ("vTrain", "vtrain", "megatron-2021"),
    ("BigScience BLOOM", "bloom", "megatron-deepspeed"),
    ("BigScience GPT-2", "bigscience-gpt2", "megatron-deepspeed"),
    ("MegaScale", "megascale", "megatron-2021"),
    ("Megatron-LM 2020", "megatron-2020", "megatron-2021"),
    ("Megatron-LM README", "megatron-core-0.8", "megatron-core"),
    ("NeMo 24", "nemo-24.07", "megatron-core"),
    ("NeMo long", "nemo-long", "megatron-core"),
    ("Megatron-Bridge", "megatron-bridge", "megatron-core"),
    ("SimuMax", "simumax", "megatron-core-plain"),
    ("nanotron", "nanotron", "nanotron"),
    ("torchtitan", "torchtitan", "torchtitan"),
    ("shardwise", "shardwise", "pytorch"),
    ("PyTorch/IBM float8", "ibm-float8", "pytorch-2024"),
    ("foundation-model-stack", "fms-fsdp", "pytorch-2024"),
    ("PyTorch FSDP paper", "fsdp-paper", "pytorch-2022"),
    ("PyTorch FSDP API", "fsdp-blog", "pytorch-2022"),
    ("DeepSpeed ZeRO-3", "zero-offload", "pytorch-2022"),
    ("OPT", "opt", "megatron-2021"),
    ("LLaMA", "llama", "megatron-2021"),
    ("Alpa", "alpa", "megatron-2021"),
)

#: Names of GPUs in the table that the hardware table has under another one, and why that one.
SAME_GPU = {"Ampere(unnamed)": "A100-80GB-SXM", "V100-32GB-SXM3": "V100-32GB-SXM2"}


#: Sources that reduce gradients in 16 bit where their software does not by itself: foundation-model-stack's FSDP uses
#: its policy ``bfSixteen`` (fms_fsdp/policies/mixed_precision.py).
_REDUCES_BF16 = ("foundation-model-stack",)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One measurement.

    Attributes:
        source: Short name of its source.
        url: Where it was published.
        software: The generation of software that ran (``cost.software``).
        shape: The model.
        plan: How it was distributed.
        cluster: On what.
        workload: What a step trained.
        step_time_s: Seconds of a step; ``None``: not published, or not to be derived.
        peak_memory: Bytes, in the source's own way of counting; ``None``: not published.
        is_core: The configuration is known entirely.
        notes: What the source says besides.
    """

    source: str
    url: str
    software: str
    shape: ModelShape
    plan: ParallelPlan
    cluster: Cluster
    workload: Workload
    step_time_s: float | None
    peak_memory: float | None
    is_core: bool
    notes: str


@functools.cache
def published_rows() -> tuple[PublishedRow, ...]:
    """Every row of the table whose model, degrees and batch are known."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return tuple(made for row in csv.DictReader(file) if (made := _row(row)) is not None)


def _row(row: Mapping[str, str]) -> PublishedRow | None:
    def number(field: str) -> int:
        return int(float(row[field] or 0))

    needed = ("layers", "hidden", "heads", "ffn", "vocab", "seq_len", "gpus", "global_batch")
    if not all(row[field] for field in needed):
        return None
    source, software = next((short, used) for start, short, used in FRAMEWORKS if row["source"].startswith(start))
    software += "-async-tp" if software == "torchtitan" and "AsyncTP" in row["strategy"] else ""
    degrees = {axis: number(axis) or 1 for axis in ("tp", "pp", "cp")}
    world = number("gpus")
    source += "-16" if (source, world) == ("nanotron", 16) else ""  # a broken network: ``bench.predictions.EXCLUDED``
    ranks = world // (degrees["tp"] * degrees["pp"] * degrees["cp"])
    micro_batch = number("micro_batch") or 1
    if world % (degrees["tp"] * degrees["pp"] * degrees["cp"]) or number("global_batch") % (micro_batch * ranks):
        return None  # a step of unequal microbatches, or degrees that do not make the world
    shape = ModelShape.decoder(
        layers=number("layers"),
        hidden=number("hidden"),
        heads=number("heads"),
        kv_heads=number("kv_heads") or None,
        ffn=number("ffn"),
        vocab=number("vocab"),
        seq_len=number("seq_len"),
        gated="mlp=gated" in row["notes"],
        tied=_is_tied(row),
    )
    if software.startswith("megatron"):  # --make-vocab-size-divisible-by, by default 128 on each rank of tp
        shape = shape.padded(128 * degrees["tp"])[1]
    return PublishedRow(
        source=source,
        url=row["url"],
        software=software,
        shape=shape,
        plan=_plan(row, degrees, number("global_batch") // (micro_batch * ranks)),
        cluster=Cluster(
            gpu=SAME_GPU.get(row["gpu"], row["gpu"]),
            num_gpus=world,
            gpus_per_node=number("gpus_per_node") or 8,
            inter_gbits_per_s_per_node=float(row["inter_gbps"]) if row["inter_gbps"] else None,
        ),
        workload=Workload(
            seq_len=number("seq_len"),
            global_batch=number("global_batch"),
            micro_batch=micro_batch,
            precision="fp8" if "fp8" in row["precision"] else "fp16" if "fp16" in row["precision"] else "bf16",
            optimizer="sgd" if row["optimizer"] == "SGD" else "adamw",
            recompute=_recompute(row),
            compile=_compiles(row),
        ),
        step_time_s=float(row["step_time_s"]) if row["step_time_s"] else None,
        peak_memory=float(row["peak_mem_gb"]) if row["peak_mem_gb"] else None,
        is_core=row["core"] == "1",
        notes=row["notes"],
    )


def _is_tied(row: Mapping[str, str]) -> bool:
    """Megatron's GPT shares the embedding with the head; others where they say so."""
    return "tied embeddings" in row["notes"] or row["source"].startswith(("BigScience", "vTrain", "Alpa"))


def _plan(row: Mapping[str, str], degrees: Mapping[str, int], num_microbatches: int) -> ParallelPlan:
    given = row["strategy"]
    kind = "ddp"
    for strategy, marks in (
        ("hsdp", ("HSDP", "HYBRID", "Megatron-FSDP")),
        ("zero3", ("FSDP", "ZeRO-3")),
        ("zero2", ("ZeRO-2",)),
        ("zero1", ("ZeRO-1", "dist-opt")),
    ):
        if any(mark in given for mark in marks):
            kind = strategy
            break
    options: dict[str, Any] = dict(degrees)
    if group := re.search(r"FSDP sharding group=(\d+)", row["notes"]):
        options["dp_shard"] = int(group[1])
    if degrees["pp"] > 1:
        options["pipeline"] = _pipeline(row, degrees["pp"], num_microbatches)
    if row["source"].startswith("PyTorch FSDP API"):  # it wraps single linear layers
        options["auto_wrap_policy"] = {"by_class": ["Block", "Linear"]}
    divides = degrees["tp"] > 1 and ("SP" in given or "(RS)" in given or given.startswith("FSDP2"))
    return ParallelPlan(
        strategy=kind,
        sequence_parallel=divides,
        activation_checkpointing="full" if row["act_ckpt"] == "full" else "none",
        offload_policy="cpu" if "param-cpu" in row["offload"] else "none",
        offload_activations="activation-cpu" in row["offload"],
        mp_policy=PrecisionPolicy(reduce_dtype="bf16") if row["source"].startswith(_REDUCES_BF16) else None,
        **options,
    )


def _pipeline(row: Mapping[str, str], pp: int, num_microbatches: int) -> PipelinePolicy:
    virtual = int(float(row["vpp"])) if row["vpp"] else _usual_stages(row, pp)
    if virtual > 1 and num_microbatches % pp == 0:
        return PipelinePolicy(
            schedule="interleaved-1f1b", num_virtual_stages=virtual, num_microbatches=num_microbatches
        )
    return PipelinePolicy(schedule="1f1b", num_microbatches=num_microbatches)


def _usual_stages(row: Mapping[str, str], pp: int) -> int:
    """Stages of a rank where Megatron-Core's own table does not say: as many as have two blocks each, as its examples.

    Its README says that messages of the pipeline are overlapped, which its interleaved schedule alone does.
    """
    each = int(float(row["layers"])) // pp
    if not row["source"].startswith("Megatron-LM README H100") or int(float(row["layers"])) % pp:
        return 1
    return max(stages for stages in range(1, max(each // 2, 1) + 1) if each % stages == 0)


def _compiles(row: Mapping[str, str]) -> bool:
    """Whether the model was compiled; torchtitan's float8 and its asynchronous tensor parallelism need that."""
    needs = row["source"].startswith("torchtitan") and ("fp8" in row["precision"] or "AsyncTP" in row["strategy"])
    return "torch.compile" in row["strategy"] or needs


def _recompute(row: Mapping[str, str]) -> str | int:
    """What backward computed again; ``every layer-N`` is Llama's option of torchtitan: every second block."""
    given = row["act_ckpt"]
    if "every layer" in given:
        return int(float(row["layers"])) // 2
    return given if given in {"full", "selective"} else "selective" if "selective" in given else "none"
