"""The ledger of predictions: what is frozen stays, and can be predicted again."""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.ledger import __main__ as ledger

DAY = dt.date(2026, 1, 2)
QUESTION = {
    **dict.fromkeys(ledger.INPUTS, ""),
    "model": "llama-3-8b",
    "gpu": "H100-80GB-SXM",
    "gpus": "8",
    "gpus_per_node": "8",
    "software": "torchtitan",
    "seq_len": "8192",
    "micro_batch": "1",
    "global_batch": "8",
    "precision": "bf16",
    "recompute": "selective",
    "compile": "yes",
    "plan": "{strategy: zero3}",
}


def test_freezing_writes_inputs_figures_and_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ledger, "FOLDER", tmp_path)
    path = ledger.freeze([QUESTION], "abc", DAY)
    assert path.name == "2026-01-02.csv"
    (row,) = ledger.read(path)
    assert list(row) == list(ledger.COLUMNS)
    assert row == QUESTION | ledger.figures(QUESTION) | {"commit": "abc"} | {
        name: "" for name in ledger.COLUMNS if name.startswith("published_") or name == "source"
    }


def test_a_ledger_is_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ledger, "FOLDER", tmp_path)
    (tmp_path / "2026-01-02.csv").write_text("frozen")
    with pytest.raises(FileExistsError):
        ledger.freeze([QUESTION], "abc", DAY)
    assert (tmp_path / "2026-01-02.csv").read_text() == "frozen"


@pytest.mark.parametrize("figure", ["step_s", "tokens_per_s_per_gpu", "mfu"])
def test_a_published_time_stands_beside_the_frozen_one(figure: str):
    row = dict.fromkeys(ledger.COLUMNS, "") | QUESTION
    row |= {"step_s": "2", "tokens_per_s_per_gpu": "4096", "mfu": "0.2", "peak_gib": "55"}
    slower = {"step_s": "4", "tokens_per_s_per_gpu": "2048", "mfu": "0.1"}  # each says: half as fast
    row |= {f"published_{figure}": slower[figure], "published_peak_gib": "50"}
    _, time, peak = ledger.compared([row])
    assert (time[1], time[2], time[5], time[6]) == ("step_s", "2.0", "4", "-50.0%")
    assert (peak[1], peak[2], peak[5], peak[6]) == ("peak_gib", "55.0", "50", "+10.0%")


def test_every_frozen_row_has_its_inputs_and_can_be_predicted():
    paths = sorted(ledger.FOLDER.glob("*.csv"))
    assert paths
    for path in paths:
        rows = ledger.read(path)
        assert len(rows) == 20
        for row in rows:
            assert list(row) == list(ledger.COLUMNS)
            assert re.fullmatch("[0-9a-f]{40}", row["commit"])
            assert all(row[name] for name in ledger.FIGURES)
            assert all(float(ledger.figures(row)[name]) > 0 for name in ledger.FIGURES)


def test_a_planner_that_is_in_no_commit_freezes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    questions = tmp_path / "questions.csv"
    questions.write_text("model\n")
    monkeypatch.setattr("sys.argv", ["ledger", "--freeze", str(questions)])
    monkeypatch.setattr(ledger, "FOLDER", tmp_path)
    monkeypatch.setattr(ledger.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=" M src/a.py"))
    with pytest.raises(SystemExit, match="commit them before"):
        ledger.main()
    assert sorted(tmp_path.iterdir()) == [questions]
