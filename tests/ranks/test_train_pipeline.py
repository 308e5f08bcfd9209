"""`shardwise train` in stages gives the losses of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """
model: {preset: gpt-nano, vocab_size: 256, num_layers: 3, tied: false}
data: {source: stdlib, max_bytes: 100000}
train: {steps: 3, micro_batch_size: 2, gradient_accumulation_steps: 4, eval_every: 3, eval_batches: 1}
optimizer: {lr: 1e-3}
checkpoint: {every: 2}
log: {tensorboard: false}
"""


def train(folder: Path, name: str, *arguments: str) -> tuple[list[float], list[float], float]:
    (folder / "run.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "shardwise", "train", "run.yaml", "--run-dir", name, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / name / "summary.json").read_text())
    return [line["loss"] for line in lines], [line["grad_norm"] for line in lines], summary["eval_loss_final"]


@pytest.mark.slow
def test_two_stages_train_evaluate_and_save_as_one_process(tmp_path: Path) -> None:
    expected = train(tmp_path, "one", "--nproc", "1")
    assert train(tmp_path, "two", "--nproc", "2", "--set", "parallel.pp=2") == expected


def test_microbatches_that_the_schedule_does_not_take_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    pipeline = "parallel.pipeline={schedule: interleaved-1f1b, num_microbatches: 2}"
    command = [sys.executable, "-m", "shardwise", "validate", "run.yaml", "--nproc", "2", "--set", "parallel.pp=2"]
    done = subprocess.run([*command, "--set", pipeline], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 78
    assert "num_microbatches=2, but a step has 4 microbatches" in done.stdout + done.stderr
