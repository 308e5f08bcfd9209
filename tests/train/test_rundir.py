"""The run's folder: which one, what is refused, files that are replaced whole."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from shardwise.spec.errors import CheckpointError, ConfigError, StorageError
from shardwise.train import folder as rundir
from shardwise.train.callback import Record
from shardwise.train.log.recorder import MetricsFile, to_line
from tests.train.train_here import sets, train_here, train_well


def begin(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("name: x\n")
    return folder


def fill_the_disk() -> None:
    """On a rank: 300 kB are free."""
    rundir.shutil.disk_usage = lambda _path: mock.Mock(free=300_000)


def test_a_disk_without_room_for_one_checkpoint_is_refused_before_the_first_step(tmp_path: Path) -> None:
    short = sets("train.steps=1", "train.eval_every=null")
    unsaved = sets("checkpoint.every=null", "checkpoint.final=false")  # as the message says
    runs = (("--run-dir", "full", *short), ("--run-dir", "unsaved", *short, *unsaved))
    (code, text), (unsaved_code, _) = train_here(tmp_path, 2, *runs, before=fill_the_disk)
    assert (code, unsaved_code) == (74, 0)
    found = re.search(r"a checkpoint has at least ([\d.]+) kB, and the disk of full has 300.0 kB free", text)
    assert found is not None, text
    assert "checkpoint.every=null" in text
    assert not (tmp_path / "full" / "metrics.jsonl").exists() or not (tmp_path / "full" / "metrics.jsonl").read_text()
    train_well(tmp_path, 2, ("--run-dir", "room", *short))
    saved = sum(path.stat().st_size for path in (tmp_path / "room/checkpoints/step-00000001").iterdir())
    assert 0.8 * saved < 1000 * float(found[1]) < saved


def test_new_runs_are_numbered_and_resume_means_the_newest(tmp_path: Path) -> None:
    assert rundir.choose("demo", None, is_resuming=False, base=tmp_path) == tmp_path / "demo"
    begin(tmp_path / "demo")
    assert rundir.choose("demo", None, is_resuming=False, base=tmp_path) == tmp_path / "demo-2"
    begin(tmp_path / "demo-2")
    begin(tmp_path / "demo-10")
    begin(tmp_path / "demo-other")
    assert rundir.choose("demo", None, is_resuming=False, base=tmp_path) == tmp_path / "demo-11"
    assert rundir.choose("demo", None, is_resuming=True, base=tmp_path) == tmp_path / "demo-10"


def test_a_folder_that_is_named_is_taken_as_it_is(tmp_path: Path) -> None:
    assert rundir.choose("x", tmp_path / "a", is_resuming=False) == tmp_path / "a"
    begin(tmp_path / "a")
    assert rundir.choose("x", tmp_path / "a", is_resuming=True) == tmp_path / "a"
    with pytest.raises(ConfigError, match="holds a run already"):
        rundir.choose("x", tmp_path / "a", is_resuming=False)
    with pytest.raises(CheckpointError, match="holds no run to resume"):
        rundir.choose("x", tmp_path / "b", is_resuming=True)
    (tmp_path / "b" / "logs").mkdir(parents=True)  # of ranks that ended before the run: they were told --resume
    assert rundir.choose("x", tmp_path / "b", is_resuming=True, resume="latest") == tmp_path / "b"
    with pytest.raises(CheckpointError, match="holds no run to resume"):
        rundir.choose("x", tmp_path / "b", is_resuming=True, resume="step-00000001")


def test_a_checkpoint_of_another_run_is_told_from_no_run(tmp_path: Path) -> None:
    saved = begin(tmp_path / "a") / "checkpoints" / "step-00000001"
    saved.mkdir(parents=True)
    for wanted in (saved, tmp_path / "a"):
        with pytest.raises(CheckpointError) as caught:
            rundir.choose("x", tmp_path / "b", is_resuming=True, resume=str(wanted))
        assert f"{wanted} is of the run in {tmp_path / 'a'}, and a run continues in its own folder" in str(caught.value)
        assert "or copy the whole folder and name the copy" in str(caught.value)
        assert rundir.choose("x", tmp_path / "a", is_resuming=True, resume=str(wanted)) == tmp_path / "a"
    for wanted in ("latest", "step-00000001", str(tmp_path / "c")):
        with pytest.raises(CheckpointError, match="Start it without --resume"):
            rundir.choose("x", tmp_path / "b", is_resuming=True, resume=wanted)


def test_a_missing_run_names_those_that_exist(tmp_path: Path) -> None:
    begin(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"no run 'demo' to resume in .* There are: other"):
        rundir.choose("demo", None, is_resuming=True, base=tmp_path)
    for wanted, found in (("nothing", "no run and no checkpoint of one"), ("other", "of the run in .*other")):
        with pytest.raises(CheckpointError, match=rf"no run 'demo' to resume in .*{wanted} is {found}\.\n"):
            rundir.choose("demo", None, is_resuming=True, resume=str(tmp_path / wanted), base=tmp_path)


def test_what_a_launcher_makes_is_no_run_yet(tmp_path: Path) -> None:
    rundir.create(tmp_path / "a")
    assert not rundir.holds_run(tmp_path / "a")
    (tmp_path / "a" / "checkpoints" / "step-00000001").mkdir()
    assert rundir.holds_run(tmp_path / "a")


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written") as caught:
        rundir.create(tmp_path / "file" / "run")
    assert caught.value.exit_code == 74


def test_a_held_out_loss_is_in_the_line_of_its_step_only() -> None:
    assert json.loads(to_line(replace(record(1), eval_loss=2.5)))["eval_loss"] == 2.5
    assert "eval_loss" not in json.loads(to_line(record(1)))


def record(step: int, loss: float = 1.0) -> Record:
    return Record(step, loss, 1.0, 1e-3, step * 8, 100.0, 0.1, 0.0, None, 1000, 10)


def test_metrics_are_one_json_object_per_line_with_the_contract_s_fields(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(record(1))
    file.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert line == json.dumps(json.loads(line))
    assert list(json.loads(line)) == [
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "tokens_per_s",
        "step_time_s",
        "data_time_s",
        "mfu",
        "peak_memory_bytes",
        "collective_bytes",
        "loss_scale",  # beyond the contract, as what follows
        "optimizer_time_s",
        "exposed_time_s",
    ]
    assert json.loads(line)["mfu"] is None


def test_resuming_drops_records_that_are_made_again_and_lines_cut_by_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(to_line(record(step)) for step in (1, 2, 3)) + '{"step": 4, "lo')
    file = MetricsFile(path, keep_steps=2)
    file.write(record(3, loss=2.0))
    file.close()
    assert [(json.loads(line)["step"], json.loads(line)["loss"]) for line in path.read_text().splitlines()] == [
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
    ]


def test_numbers_that_json_has_not_are_null() -> None:
    assert json.loads(to_line(record(1, loss=float("inf"))))["loss"] is None
