"""What torchrun prints at its end is the rank that is the cause, what is safe, and what to do next."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from shardwise.launch import heartbeat
from shardwise.launch.error_file import with_error_file
from shardwise.launch.world import World
from shardwise.spec.errors import CommError, ConfigError


@pytest.fixture
def torchrun_says(tmp_path, monkeypatch):
    """torchrun's last words when ranks have raised these errors, in this order; a run has saved step 10."""
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)

    def says(*errors: tuple[int, Exception], is_training: bool = True) -> str:
        failures = {}
        monkeypatch.setattr("shardwise.launch.error_file.time.time", lambda: 1000.0)  # of one moment
        for rank, error in errors:
            path = tmp_path / f"{rank}.json"
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
            if is_training:
                heartbeat.begin(logs, rank)
                heartbeat.enter("step", step=12, saved_step=10)

            def work(error: Exception = error) -> int:
                raise error

            with pytest.raises(type(error)):
                with_error_file(work, World(rank=rank, size=2, source="torchrun"), "start it again")()
            heartbeat.end()
            failures[rank] = ProcessFailure(rank, 100 + rank, 1, str(path))
        return str(ChildFailedError("shardwise", failures))

    return says


def test_the_cause_comes_last_with_what_is_safe_and_what_to_do(torchrun_says, tmp_path):
    lost = CommError("all_gather(root) failed: Connection closed by peer.\n  A peer has left.")
    (tmp_path / "run" / "checkpoints" / "step-00000010").mkdir(parents=True)
    text = torchrun_says((0, lost), (1, ValueError("no such word")))
    root = text[text.index("Root Cause") :]
    assert "at step 12: ValueError: no such word" in root
    assert f"safe: the checkpoint of step 10, {tmp_path / 'run' / 'checkpoints' / 'step-00000010'}" in root
    assert "next: start it again" in root
    assert "Traceback" in (tmp_path / "run" / "logs" / "rank-1.log").read_text()
    assert not (tmp_path / "run" / "logs" / "rank-0.log").exists()


def test_before_a_run_has_its_folder_the_error_alone_is_told(torchrun_says):
    text = torchrun_says((0, ConfigError("train.steps: expected more.\n  Correct it.")), is_training=False)
    assert "train.steps: expected more.\n    Correct it." in text
    assert "safe" not in text


def test_where_torchrun_is_not_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    assert with_error_file(lambda: 7, World(), "")() == 7
    assert list(tmp_path.iterdir()) == []
