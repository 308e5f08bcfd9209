"""The time of a step that a run predicts: of a known device and model, and otherwise none, with what to do."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path
from unittest import mock

import pytest
import torch

import shardwise as sw
from shardwise.cost.measured import FORMAT
from shardwise.planner import Cluster, Workload, estimate
from shardwise.spec.errors import StorageError
from shardwise.train.config.resolve import RunConfig, resolve
from shardwise.train.config.sections import read_config
from shardwise.train.log import report as module
from shardwise.train.log.report import Report, Speed
from shardwise.train.predicted.step import PredictedStep, predict_step

CPU = torch.device("cpu")


def resolved(*overrides: str) -> RunConfig:
    base = {
        "model": {"preset": "gpt-tiny"},
        "data": {"source": "random", "seq_len": 32},
        "train": {"steps": 1, "micro_batch_size": 2, "gradient_accumulation_steps": 2},
    }
    return resolve(read_config(None, overrides, base=base, title="test"), 2)


def test_a_processor_that_nobody_measured_has_no_time_and_names_the_command() -> None:
    found = predict_step(resolved(), CPU, 2)
    assert found.seconds is None
    assert (
        found.reason == "this machine is not measured: run `shardwise calibrate --out FILE` and set log.hardware=FILE"
    )


def test_the_time_is_the_planners_for_the_hardware_that_is_named() -> None:
    slow, fast = (
        predict_step(resolved(f"log.hardware={name}"), CPU, 2) for name in ("V100-16GB-SXM2", "H100-80GB-SXM")
    )
    assert slow.seconds is not None
    assert fast.seconds is not None
    assert fast.seconds > 0
    assert fast.reason.startswith("H100-80GB-SXM")


def test_what_the_planner_does_not_know_is_no_number() -> None:
    given = resolved("log.hardware=H100-80GB-SXM")
    unknown = dataclasses.replace(given, model=None)
    found = predict_step(unknown, CPU, 2)
    assert (found.seconds, found.reason) == (None, "the shape of this model is not known")
    assert "no-such-gpu" in predict_step(resolved("log.hardware=no-such-gpu"), CPU, 2).reason


def test_a_file_without_the_dtype_of_the_run_is_no_number(tmp_path) -> None:
    path = tmp_path / "machine.json"
    fields = dict.fromkeys(("memory_bandwidth", "link_bandwidth", "host_bandwidth", "node_gbits"), 1.0)
    fields |= {"name": "x", "peaks": {"fp32": 1.0}, "memory_bytes": 1 << 40, "link_domain": 2}
    path.write_text(json.dumps({"format": FORMAT, **fields, "measured": {}}))
    found = predict_step(resolved(f"log.hardware={path}"), CPU, 2)
    assert found.seconds is None
    assert "no times of this dtype" in found.reason


@pytest.mark.parametrize("given", ["full", "selective", "{every: 2}"])
def test_recomputation_is_known_in_a_word_and_of_every_second_block(given: str) -> None:
    plain = predict_step(resolved("log.hardware=V100-16GB-SXM2"), CPU, 2)
    found = predict_step(resolved("log.hardware=V100-16GB-SXM2", f"parallel.activation_checkpointing={given}"), CPU, 2)
    assert found.seconds is not None
    assert plain.seconds is not None
    assert found.seconds >= 0.999 * plain.seconds  # so small a model waits for the host


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
    assert [line.startswith("  A vocabulary of 50,257 is not a multiple of 64") for line in lines[2:]] == [
        True
    ] * is_named


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


def test_a_summary_is_json_also_after_an_evaluation_that_gave_nan(tmp_path: Path) -> None:
    Report.write_summary(mock.Mock(directory=tmp_path), {"eval_loss_final": math.nan, "steps": 3, "best": None})
    text = (tmp_path / "summary.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"eval_loss_final": None, "steps": 3, "best": None}
