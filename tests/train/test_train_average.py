"""`shardwise train` with averaged weights and with flat tensors for the optimizer, resumed without them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.train.train_here import losses, sets, train_well

#: One microbatch a step: strategies add several up in orders of their own.
AVERAGES = sets("train.ema_decay=0.9", "train.steps=10", "train.global_batch_size=4")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("average")
    train_well(folder, 2, ("--run-dir", "run", *AVERAGES))
    return folder / "run"


def held_out(run: Path) -> tuple[float, float]:
    summary = json.loads((run / "summary.json").read_text())
    return summary["eval_loss_first"], summary["eval_loss_final"]


@pytest.mark.long
def test_held_out_losses_are_of_the_average_and_training_is_the_same(whole: Path, tmp_path: Path) -> None:
    train_well(tmp_path, 2, ("--run-dir", "without", *sets("train.steps=10", "train.global_batch_size=4")))
    without = tmp_path / "without"
    assert losses(without) == losses(whole)
    assert held_out(without)[0] == held_out(whole)[0]
    first, final = held_out(whole)
    assert held_out(without)[1] < final < first  # it lags behind


def test_a_run_resumes_with_its_average_and_an_optimizer_by_name(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    resume = ("--resume", "step-00000005", *sets("optimizer.flat=false", "parallel.strategy=zero1"))
    (shown,) = train_well(tmp_path, 2, ("--run-dir", "run", *AVERAGES, *resume))
    assert "resumed at step 5" in shown
    assert losses(tmp_path / "run") == losses(whole)
    assert held_out(tmp_path / "run") == held_out(whole)


def test_predicted_and_measured_peak_agree_with_an_average(whole: Path) -> None:
    summary = json.loads((whole / "summary.json").read_text())
    plan = json.loads((whole / "plan.json").read_text())
    assert plan["predicted_bytes_per_rank"]["average"] > 0
    assert summary["peak_memory_bytes"] == pytest.approx(summary["predicted_peak_memory_bytes"], rel=0.02)
