"""Questions that people ask, the first plan of the planner, and what experts run (``python -m bench.questions``).

Writes the table of docs/planning.md. ``--check`` writes nothing and fails where a first plan is none of the right ones.
What is right is said by strategies and axes, not by degrees that a batch decides; each has the page where such a run,
or the advice, is published.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

from shardwise.planner import Cluster, Estimate, Workload, search
from shardwise.planner.explain import seconds, title
from shardwise.planner.memory import num_microbatches
from shardwise.spec.shape import find_shape

PAGE = Path(__file__).parents[1] / "docs" / "planning.md"
START, END = "<!-- made by python -m bench.questions -->\n", "<!-- end of the questions -->\n"

_BRIDGE = "https://docs.nvidia.com/nemo/megatron-bridge"
_HF = "https://huggingface.co/docs"
SOURCES = {
    "bridge": (
        "Megatron-Bridge, recipes",
        f"{_BRIDGE}/nightly/apidocs/bridge/bridge.perf_recipes.llama.h100.llama3.html",
    ),
    "bridge405": (
        "Megatron-Bridge, recipes",
        f"{_BRIDGE}/nightly/apidocs/bridge/bridge.perf_recipes.llama.h100.llama31.html",
    ),
    "perf": (
        "NeMo, performance",
        "https://docs.nvidia.com/nemo-framework/user-guide/latest/performance/performance_summary.html",
    ),
    "long": (
        "NeMo, long sequences",
        "https://docs.nvidia.com/nemo-framework/user-guide/latest/performance/performance_long_sequence.html",
    ),
    "guide": ("Megatron-Bridge, tuning guide", f"{_BRIDGE}/latest/performance-guide.html"),
    "titan": ("torchtitan, performance", "https://github.com/pytorch/torchtitan/blob/main/docs/performance.md"),
    "titan25": ("TorchTitan, arXiv 2410.06511", "https://arxiv.org/abs/2410.06511"),
    "fsdp": ("PyTorch FSDP, arXiv 2304.11277", "https://arxiv.org/abs/2304.11277"),
    "mosaic": (
        "llm-foundry, benchmarks",
        "https://github.com/mosaicml/llm-foundry/tree/main/scripts/train/benchmarking",
    ),
    "sc21": ("Megatron-LM, arXiv 2104.04473", "https://arxiv.org/abs/2104.04473"),
    "offload": ("DeepSpeed, ZeRO-Offload", "https://www.deepspeed.ai/tutorials/zero-offload/"),
    "mics": ("MiCS, arXiv 2205.00119", "https://arxiv.org/abs/2205.00119"),
    "methods": ("Transformers, parallelism methods", f"{_HF}/transformers/perf_train_gpu_many"),
    "peft": ("PEFT, FSDP", f"{_HF}/peft/accelerate/fsdp"),
    "handbook": (
        "alignment-handbook, recipes",
        "https://github.com/huggingface/alignment-handbook/blob/main/scripts/README.md",
    ),
    "recipes": ("llama-recipes, multi-GPU", "https://github.com/meta-llama/llama-recipes/blob/main/docs/multi_gpu.md"),
}


class Question(NamedTuple):
    """A model, a cluster, a batch; what experts run, in words and as titles; and the source."""

    model: str
    gpu: str
    num_gpus: int
    seq_len: int
    global_batch: int
    expert: str
    right: str
    source: str
    lora: int | None = None
    gbits: float | None = None
    precision: str = "bf16"

    @property
    def first(self) -> Estimate:
        """The first plan."""
        cluster = Cluster(
            gpu=self.gpu,
            num_gpus=self.num_gpus,
            gpus_per_node=min(self.num_gpus, 8),
            inter_gbits_per_s_per_node=self.gbits,
        )
        workload = Workload(
            seq_len=self.seq_len, global_batch=self.global_batch, precision=self.precision, lora_rank=self.lora
        )
        return search(find_shape(self.model), cluster, workload)[0]

    @property
    def words(self) -> str:
        """The question."""
        what = f"LoRA of {self.model}" if self.lora else self.model
        network = f", {self.gbits:.0f} Gbit/s" if self.gbits else ""
        return (
            f"{what} on {self.num_gpus:,} x {self.gpu}{network}, {self.seq_len:,} tokens, batch {self.global_batch:,}"
        )


QUESTIONS = (
    Question("llama-3-8b", "H100-80GB-SXM", 8, 8192, 64, "FSDP", "zero3", "titan25"),
    Question("llama-3-8b", "H100-80GB-SXM", 64, 8192, 256, "FSDP", r"zero3|hsdp \S+", "titan25"),
    Question("llama-3-8b", "H100-80GB-SXM", 128, 8192, 256, "FSDP", r"zero3|hsdp \S+", "titan25"),
    Question("llama-3-8b", "H100-80GB-SXM", 512, 8192, 1024, "FSDP in groups of nodes (HSDP)", r"hsdp \S+", "mics"),
    Question("llama-3-70b", "H100-80GB-SXM", 64, 8192, 128, "FSDP, recompute; tp4 pp4 cp2", "zero3", "titan"),
    Question(
        "llama-3-70b",
        "H100-80GB-SXM",
        256,
        8192,
        512,
        "FSDP or HSDP, also with tp8",
        r"(zero3|hsdp \S+)( tp8)?",
        "titan25",
    ),
    Question("llama-3-70b", "A100-80GB-SXM", 64, 8192, 64, "FSDP, all recomputed", "zero3", "titan"),
    Question("llama-3-70b", "A100-80GB-SXM", 1024, 4096, 1024, "HSDP in groups of nodes", r"hsdp \S+", "mics"),
    Question("llama-3.1-405b", "H100-80GB-SXM", 512, 8192, 512, "FSDP and tp8", r"zero3 tp\d", "titan25"),
    Question(
        "llama-3.1-405b",
        "H100-80GB-SXM",
        1024,
        8192,
        1024,
        "tp8 pp8 cp2; FSDP and tp8",
        r"zero1 tp8 pp.*|(zero3|hsdp \S+) tp\d",
        "bridge405",
    ),
    Question("llama-3-8b", "H200-141GB-SXM", 8, 8192, 64, "ZeRO-1 or FSDP, no other axis", "zero1|zero3", "perf"),
    Question("llama-3-70b", "H200-141GB-SXM", 64, 8192, 128, "FSDP, also with tp2", r"zero3( tp2)?", "perf"),
    Question("llama-3-8b", "B200-180GB-SXM", 8, 8192, 64, "FSDP or ZeRO-1, no other axis", "zero1|zero3", "perf"),
    Question("llama-3-70b", "B200-180GB-SXM", 64, 8192, 128, "FSDP, no other axis", "zero3", "perf"),
    Question("llama-3-8b", "A100-80GB-SXM", 8, 4096, 64, "FSDP or ZeRO-3", "zero3", "handbook"),
    Question("llama-3-8b", "A100-40GB-SXM", 8, 4096, 64, "FSDP, blocks recomputed", "zero3", "methods"),
    Question("llama-2-7b", "A100-80GB-SXM", 64, 4096, 256, "FSDP", r"zero3|hsdp \S+", "mosaic"),
    Question("llama-2-13b", "A100-80GB-SXM", 16, 4096, 128, "FSDP", r"zero3|hsdp \S+", "mosaic"),
    Question("llama-2-13b", "A100-80GB-SXM", 64, 4096, 128, "FSDP, nothing recomputed", "zero3", "titan"),
    Question(
        "llama-2-13b",
        "A100-80GB-SXM",
        16,
        4096,
        128,
        "a pipeline between nodes, ZeRO-1",
        "zero1 pp[24] .*",
        "methods",
        gbits=100,
    ),
    Question(
        "llama-3-8b",
        "H100-80GB-SXM",
        16,
        8192,
        64,
        "a pipeline between nodes, ZeRO-1",
        "zero1 pp2 .*",
        "methods",
        gbits=100,
    ),
    Question("llama-2-7b", "RTX4090", 4, 2048, 32, "ZeRO, states on the host", "zero3 offload.*", "offload"),
    Question("llama-2-7b", "RTX4090", 4, 2048, 32, "DDP, recomputed", "ddp", "methods", lora=16),
    Question("llama-2-7b", "RTX4090", 1, 2048, 16, "one card, recomputed", "one GPU", "handbook", lora=16),
    Question("llama-2-7b", "L4", 1, 2048, 16, "one card, recomputed", "one GPU", "handbook", lora=16),
    Question("llama-3-8b", "A100-40GB-SXM", 1, 2048, 16, "one card", "one GPU", "handbook", lora=16),
    Question("llama-3-8b", "A100-40GB-SXM", 4, 2048, 32, "DDP, or FSDP", "ddp|zero3", "recipes", lora=16),
    Question("llama-3-70b", "A100-80GB-SXM", 4, 2048, 32, "FSDP, recomputed", "zero3", "recipes", lora=16),
    Question("llama-3-70b", "H100-80GB-SXM", 8, 2048, 64, "FSDP; pp4", "zero3|ddp pp4 .*", "peft", lora=16),
    Question("llama-3-70b", "H100-80GB-SXM", 8, 4096, 32, "ZeRO-3, states on the host", "zero3 offload.*", "offload"),
    Question("llama-3-8b", "H100-80GB-SXM", 8, 131072, 8, "FSDP and cp8", r"zero3 cp\d+", "long"),
    Question("llama-3-8b", "H100-80GB-SXM", 64, 131072, 64, "cp and sharded states", r"(zero3|hsdp \S+) cp\d+", "long"),
    Question("llama-3-8b", "H100-80GB-SXM", 8, 32768, 32, "cp2 to cp4 and sharded states", r"zero3 cp\d+", "long"),
    Question("llama-3-8b", "MI300X", 8, 8192, 64, "FSDP or ZeRO-1, no other axis", "zero1|zero3", "methods"),
    Question("llama-3-70b", "MI300X", 8, 8192, 64, "FSDP, recomputed", "zero3", "methods"),
    Question("llama-3-70b", "MI300X", 64, 8192, 128, "FSDP", "zero3", "methods"),
    Question("gpt2", "RTX4090", 1, 1024, 64, "one card", "one GPU", "methods"),
    Question("gpt2", "A100-40GB-SXM", 8, 1024, 512, "DDP", "ddp", "methods"),
    Question("gpt2-xl", "V100-32GB-SXM2", 8, 1024, 128, "ZeRO", r"zero\d", "methods", precision="fp16"),
    Question("bert-base", "V100-32GB-SXM2", 8, 512, 256, "DDP", "ddp", "methods", precision="fp16"),
    Question("qwen2.5-0.5b", "RTX4090", 2, 2048, 32, "DDP or ZeRO-1", "ddp|zero1", "methods"),
    Question("llama-3.2-1b", "A100-80GB-SXM", 8, 4096, 128, "DDP or ZeRO", r"ddp|zero\d", "methods"),
    Question("llama-3.2-3b", "A100-80GB-SXM", 8, 4096, 128, "ZeRO or FSDP", r"zero\d", "methods"),
    Question("llama-3.2-1b", "RTX4090", 1, 2048, 32, "states on the host", "(one GPU|zero3) offload.*", "offload"),
    Question("opt-6.7b", "A100-40GB-SXM", 4, 2048, 64, "FSDP or ZeRO-3", "zero3", "methods"),
    Question(
        "gpt-175b",
        "A100-80GB-SXM",
        1024,
        2048,
        1536,
        "tp8 and a pipeline; FSDP",
        r"zero1 tp8 pp.*|hsdp \S+|zero3",
        "sc21",
    ),
    Question("gpt-175b", "A100-40GB-SXM", 128, 2048, 1024, "tp8 pp16", "tp8 pp16 .*", "sc21"),
    Question("gpt-1t", "A100-80GB-SXM", 3072, 2048, 3072, "tp8 pp64", "(zero1|ddp) tp8 pp64 .*", "sc21"),
    Question("mixtral-8x7b", "H100-80GB-SXM", 64, 4096, 256, "ep8, sharded states", "zero[123] ep8", "perf"),
    Question("qwen3-30b-a3b", "H100-80GB-SXM", 8, 4096, 64, "ep8, sharded states", "zero[123] ep8", "guide"),
)


def is_right(question: Question, made: Estimate) -> bool:
    """Whether a first plan is one of those that experts run; a loss in chunks divides nothing."""
    return made.fits and re.fullmatch(question.right, title(made).removesuffix(" chunked-loss")) is not None


def rows() -> list[tuple[Question, Estimate, bool]]:
    """Every question with its first plan, and whether that is right."""
    return [(each, made, is_right(each, made)) for each, made in ((each, each.first) for each in QUESTIONS)]


def table(found: list[tuple[Question, Estimate, bool]]) -> str:
    """The page's table."""
    right = sum(is_one for _, _, is_one in found)
    lines = [
        f"{right} of {len(found)} first plans are ones that experts run.",
        "",
        "| question | first plan | batch | recompute | step | experts run | source | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for question, made, is_one in found:
        name, url = SOURCES[question.source]
        batch = f"{made.workload.micro_batch} x {num_microbatches(made.plan, made.workload)}"
        cells = (question.words, f"`{title(made)}`", batch, str(made.workload.recompute), seconds(made.step_time_s))
        lines.append(f"| {' | '.join(cells)} | {question.expert} | [{name}]({url}) | {'yes' if is_one else '**no**'} |")
    return "\n".join(lines)


def main() -> int:
    """Write the table, or check the first plans."""
    parser = argparse.ArgumentParser(description="First plans beside what experts run.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a first plan is not right")
    given = parser.parse_args()
    found = rows()
    for question, made, is_one in found:
        if not is_one:
            print(f"{question.words}: {title(made)}; experts run {question.expert}")
    if given.check:
        return sum(not is_one for _, _, is_one in found)
    before, _, rest = PAGE.read_text("utf-8").partition(START)
    PAGE.write_text(f"{before}{START}{table(found)}\n{END}{rest.partition(END)[2]}", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
