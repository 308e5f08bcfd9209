"""Recipes: for known models on 8, 64 and 1,024 GPUs the plan, its configuration and what to expect, in docs/recipes.md.

    python -m bench.recipes

The planner chooses and predicts; tests hold the page against it and load every configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from shardwise.cli.plan_file import configuration
from shardwise.planner import Cluster, Estimate, Workload, search
from shardwise.planner.explain import gib, seconds, title
from shardwise.planner.fit import first_fit
from shardwise.planner.memory import num_microbatches
from shardwise.spec.shape import ModelShape
from shardwise.spec.shape.gpt import PRESETS

PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"
START, END = "<!-- made by python -m bench.recipes -->\n", "<!-- end of the recipes -->\n"
GPU = "H100-80GB-SXM"
#: A checkpoint about so often.
_SAVED_EVERY_S = 1800


class Model(NamedTuple):
    """A model, and what it is trained on."""

    name: str
    title: str
    seq_len: int
    batches: dict[int, int]

    @property
    def section(self) -> dict[str, Any]:
        """The configuration's section: a preset, or the folder with the model's ``config.json``."""
        return {"preset": self.name} if self.name in PRESETS else {"hf": self.name}

    def file(self, num_gpus: int) -> str:
        return f"{self.name}-{num_gpus}.yaml"

    def cluster(self, num_gpus: int) -> Cluster:
        return Cluster(gpu=GPU, num_gpus=num_gpus)

    def workload(self, num_gpus: int) -> Workload:
        return Workload(seq_len=self.seq_len, global_batch=self.batches[num_gpus])


#: Sequences of a step by the number of GPUs: 0.25 to 1 million tokens on 8 GPUs, 2 to 4 on 64, and 16 on 1,024.
MODELS = (
    Model("llama-3-8b", "Llama 3 8B", 8192, {8: 64, 64: 512, 1024: 2048}),
    Model("llama-3-70b", "Llama 3 70B", 8192, {8: 64, 64: 512, 1024: 2048}),
    Model("qwen3-30b-a3b", "Qwen3 30B-A3B, a mixture of 128 experts", 4096, {8: 128, 64: 1024, 1024: 4096}),
    Model("gpt-1t", "GPT 1T", 2048, {8: 128, 64: 1024, 1024: 8192}),
)


def best(model: Model, num_gpus: int) -> Estimate:
    """The recommended plan."""
    return search(ModelShape.from_config(model.name), model.cluster(num_gpus), model.workload(num_gpus))[0]


def figures(made: Estimate) -> tuple[str, ...]:
    """What is expected of a step, as the page's table shows it."""
    tokens_per_s = made.workload.global_batch * made.workload.seq_len / made.step_time_s
    recompute = made.workload.recompute
    return (
        f"`{title(made)}`" + (f", recompute {recompute}" if recompute != "none" else ""),
        f"{made.workload.micro_batch} x {num_microbatches(made.plan, made.workload)}",
        seconds(made.step_time_s),
        f"{tokens_per_s:,.0f}",
        f"{tokens_per_s * 86400 / 1e9:,.1f} billion",
        f"{made.mfu:.0%}",
        gib(made.memory.device_bytes),
    )


COLUMNS = ("GPUs", "plan", "batch", "step", "tokens/s", "tokens a day", "MFU", "memory of a GPU")


def run_configuration(model: Model, made: Estimate) -> dict[str, Any]:
    """What the page shows as a file."""
    every = max(1, round(_SAVED_EVERY_S / made.step_time_s / 10)) * 10
    return {**configuration(made, model.section), "checkpoint": {"every": every}}


def least_gpus(model: Model, num_gpus: int) -> int | None:
    """The fewest GPUs, doubled from ``num_gpus``, on which a plan fits with as many sequences for each."""
    shape = ModelShape.from_config(model.name)
    for times in (2, 4, 8, 16, 32, 64, 128):
        workload = Workload(seq_len=model.seq_len, global_batch=times * model.batches[num_gpus])
        if first_fit(shape, Cluster(gpu=GPU, num_gpus=times * num_gpus), workload, {}) is not None:
            return times * num_gpus
    return None


def section(model: Model) -> str:
    """A model's part of the page."""
    found = {num_gpus: best(model, num_gpus) for num_gpus in model.batches}
    lines = [f"## {model.title}", "", f"Sequences of {model.seq_len:,} tokens.", ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for num_gpus, made in found.items():
        cells = figures(made)
        if not made.fits:
            least = least_gpus(model, num_gpus)
            says = f"does not fit, with all memory saved: {made.reason}"
            cells = (says + (f"; {least:,} GPUs hold it" if least else ""), *[""] * (len(COLUMNS) - 2))
        lines.append(f"| {num_gpus:,} | {' | '.join(cells)} |")
    for num_gpus, made in found.items():
        if made.fits:
            lines += ["", *recipe(model, num_gpus, made)]
    return "\n".join(lines) + "\n"


def recipe(model: Model, num_gpus: int, made: Estimate) -> list[str]:
    """A configuration and the command that writes its job."""
    content = yaml.safe_dump(run_configuration(model, made), sort_keys=False)
    file = model.file(num_gpus)
    command = f"shardwise launch --slurm {file} --gpus {num_gpus} --out {Path(file).stem}.sbatch"
    return [f"{num_gpus:,} GPUs, `{file}`:", "", f"```yaml\n{content}```", "", f"```console\n$ {command}\n```"]


def main() -> None:
    before, _, rest = PAGE.read_text("utf-8").partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{START}\n" + "\n".join(map(section, MODELS)) + f"\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
