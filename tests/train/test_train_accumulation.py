"""`shardwise train` with several microbatches: the peak that is said before the first step is the measured one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.train_here import sets, summary, train_well

CONFIG = """
name: accumulated
model: {preset: gpt-tiny, num_layers: 4, hidden: 128, num_heads: 4, vocab_size: 512, seq_len: 64}
data: {source: random, seq_len: 64}
train: {steps: 3, micro_batch_size: 2, gradient_accumulation_steps: 3, eval_every: null}
"""
RUNS = (("zero3", "unsharded"), ("zero2", "sharded"), ("ddp", "sharded"))


def test_the_predicted_peak_has_what_microbatches_take(tmp_path: Path) -> None:
    arguments = [
        ("--run-dir", strategy, *sets(f"parallel.strategy={strategy}", f"parallel.accumulation={how}"))
        for strategy, how in RUNS
    ]
    train_well(tmp_path, 2, *arguments, config=CONFIG)
    for strategy, _ in RUNS:
        found = summary(tmp_path / strategy)
        assert found["peak_memory_bytes"] == pytest.approx(found["predicted_peak_memory_bytes"], rel=0.02), strategy


def test_the_predicted_peak_has_what_is_allocated_within_a_step(tmp_path: Path) -> None:
    arguments = [
        ("--run-dir", name, *sets(f"train.gradient_accumulation_steps={n}")) for name, n in (("once", 1), ("thrice", 3))
    ]
    train_well(tmp_path, 2, *arguments, config=CONFIG)
    for name in ("once", "thrice"):
        found = summary(tmp_path / name)
        timeline = json.loads((tmp_path / name / "predicted.json").read_text())["memory_timeline"]
        assert found["peak_memory_bytes"] == pytest.approx(max(sum(held.values()) for _, held in timeline), rel=0.1)
        assert found["peak_memory_bytes"] == pytest.approx(found["predicted_peak_memory_bytes"], rel=0.02)
