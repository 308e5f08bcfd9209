"""Pipelines beside ``torch.distributed.pipelining``: two ranks, the same schedules, model code and microbatches.

All engines live in the same two processes and take turns, A B A B; a ratio is of the medians of one round. The bubble
is what ``sw.record_pipeline`` measures, in rounds of its own steps. Writes ``bench/results/DATE-pipeline.md`` and
``.json``; where they are there already, with -2, -3, ... behind.

    python -m bench.pipeline [--rounds 5] [--steps 3] [--only 1f1b] [--out bench/results]

Takes less than four minutes on two cores; nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import pipelining

import shardwise as sw
from bench.compare.run import machine_facts
from bench.files import free_stem
from shardwise.models.transformer import GPT, Loss
from shardwise.testing import run_on_ranks

PP, MICROBATCHES = 2, 8
MODEL = {"num_layers": 8, "hidden": 384, "num_heads": 6, "vocab_size": 128, "seq_len": 128, "tied": False}
WARM_UP, MEASURED = 2, 9
STEP_LIMIT, BUBBLE_LIMIT = 1.0, 0.15

#: Torch's schedule of the same kind, by ours. Its ``InterleavedZeroBubble`` with one stage per rank is ZB1P (ZB-H1).
PEERS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
}
#: Those whose bubble has a target.
TARGETED = ("gpipe", "1f1b")

Batch = tuple[Tensor, Tensor]
Step = Callable[[Batch], float | None]


def build() -> GPT:
    torch.manual_seed(0)
    return sw.models.gpt("gpt-tiny", **MODEL)


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    shape = MICROBATCHES, MODEL["seq_len"]
    return [
        (torch.randint(0, 128, shape, generator=generator), torch.randint(0, 128, shape, generator=generator))
        for _ in range(count)
    ]


# -- the engines


def ours(schedule: str) -> tuple[nn.Module, Step]:
    policy = sw.PipelinePolicy(schedule, MICROBATCHES)
    model = sw.parallelize(build(), sw.ParallelPlan(strategy="ddp", pp=PP, pipeline=policy))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(batch: Batch) -> float:
        loss = sw.train_step(model, batch)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return model, step


class Part(nn.Module):
    """Some of a GPT's modules, run as its own forward runs them."""

    def __init__(self, whole: GPT, index: int, count: int) -> None:
        super().__init__()
        size = MODEL["num_layers"] // count
        is_first, is_last = index == 0, index == count - 1
        self.token_embedding = whole.token_embedding if is_first else None
        self.position_embedding = whole.position_embedding if is_first else None
        self.dropout = whole.dropout
        self.blocks = whole.blocks[index * size : (index + 1) * size]
        self.final_norm = whole.final_norm if is_last else None
        self.lm_head = whole.lm_head if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.token_embedding is not None and self.position_embedding is not None:
            positions_T = torch.arange(x.shape[1], device=x.device)
            x = self.dropout(self.token_embedding(x) + self.position_embedding(positions_T))
        for block in self.blocks:
            x = block(x)
        if self.final_norm is not None and self.lm_head is not None:
            x = self.lm_head(self.final_norm(x))
        return x


def theirs(schedule: str) -> Step:
    rank = distributed.get_rank()
    name = PEERS[schedule]
    count = PP * sw.PipelinePolicy(schedule, MICROBATCHES).virtual_stages
    own = (0, 3) if rank == 0 else (1, 2)  # the V
    places = own if name == "ScheduleZBVZeroBubble" else range(rank, count, PP)
    whole = build()
    parts = [Part(whole, place, count) for place in places]
    device = torch.device("cpu")
    stages = [pipelining.PipelineStage(part, place, count, device) for place, part in zip(places, parts, strict=True)]
    is_single = name in {"ScheduleGPipe", "Schedule1F1B"}
    loss = Loss()
    runs = getattr(pipelining, name)(stages[0] if is_single else stages, MICROBATCHES, loss_fn=loss)
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-4)
    has_loss = count - 1 in places

    def step(batch: Batch) -> float | None:
        losses: list[Tensor] = []
        tokens, targets = batch
        args = (tokens,) if rank == 0 else ()
        kwargs = {"target": targets, "losses": losses} if has_loss else {}
        runs.step(*args, return_outputs=False, **kwargs)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().item() if losses else None

    return step


# -- one rank


def measure(schedules: list[str], rounds: int, steps: int) -> dict[str, Any]:
    """What one rank saw: seconds by engine and round, losses, and bubbles."""
    data = batches(WARM_UP + rounds * steps)
    result: dict[str, Any] = {}
    for schedule in schedules:
        model, own = ours(schedule)
        engines: dict[str, Step] = {"ours": own, "theirs": theirs(schedule)}
        losses: dict[str, list[float | None]] = {name: [] for name in engines}
        seconds: dict[str, list[list[float]]] = {name: [] for name in engines}
        cpu: dict[str, float] = dict.fromkeys(engines, 0.0)
        for name, step in engines.items():
            losses[name] += [step(batch) for batch in data[:WARM_UP]]
        for turn in range(rounds):
            for name, step in list(engines.items())[:: -1 if turn % 2 else 1]:
                distributed.barrier()
                seconds[name].append([])
                start_cpu = time.process_time()
                for batch in data[WARM_UP + turn * steps : WARM_UP + (turn + 1) * steps]:
                    start = time.perf_counter()
                    losses[name].append(step(batch))
                    seconds[name][-1].append(time.perf_counter() - start)
                cpu[name] += time.process_time() - start_cpu
        with sw.record_pipeline(model) as found:
            for step in range(MEASURED):
                own(data[step % len(data)])
        bubbles = [(each.bubble, each.undelayed_bubble, each.closed_bubble) for each in found]
        result[schedule] = {
            "seconds": seconds,
            "losses": losses,
            "cpu": {name: spent / (rounds * steps) for name, spent in cpu.items()},
            "bubbles": bubbles,
            "drawing": str(sorted(found, key=lambda each: each.bubble)[len(found) // 2]),
        }
    return result


# -- the tables


def row_of(schedule: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all ranks: a step takes as long as the slowest of them."""
    found = [result[schedule] for result in ranks]
    turns = {
        name: [
            statistics.median(max(times) for times in zip(*each, strict=True))
            for each in zip(*(one["seconds"][name] for one in found), strict=True)
        ]
        for name in ("ours", "theirs")
    }
    ratios = [a / b for a, b in zip(turns["ours"], turns["theirs"], strict=True)]
    own, peer = ([loss for one in found for loss in one["losses"][name] if loss is not None] for name in turns)
    own = own[: len(peer)]  # ours is known to every rank
    gaps = [abs(a - b) / abs(b) for a, b in zip(own, peer, strict=True)]
    bubbles = found[0]["bubbles"]
    return {
        "schedule": schedule,
        "peer": PEERS[schedule],
        "step_time_s": {name: {"median": statistics.median(each), "all": each} for name, each in turns.items()},
        "cpu_s": {name: [one["cpu"][name] for one in found] for name in turns},
        "ratio": {"median": statistics.median(ratios), "all": ratios},
        "loss_difference": max(gaps),
        "bubble": statistics.median(bubble for bubble, _, _ in bubbles),
        "bubbles": [bubble for bubble, _, _ in bubbles],
        "undelayed_bubble": statistics.median(bubble for _, bubble, _ in bubbles),
        "closed_bubble": bubbles[0][2],
        "drawing": found[0]["drawing"],
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    columns = ["schedule", "torch's", "step, ours", "step, torch's", "ratio of rounds", "≤ 1.00", "bubble"]
    columns += [
        "of these durations without delays",
        "closed form",
        "within 15%",
        "CPU of a step, ours / torch's",
        "losses differ by",
    ]
    lines = [
        f"| {' | '.join(columns)} |",
        "| --- | --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | --- | ---: | ---: |",
    ]
    for row in rows:
        ratio, each = row["ratio"]["median"], row["ratio"]["all"]
        own, peer = (row["step_time_s"][name]["median"] * 1e3 for name in ("ours", "theirs"))
        bubble, closed = row["bubble"], row["closed_bubble"]
        off = abs(bubble / closed - 1)
        is_within = "-" if row["schedule"] not in TARGETED else "met" if off <= BUBBLE_LIMIT else "MISSED"
        cpu = sum(row["cpu_s"]["ours"]) / sum(row["cpu_s"]["theirs"])
        lines.append(
            f"| {row['schedule']} | {row['peer']} | {own:.1f} ms | {peer:.1f} ms | {ratio:.3f} ({len(each)}:"
            f" {min(each):.2f} to {max(each):.2f}) | {'met' if ratio <= STEP_LIMIT else 'MISSED'} | {bubble:.1%} |"
            f" {row['undelayed_bubble']:.1%} |"
            f" {closed:.1%} | {is_within} ({off:.0%} off) | {cpu:.3f} | {row['loss_difference']:.1e} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of an engine in one turn")
    parser.add_argument("--only", choices=PEERS, action="append", help="this schedule; may be repeated")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    schedules = options.only or list(PEERS)
    ranks = run_on_ranks(measure, PP, schedules, options.rounds, options.steps, timeout_s=600)
    rows = [row_of(schedule, ranks) for schedule in schedules]
    stem = free_stem(options.out, f"{dt.datetime.now(tz=dt.UTC).date().isoformat()}-pipeline")
    shape = ", ".join(f"{key} {value}" for key, value in MODEL.items())
    facts = machine_facts()
    how = (
        f"GPT: {shape}; fp32, AdamW, ddp with one replica. {options.rounds} rounds of {options.steps} steps, engines in"
        " turns; a ratio is of the median steps of a round, and the median over rounds is shown. Bubble: idle time"
        f" over the longest that a rank computes, median of {MEASURED} steps; beside it what the same computations, as"
        " uneven as they were, would have given had messages and everything between computations taken no time. The"
        " closed form is of even ones."
    )
    lines = [
        f"# Pipelines of {PP} ranks, {MICROBATCHES} microbatches of one sample: {stem}",
        "",
        *table(rows),
        "",
        how,
        "",
        f"{facts}",
        "",
        f"`python -m bench.pipeline --rounds {options.rounds} --steps {options.steps}`",
        "",
    ]
    for row in rows:
        lines += [f"## {row['schedule']}, as it ran", "", "```", row["drawing"], "```", ""]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{stem}.md").write_text("\n".join(lines), "utf-8")
    (options.out / f"{stem}.json").write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n", "utf-8")
    print("\n".join(table(rows)))
    print(f"written: {options.out / stem}.md")


if __name__ == "__main__":
    main()
