"""What a run's recorder sends to MLflow and Trackio, read back from their own stores; a resumed run is the same one."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.train.callback import Record
from shardwise.train.config.sections import Config, LogSection
from shardwise.train.log.recorder import Recorder

pytestmark = pytest.mark.integrations


def record(directory: Path, config: Config) -> None:
    """Two steps, and two more after a resume."""
    for first in (1, 3):
        recorder = Recorder(directory, config, first - 1)
        for step in (first, first + 1):
            recorder.step(Record(step, *map(float, range(10)), values={"share/books": step / 4}))
        recorder.close()


def test_mlflow_has_every_step_of_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path}/store")
    record(tmp_path, Config(log=LogSection(tensorboard=False, mlflow=True)))
    (found,) = mlflow.MlflowClient().search_runs(["0"])
    assert found.info.status == "FINISHED"
    for name, values in (("share/books", [0.25, 0.5, 0.75, 1.0]), ("loss", [0.0] * 4)):
        history = mlflow.MlflowClient().get_metric_history(found.info.run_id, name)
        assert sorted((each.step, each.value) for each in history) == list(enumerate(values, 1))
    assert mlflow.artifacts.load_dict(f"{found.info.artifact_uri}/config.json")["log"]["mlflow"] is True


def test_trackio_has_every_step_of_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    record(tmp_path, Config(log=LogSection(tensorboard=False, trackio=True)))
    (run,) = trackio.Api().runs("shardwise")
    assert run.name == (tmp_path / "trackio-id").read_text().strip()
    assert run.config["log"]["trackio"] is True
    logs = sorted(SQLiteStorage.get_logs("shardwise", run.name), key=lambda each: each["step"])
    assert [(each["step"], each["share/books"]) for each in logs] == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
