"""Folders of runs as `train` leaves them, made by hand: what a run of any length and any end looks like."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import yaml

UNITS = ("root", *(f"blocks.{index}" for index in range(6)))
BYTES = {
    "parameters": 2_478_080,
    "gradients": 2_479_872,
    "optimizer": 4_956_216,
    "gathered": 1_783_808,
    "reduce": 1_785_344,
    "host": 0,
    "activations": 27_366_408,
}


def write_run(
    folder: Path,
    *,
    steps: int = 60,
    first: int = 1,
    strategy: str = "zero3",
    pp: int = 1,
    name: str = "gpt-demo",
    seed: int = 0,
    exit_code: int | None = 0,
    reason: str = "finished",
    **more: Any,
) -> Path:
    """Write a run of ``steps`` steps; ``exit_code`` of ``None``: it left no summary. ``more`` goes into the summary."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = random.Random(seed)
    records = []
    for step in range(first, first + steps):
        time_s = 0.2 + 0.05 * drawn.random() + (0.8 if step - first < 3 else 0)
        record = {
            "step": step,
            "loss": 2 + 3.4 * math.exp(-step / 25) + 0.2 * drawn.random(),
            "grad_norm": 0.5 + 5 * drawn.random(),
            "lr": 2e-3 * min(1.0, step / 20),
            "tokens": 1024 * step,
            "tokens_per_s": 1024 / time_s,
            "step_time_s": time_s,
            "data_time_s": 0.004 * drawn.random(),
            "optimizer_time_s": 0.02 * drawn.random(),
            "mfu": None,
            "peak_memory_bytes": 40_858_456,
            "collective_bytes": 6_940_680,
            "loss_scale": None,
        }
        if step % 20 == 0:
            record["eval_loss"] = record["loss"] + 0.1
        records.append(record)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    parallel = {"strategy": strategy, "pp": pp, "ep": 1, "pipeline": {"schedule": "1f1b"} if pp > 1 else None}
    plan = {
        "world_size": 2 * pp,
        "mesh": {"pp": pp, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1},
        "parallel": parallel,
        "batch": {"micro": 4, "accumulation": 2 * pp, "global": 8},
        "predicted_bytes_per_rank": BYTES,
        "predicted_peak_memory_bytes": sum(BYTES.values()),
        "units": [
            {"name": unit, "class": "Block", "numel": 198_272, "owned": [99_136, 99_136] + [0] * (2 * pp - 2)}
            for unit in UNITS
        ],
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    config = {
        "name": "demo",
        "model": {"preset": name},
        "parallel": parallel,
        "train": {"steps": first + steps - 1, "seed": seed},
        "optimizer": {"lr": 2e-3},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "model.txt").write_text("1,239,040 parameters in 7 units on 2 ranks\n")
    (folder / "environment.json").write_text(json.dumps({"torch": "2.13.0", "cuda": None, "devices": ["cpu"]}))
    held = {"parameters": 2_000_000, "gradients": 3_000_000, "optimizer": 5_000_000, "host": 0}
    memory = {
        "step": 3,
        "held_bytes": held,
        "seconds": [index / 100 for index in range(31)],
        "bytes": [10_000_000 + 1_000_000 * min(index, 30 - index) for index in range(31)],
    }
    (folder / "memory.json").write_text(json.dumps(memory))
    predicted = {
        "device": "a measured machine",
        "by_category": {"compute": 0.2, "exposed gather": 0.03, "optimizer": 0.01},
        "memory_timeline": [
            ["forward", {"parameters": 2_000_000, "activations": 9_000_000}],
            ["end", {"parameters": 2_000_000}],
        ],
        "spans": [["compute", 0.0, 0.1, "root"], ["gather", 0.0, 0.05, "blocks"], ["compute", 0.13, 0.23, "blocks"]],
        "note": "Made by hand.",
    }
    (folder / "predicted.json").write_text(json.dumps(predicted))
    if exit_code is not None:
        summary = {
            "steps": first + steps - 1,
            "first_loss": records[0]["loss"] if records else None,
            "final_loss": records[-1]["loss"] if records else None,
            "eval_loss_first": 5.3562,
            "eval_loss_final": records[-1].get("eval_loss") if records else None,
            "tokens_per_s": 4567.8,
            "peak_memory_bytes": 40_858_456,
            "predicted_peak_memory_bytes": sum(BYTES.values()),
            "world_size": 2 * pp,
            "strategy": strategy,
            "exit_code": exit_code,
            "reason": reason,
            "failed_saves": [],
            "wall_time_s": 30.0,
            "steps_time_s": 20.0,
            "eval_time_s": 4.0,
            "checkpoint_time_s": 1.5,
        }
        (folder / "summary.json").write_text(json.dumps(summary | more))
    return folder


def records(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
