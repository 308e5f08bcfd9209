"""Memory and time of each strategy for three models, in docs/which-plan.md (``python -m bench.strategy_table``).

The planner predicts both; a test holds the page against it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import shardwise as sw
from bench.memory_table import POLICIES, ROWS
from shardwise.planner import Cluster, Estimate, Workload, search
from shardwise.planner.explain import gib, seconds
from shardwise.planner.memory import num_microbatches

PAGE = Path(__file__).parents[1] / "docs" / "which-plan.md"
START, END = "<!-- made by python -m bench.strategy_table -->\n", "\n<!-- end of the table -->"
STRATEGIES = ("ddp", "zero1", "zero2", "shard_grad_op", "zero3")
#: Bytes that a rank of many sends for each byte of the parameters in a step with one microbatch.
SENT = {"ddp": 2, "zero1": 2, "zero2": 2, "shard_grad_op": 2, "zero3": 3}
PRECISION = "bf16, fp32 gradients"


class Case(NamedTuple):
    """A model, what it is trained on, and with which batch."""

    model: str
    gpu: str
    num_gpus: int
    seq_len: int
    global_batch: int

    @property
    def title(self) -> str:
        return f"{self.model} on {self.num_gpus} x {self.gpu}"


CASES = (
    Case("gpt2-xl", "A100-40GB-SXM", 8, 1024, 256),
    Case("llama-3-8b", "H100-80GB-SXM", 8, 8192, 64),
    Case("llama-3-70b", "H100-80GB-SXM", 64, 8192, 256),
)


def best(case: Case, strategy: str) -> Estimate:
    """The recommended plan of this strategy with data parallelism alone and nothing offloaded."""
    found = search(
        sw.ModelShape.from_config(case.model),
        Cluster(gpu=case.gpu, num_gpus=case.num_gpus),
        Workload(seq_len=case.seq_len, global_batch=case.global_batch),
        strategy=strategy,
        tp=1,
        pp=1,
        cp=1,
        ep=1,
        offload_policy="none",
        offload_activations=False,
    )
    return found[0]


def cell(case: Case, strategy: str) -> str:
    made = best(case, strategy)
    if not made.fits:
        return f"does not fit ({gib(made.memory.device_bytes)})"
    how = made.plan.activation_checkpointing
    batch = f"{made.workload.micro_batch}x{num_microbatches(made.plan, made.workload)}"
    recomputed = "" if how == "none" else f", {how}"
    return f"{gib(made.memory.device_bytes)}, **{seconds(made.step_time_s)}** ({batch}{recomputed})"


def table() -> str:
    place = list(POLICIES).index(PRECISION)
    formulas = {row.strategy: row.formula(place) for row in ROWS if not row.steps_in_backward}
    lines = [
        f"| strategy | bytes per parameter | sent | {' | '.join(case.title for case in CASES)} |",
        "|---" * (3 + len(CASES)) + "|",
    ]
    for strategy in STRATEGIES:
        cells = [f"`{strategy}`", formulas[strategy], f"{SENT[strategy]}x", *(cell(case, strategy) for case in CASES)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    before, _, rest = PAGE.read_text("utf-8").partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{START}\n{table()}{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
