"""`shardwise train` in fp16: the scale comes by itself, is recorded, saved and taken up again."""

from __future__ import annotations

import json
from pathlib import Path

from shardwise.checkpoint.reader import open_checkpoint
from tests.train.train_here import train_well

CONFIG = """
model: {preset: gpt-nano, vocab_size: 256}
data: {source: stdlib, max_bytes: 100000}
parallel: {mp_policy: {param_dtype: fp16, output_dtype: fp16}}
train: {steps: 4, micro_batch_size: 2, gradient_accumulation_steps: 2, eval_every: null}
optimizer: {lr: 1e-3}
schedule: {name: constant}
checkpoint: {every: 2, keep: 10}
"""


def train(folder: Path, *arguments: str) -> list[dict[str, float]]:
    train_well(folder, 2, ("--run-dir", "run", *arguments), config=CONFIG)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_fp16_is_scaled_recorded_saved_and_resumed_bit_for_bit(tmp_path: Path) -> None:
    expected = train(tmp_path)
    got = train(tmp_path, "--resume", "step-00000002")
    shown = ("step", "loss", "grad_norm", "loss_scale")
    assert [[line[key] for key in shown] for line in got] == [[line[key] for key in shown] for line in expected]
    # The loss is handed on in fp16, where a scale of 2 ** 16 is infinite: the first step is skipped, the scale halved.
    assert [line["loss_scale"] for line in expected] == [2.0**16] + 3 * [2.0**15]
    assert [line["grad_norm"] is None for line in expected] == [True] + 3 * [False]
    assert expected[-1]["loss"] < expected[0]["loss"]
    state = open_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000002").data["state"]
    assert (state["scaler"]["scale"], state["scaler"]["_growth_tracker"]) == (2.0**15, 1)
