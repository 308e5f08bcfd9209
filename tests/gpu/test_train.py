"""`shardwise train` on one CUDA device: where it trains, and the peak that it predicts."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.chats import save_chats

LORA = """
model: {hf: llama}
data: {source: chat.jsonl, seq_len: 160, held_out: 0.4}
lora: {rank: 4}
parallel: {mp_policy: bf16}
train: {steps: 4, micro_batch_size: 4, eval_every: null}
schedule: {name: constant}
"""


def train(folder: Path, *words: str) -> dict[str, object]:
    """Summary of a run, which says that it trained on the GPU."""
    command = [sys.executable, "-m", "shardwise", "train", *words, "--run-dir", str(folder / "run")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "NVIDIA" in done.stdout
    assert "it is trained on the CPU" not in done.stderr
    return json.loads((folder / "run" / "summary.json").read_text())


def test_an_adapter_is_trained_on_the_gpu(tmp_path: Path) -> None:
    folder = save_chats(tmp_path, num_layers=4)
    (folder / "lora.yaml").write_text(LORA)
    train(folder, "lora.yaml")


@pytest.mark.parametrize("settings", [(), ("parallel.mp_policy=bf16", "parallel.activation_checkpointing=full")])
def test_the_peak_is_the_one_that_was_predicted(tmp_path: Path, settings: tuple[str, ...]) -> None:
    found = train(tmp_path, "--set", "train.steps=21", *(word for each in settings for word in ("--set", each)))
    assert found["peak_memory_bytes"] == pytest.approx(found["predicted_peak_memory_bytes"], rel=0.03)


def test_the_allocator_s_history_of_profiled_steps_is_written(tmp_path: Path) -> None:
    words = ("--set", "train.steps=4", "--set", "schedule.warmup_steps=0", "--profile-steps", "2:3")
    train(tmp_path, *words)
    with (tmp_path / "run" / "profile" / "memory-rank-0.pickle").open("rb") as file:
        assert pickle.load(file)["segments"]
