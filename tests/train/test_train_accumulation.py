"""`shardwise train` with several microbatches: the peak said before the first step is the measured one; in fp16 too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.checkpoint.reader import open_checkpoint
from tests.train.train_here import metrics, sets, summary, train_well

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


FP16 = """
model: {preset: gpt-nano, vocab_size: 256}
data: {source: stdlib, max_bytes: 100000}
parallel: {mp_policy: {param_dtype: fp16, output_dtype: fp16}}
train: {steps: 4, micro_batch_size: 2, gradient_accumulation_steps: 2, eval_every: null}
optimizer: {lr: 1e-3}
schedule: {name: constant}
checkpoint: {every: 2, keep: 10}
"""


def records(folder: Path, *arguments: str) -> list[dict[str, float]]:
    train_well(folder, 2, ("--run-dir", "run", *arguments), config=FP16)
    return metrics(folder / "run")


def test_fp16_is_scaled_recorded_saved_and_resumed_bit_for_bit(tmp_path: Path) -> None:
    expected = records(tmp_path)
    got = records(tmp_path, "--resume", "step-00000002")
    shown = ("step", "loss", "grad_norm", "loss_scale")
    assert [[line[key] for key in shown] for line in got] == [[line[key] for key in shown] for line in expected]
    # The loss is handed on in fp16, where a scale of 2 ** 16 is infinite: the first step is skipped, the scale halved.
    assert [line["loss_scale"] for line in expected] == [2.0**16] + 3 * [2.0**15]
    assert [line["grad_norm"] is None for line in expected] == [True] + 3 * [False]
    assert expected[-1]["loss"] < expected[0]["loss"]
    state = open_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000002").data["state"]
    assert (state["scaler"]["scale"], state["scaler"]["_growth_tracker"]) == (2.0**15, 1)
