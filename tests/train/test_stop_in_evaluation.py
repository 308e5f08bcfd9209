"""A request to stop that comes during a long evaluation does not wait for its end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from shardwise.train import evaluation, loop
from tests.train.train_here import metrics, train_here


def asked_to_stop_in_the_first_evaluation() -> None:
    evaluation.MICROBATCHES_AT_ONCE = 1
    look = loop.Loop.must_stop

    def asked(trainer: loop.Loop) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        return look(trainer)

    loop.Loop.must_stop = asked  # type: ignore[method-assign]


def test_a_request_during_an_evaluation_leaves_it_and_saves_the_step(tmp_path: Path) -> None:
    ((code, text),) = train_here(tmp_path, 1, ("--run-dir", "run"), before=asked_to_stop_in_the_first_evaluation)
    assert code == 75, text
    assert "step 0  the evaluation was left: a stop was requested" in text
    assert "stop requested, saved step 1, continue with --resume" in text
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1]
