"""`shardwise train` in stages and on divided sequences gives the losses of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli import main
from tests.train.train_here import losses, metrics, sets, summary, train_well

CONFIG = """
model: {preset: gpt-nano, vocab_size: 256, num_layers: 3, seq_len: 64, tied: false}
data: {source: stdlib, max_bytes: 100000, seq_len: 62}
train: {steps: 4, micro_batch_size: 2, gradient_accumulation_steps: 4, eval_every: 2, eval_batches: 1}
optimizer: {lr: 1e-3}
checkpoint: {every: 2}
"""


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("whole")
    train_well(folder, 1, ("--run-dir", "one"), config=CONFIG)
    return folder / "one"


def numbers(run: Path) -> list[float]:
    return [*losses(run), *(line["grad_norm"] for line in metrics(run)), summary(run)["eval_loss_final"]]


def test_two_ranks_that_divide_sequences_train_evaluate_and_save_as_one_process(one: Path, tmp_path: Path) -> None:
    train_well(tmp_path, 2, ("--run-dir", "two", *sets("parallel.cp=2")), config=CONFIG)
    assert len(losses(one)) == 4
    assert numbers(tmp_path / "two") == pytest.approx(numbers(one), rel=1e-5)
    found = summary(tmp_path / "two")
    assert found["peak_memory_bytes"] == pytest.approx(found["predicted_peak_memory_bytes"], rel=0.02)
    assert found["peak_memory_bytes"] < summary(one)["peak_memory_bytes"]


def test_two_stages_train_evaluate_and_save_as_one_process(one: Path, tmp_path: Path) -> None:
    (out,) = train_well(tmp_path, 2, ("--run-dir", "two", *sets("parallel.pp=2")), config=CONFIG)
    assert "gpt-nano on 2 x cpu, zero3 on pp=2\n" in out
    assert numbers(tmp_path / "two") == numbers(one)
    plan = json.loads((tmp_path / "two" / "plan.json").read_text())
    owned = {unit["name"]: unit["owned"] for unit in plan["units"]}
    assert owned["root, stage 0"][1] == owned["root, stage 1"][0] == owned["blocks.0"][1] == owned["blocks.2"][0] == 0
    assert all(sum(unit["owned"]) == unit["numel"] for unit in plan["units"])


def test_microbatches_that_the_schedule_does_not_take_are_refused_before_anything_starts(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)
    pipeline = "parallel.pipeline={schedule: interleaved-1f1b, num_microbatches: 2}"
    assert main(["validate", "run.yaml", "--nproc", "2", *sets("parallel.pp=2"), "--set", pipeline]) == 78
    assert "num_microbatches=2, but a step has 4 microbatches" in capfd.readouterr().err
