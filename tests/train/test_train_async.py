"""`checkpoint.asynchronous`: checkpoints to continue from bit for bit, and a full disk that is survived."""

from __future__ import annotations

import os
import re
from pathlib import Path

from shardwise.launch import fault
from tests.train.train_here import losses, sets, summary, train_here


def let_the_disk_be_full() -> None:
    """For processes that are started from here on: those that write checkpoints."""
    os.environ[fault.ARMED] = "1"
    os.environ[fault.FAULT] = "mid_shard_write@rank=1@step=10:enospc"


def test_checkpoints_are_written_while_training_goes_on(tmp_path: Path) -> None:
    asynchronous = ("--run-dir", "a", *sets("checkpoint.asynchronous=true"))
    resumes = (*asynchronous, "--resume", "step-00000015")
    results = train_here(tmp_path, 2, ("--run-dir", "b"), asynchronous, resumes, before=let_the_disk_be_full)
    assert [code for code, _ in results] == [0, 0, 0], results
    _, text, resumed = (text for _, text in results)
    assert text.count("WARNING: step 10 was not saved; step 5 is kept. ") == 1
    assert re.search(r"rank 1: No space left on device \([\d.]+ \w+ needed, [\d.]+ \w+ free\): ", text)
    assert "resumed at step 15" in resumed
    run = tmp_path / "a"
    assert losses(run) == losses(tmp_path / "b")
    names = sorted(path.name for path in (run / "checkpoints").iterdir() if path.name.startswith("step"))
    assert names == ["step-00000005", "step-00000015", "step-00000020"]
    assert summary(run)["failed_saves"] == []
