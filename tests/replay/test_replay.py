"""Runs are what they were when they were put on record: collectives, numbers, state, checkpoints, predictions.

A refactoring changes none of them. A change that is meant to (``make replay ARGS=--write``) says why in its message.
"""

from __future__ import annotations

import functools

import pytest

from tests.replay.cases import CASES, Case
from tests.replay.record import Record
from tests.replay.run import probe, run


@functools.cache
def record() -> tuple[Record, bool]:
    found = Record.read()
    return found, found.probe == probe()


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=() if c.is_quick else pytest.mark.long) for c in CASES]
)
def test_a_run_is_as_it_was(case: Case) -> None:
    on_record, has_values = record()
    assert on_record.first_difference(case.name, run(case), has_values=has_values) is None


def test_every_run_on_record_is_a_case_and_the_other_way_round() -> None:
    assert sorted(record()[0].cases) == sorted(case.name for case in CASES)
    assert len({case.name for case in CASES}) == len(CASES)


@functools.cache
def one_run() -> str:
    import json

    return json.dumps(run(next(case for case in CASES if case.name == "zero3 on 2")))


def changed(**changes: str) -> tuple[Record, dict]:
    import json

    found = Record("", {}, {})
    found.put("a", json.loads(one_run()))
    return found, json.loads(one_run())


def test_a_difference_is_told_in_words() -> None:
    found, now = changed()
    assert found.first_difference("a", now, has_values=True) is None
    now["ranks"][1]["steps"][2]["events"][3] = "all_gather dp_shard nobody fp32 8"
    difference = found.first_difference("a", now, has_values=True)
    assert difference is not None
    assert difference.startswith("a, rank 1, step 2, event 3: all_gather dp_shard blocks.")
    assert difference.endswith(", now all_gather dp_shard nobody fp32 8")


def test_numbers_are_compared_only_where_one_process_computes_the_same() -> None:
    found, now = changed()
    now["ranks"][0]["steps"][1]["loss"] = (1.5).hex()
    difference = found.first_difference("a", now, has_values=True)
    assert difference is not None
    assert "rank 0, step 1: loss " in difference
    assert "now 1.5" in difference
    assert found.first_difference("a", now, has_values=False) is None


def test_state_and_predicted_bytes_are_compared() -> None:
    found, now = changed()
    now["state"]["lm_head.weight"] = "0"
    difference = found.first_difference("a", now, has_values=True)
    assert difference is not None
    assert difference.startswith("a, state: lm_head.weight ")
    found, now = changed()
    now["predicted"]["bytes"]["gathered"] += 1
    difference = found.first_difference("a", now, has_values=False)
    assert difference is not None
    assert difference.startswith("a, predicted bytes: gathered ")
