"""A resumed run goes on as the same run at Weights & Biases."""

from __future__ import annotations

import contextlib
import sys
import types
from pathlib import Path

import pytest

from shardwise.spec.errors import ConfigError, StorageError
from shardwise.train.callback import Record
from shardwise.train.config.sections import Config, LogSection
from shardwise.train.log import recorder
from shardwise.train.log.recorder import MetricsFile, Recorder

CONFIG = Config(log=LogSection(tensorboard=False, wandb=True))


@pytest.fixture
def ids(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids with which runs were begun."""
    found: list[str] = []
    module = types.ModuleType("wandb")
    module.__dict__["init"] = lambda **options: (
        found.append(options["id"]) or types.SimpleNamespace(finish=lambda _code: None, log=lambda *_a, **_k: None)
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    return found


def test_a_folder_has_one_id_and_every_folder_its_own(ids: list[str], tmp_path: Path) -> None:
    for name, step in (("a", 0), ("a", 5), ("b", 0)):
        (tmp_path / name).mkdir(exist_ok=True)
        Recorder(tmp_path / name, CONFIG, step).close()
    assert ids[0]
    assert ids[0] == ids[1] != ids[2]


def test_an_id_from_the_environment_counts_and_stays(
    ids: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    Recorder(tmp_path, CONFIG, 0).close()
    monkeypatch.delenv("WANDB_RUN_ID")
    Recorder(tmp_path, CONFIG, 3).close()
    assert ids == ["mine", "mine"]


def test_a_tracker_that_fails_is_named_and_keeps_nobody_from_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise RuntimeError("no answer from the server")

    codes: list[int] = []
    run = types.SimpleNamespace(finish=codes.append, log=lambda *_a, **_k: None)
    wandb, mlflow = types.ModuleType("wandb"), types.ModuleType("mlflow")
    vars(wandb).update(init=lambda **_: run)
    info = types.SimpleNamespace(info=types.SimpleNamespace(run_id="7"))
    vars(mlflow).update(start_run=lambda **_: info, log_dict=lambda *_: None, flush_async_logging=fail, end_run=fail)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    both = Config(log=LogSection(tensorboard=False, wandb=True, mlflow=True))
    for name in ("wandb", "mlflow"):  # whichever comes first
        monkeypatch.setattr(recorder, "TRACKERS", dict(sorted(recorder.TRACKERS.items(), reverse=name == "mlflow")))
        Recorder(tmp_path, both, 0).close(75)
    assert codes == [75, 75]
    assert "no answer from the server" in capsys.readouterr().err
    vars(wandb).update(init=fail)
    begun = r"log.wandb=true, but wandb did not begin a run: no answer from the server\n.*credentials \(WANDB_\* var"
    with pytest.raises(ConfigError, match=begun):
        Recorder(tmp_path, CONFIG, 0)


def test_a_full_disk_is_refused_once_and_not_again_when_the_file_is_closed(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.close()
    with Path("/dev/full").open("a", buffering=1) as full, contextlib.suppress(OSError):
        metrics._file = full
        with pytest.raises(StorageError, match=r"metrics.jsonl cannot be written: No space left on device"):
            metrics.write(Record(*range(11)))
        metrics.close()
        assert full.closed
