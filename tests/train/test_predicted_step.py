"""What the end of a run says about the time of its steps."""

from __future__ import annotations

import io
from pathlib import Path
from unittest import mock

import pytest

import shardwise as sw
from shardwise.planner import Cluster, Workload, estimate
from shardwise.spec.errors import StorageError
from shardwise.train.log import report as module
from shardwise.train.log.report import Report, Speed
from shardwise.train.predicted.step import PredictedStep


@pytest.mark.parametrize(("vocab", "is_named"), [(50_257, True), (50_304, False)])
def test_a_run_names_a_vocabulary_that_is_slow_on_its_gpu(vocab: int, is_named: bool) -> None:
    made = estimate(
        sw.ModelShape.from_config(sw.models.gpt_config("gpt2-medium", vocab_size=vocab)),
        sw.ParallelPlan(strategy="zero3"),
        Cluster(gpu="H100-80GB-SXM", num_gpus=1),
        Workload(seq_len=1024, global_batch=32, micro_batch=32),
    )
    report = mock.Mock(predicted_step=PredictedStep(made.step_time_s, made.reason, made))
    said = io.StringIO()
    Report._say_time(report, mock.Mock(say=lambda line: said.write(f"{line}\n")), Speed())
    lines = said.getvalue().splitlines()
    assert lines[1].startswith(f"  predicted  {1e3 * made.step_time_s:>6,.0f} ms  ")
    assert [line.startswith("  A vocabulary of 50,257 is no multiple of 64") for line in lines[2:]] == [True] * is_named


def test_a_report_that_cannot_be_written_says_why_in_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Path) -> None:
        raise StorageError("run/report.html cannot be written: No space left on device.\n  Free space on the disk.")

    monkeypatch.setattr(module, "read_run", fail)
    Report.write_page(mock.Mock(directory=Path("run")))
    assert capsys.readouterr().err == (
        "report.html was not written: run/report.html cannot be written: No space left on device.\n"
        "  Free space on the disk.\n"
    )
