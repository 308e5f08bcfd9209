"""Write the table of docs/memory.md: bytes per parameter that a rank holds, from dry runs of the real engine.

    python -m bench.memory_table

Takes about two minutes on one core. No process is started and no value is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

import shardwise as sw
from shardwise.models import gpt
from shardwise.testing import probe

PAGE = Path(__file__).resolve().parents[1] / "docs" / "memory.md"
MODEL, WORLDS = "gpt2-medium", (8, 64)
START, END = "<!-- made by python -m bench.memory_table -->\n", "<!-- end of the table -->\n"

POLICIES = {
    "fp32": None,
    "bf16, fp32 gradients": sw.PrecisionPolicy(param_dtype="bf16", reduce_dtype="fp32"),
    "bf16, bf16 gradients": sw.PrecisionPolicy(param_dtype="bf16", reduce_dtype="bf16"),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """Bytes per parameter: ``whole`` on every rank and ``cut`` divided by the ranks, by precision."""

    strategy: str
    whole: tuple[int, int, int]
    cut: tuple[int, int, int]
    steps_in_backward: bool = False

    def formula(self, place: int) -> str:
        """As text, for N ranks."""
        whole, cut = self.whole[place], self.cut[place]
        return " + ".join([*[str(whole)] * bool(whole), *[f"{cut}/N"] * bool(cut)])

    def value(self, place: int, world: int) -> float:
        """For so many ranks."""
        return self.whole[place] + self.cut[place] / world

    @property
    def name(self) -> str:
        """As the page shows it."""
        return f"`{self.strategy}`" + ", `sw.optimizer_in_backward`" * self.steps_in_backward


ROWS = (
    Row("ddp", (16, 18, 20), (0, 0, 0)),
    Row("zero1", (8, 6, 4), (8, 12, 16)),
    Row("zero2", (4, 2, 2), (12, 16, 16)),
    Row("shard_grad_op", (4, 2, 2), (16, 16, 16)),
    Row("zero3", (0, 0, 0), (16, 16, 16)),
    Row("ddp", (12, 14, 14), (0, 0, 0), steps_in_backward=True),
    Row("zero1", (4, 2, 2), (8, 12, 12), steps_in_backward=True),
    Row("zero2", (4, 2, 2), (8, 12, 12), steps_in_backward=True),
    Row("zero3", (0, 0, 0), (12, 12, 12), steps_in_backward=True),
)


def bytes_per_parameter(row: Row, policy: sw.PrecisionPolicy | None, world: int, model: str, **sizes: int) -> float:
    """What one rank of ``world`` holds of parameters, gradients and AdamW's state, divided by the parameters.

    With ``shard_grad_op`` the parameters that stay gathered from forward to backward are among them.
    """
    built: list[nn.Module] = []

    def build() -> nn.Module:
        built.append(gpt(model, **sizes))
        return built[-1]

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        adamw = torch.optim.AdamW(parameters, lr=1e-3)
        if row.steps_in_backward:
            sw.optimizer_in_backward(built[-1], adamw)
        return adamw

    plan = sw.ParallelPlan(strategy=row.strategy, mp_policy=policy)
    tokens_BT = torch.empty(1, 16, dtype=torch.int64, device="meta")
    batch = (tokens_BT, tokens_BT)
    run = sw.dry_run(build, plan, world_size=world, batch=batch, optimizer=optimizer, backend="nccl")
    predicted = probe(built[-1]).predicted_bytes()
    total = predicted["parameters"] + predicted["gradients"] + predicted["optimizer"]
    total += predicted["gathered"] if plan.placements.keeps_gathered else 0
    return total / run.num_parameters


def table(model: str = MODEL, worlds: tuple[int, ...] = WORLDS) -> str:
    """The lines, with what dry runs of ``model`` hold on each number of ranks."""
    head = ["strategy", *(f"{name}: N ranks | {' | '.join(map(str, worlds))}" for name in POLICIES)]
    lines = [f"| {' | '.join(head)} |", "|---" * (1 + len(POLICIES) * (1 + len(worlds))) + "|"]
    for row in ROWS:
        cells = [row.name]
        for place, policy in enumerate(POLICIES.values()):
            numbers = [bytes_per_parameter(row, policy, world, model) for world in worlds]
            cells += [row.formula(place), *(f"{number:.2f}" for number in numbers)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    before, _, rest = PAGE.read_text("utf-8").partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{START}\n{table()}\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
