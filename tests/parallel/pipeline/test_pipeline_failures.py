"""A stage that dies in the middle of a step, or disagrees, ends all ranks with one message and a code of its own.

The codes tell that nobody has waited for the group's time limit: that would be 82.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from shardwise.launch.elastic import launch

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def run(tmp_path, capfd, mesh, culprit, what):
    """The launcher's code and what it printed."""
    pp, tp = mesh
    arguments = [str(tmp_path), str(pp), str(tp), str(culprit), what]
    code = launch("tests.parallel.pipeline.pipeline_body", arguments, pp * tp, log_dir=tmp_path / "logs")
    for path in tmp_path.glob("pid-0-*"):
        assert not Path(f"/proc/{path.read_text()}").exists(), "a rank is left"
    return code, capfd.readouterr().err


@pytest.mark.parametrize(
    ("mesh", "culprit"),
    [
        pytest.param((4, 1), 0, id="first stage", marks=pytest.mark.long),
        pytest.param((4, 1), 2, id="middle stage", marks=pytest.mark.long),
        pytest.param((4, 1), 3, id="last stage", marks=pytest.mark.long),
        pytest.param((2, 2), 1, id="peer on tp"),
    ],
)
def test_a_rank_that_dies_within_a_step_is_named_and_ends_the_others(tmp_path, capfd, mesh, culprit):
    code, shown = run(tmp_path, capfd, mesh, culprit, "dies")
    assert code == 128 + signal.SIGKILL
    messages = [line for line in shown.splitlines() if line.startswith("shardwise: ")]
    assert len(messages) == 1
    said = rf"shardwise: rank {culprit} \(pid \d+\) killed by SIGKILL \(often: out of memory; .*\)"
    assert re.fullmatch(said, messages[0]), messages


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("another batch", "rank 0 along pp has 4 microbatches of [2, 6], [2, 6]"),
        pytest.param("another model", "blocks.7", marks=pytest.mark.long),
    ],
)
def test_a_stage_that_disagrees_ends_all_with_one_message(tmp_path, capfd, what, said):
    code, shown = run(tmp_path, capfd, (2, 1), 1, what)
    assert code == 83
    assert shown.count(said) == 1
    assert len([line for line in shown.splitlines() if line.startswith("shardwise: ")]) == 1
