"""`shardwise train` on divided sequences gives the losses of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.train_here import metrics, sets, train_well

CONFIG = """
model: {preset: gpt-nano, vocab_size: 256, num_layers: 3, seq_len: 64, tied: false}
data: {source: stdlib, max_bytes: 100000, seq_len: 62}
train: {steps: 4, micro_batch_size: 2, gradient_accumulation_steps: 2, eval_every: 2, eval_batches: 1}
optimizer: {lr: 1e-3}
checkpoint: {every: 2}
"""


def train(folder: Path, name: str, world: int, *arguments: str) -> list[dict[str, Any]]:
    train_well(folder, world, ("--run-dir", name, *arguments), config=CONFIG)
    return metrics(folder / name)


def near(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return all(left[key] == pytest.approx(right[key], rel=1e-5) for key in ("loss", "grad_norm"))


def test_two_ranks_train_evaluate_and_save_as_one_process(tmp_path: Path) -> None:
    expected = train(tmp_path, "one", 1)
    got = train(tmp_path, "two", 2, *sets("parallel.cp=2"))
    assert len(got) == 4
    assert all(near(*pair) for pair in zip(expected, got, strict=True))
    one, two = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("one", "two"))
    assert two["eval_loss_final"] == pytest.approx(one["eval_loss_final"], rel=1e-5)
    assert two["peak_memory_bytes"] == pytest.approx(two["predicted_peak_memory_bytes"], rel=0.02)
    assert two["peak_memory_bytes"] < one["peak_memory_bytes"]
