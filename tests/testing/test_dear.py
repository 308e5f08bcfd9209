"""`make test` runs a tenth of the dear tests of each folder, and each of them in some week."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests import dear


def test_in_as_many_weeks_as_there_are_shares_every_dear_test_has_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [f"tests/a/{number % 2}.py::test[{number}]" for number in range(25)]
    two = ["tests/b/b.py::test_x", "tests/b/b.py::test_y"]
    monkeypatch.setattr(dear, "read", lambda: dict.fromkeys([*many, *two], 9.0))
    weeks = [dear.left_out([*many, *two, "tests/b/b.py::test_cheap"], week) for week in range(2930, 2930 + dear.SHARE)]
    runs = Counter(name for left in weeks for name in {*many, *two} - left)
    assert all(runs[name] == 1 for name in many)
    assert all(runs[name] == dear.SHARE // 2 for name in two)
    assert sorted(len({*many} - left) for left in weeks) == [2] * 5 + [3] * 5
    assert all("tests/b/b.py::test_cheap" not in left for left in weeks)


def test_a_week_is_repeated_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_TEST_WEEK", "2926")
    assert dear.week() == 2926


def test_the_list_names_tests_that_there_are() -> None:
    """A test that was renamed would run every week, and a run of the list would find nothing under its old name."""
    assert [name for name in dear.read() if not dear.exists(name)] == []


def test_the_list_keeps_what_did_not_run_and_forgets_what_is_cheap_or_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = "tests/testing/test_dear.py::test_"
    names = [
        f"{here}a_week_is_repeated_by_its_number",
        f"{here}the_list_keeps_what_did_not_run_and_forgets_what_is_cheap_or_gone",
    ]
    gone = f"{here}nothing_of_this_name"
    monkeypatch.setattr(dear, "LIST", tmp_path / "dear.txt")
    dear.LIST.write_text("".join(f"5.0 {name}\n" for name in [*names, gone]), "utf-8")
    durations = tmp_path / "durations.json"
    durations.write_text(json.dumps({names[0]: 1.0, f"{names[1]}[case]": 7.25}), "utf-8")
    dear.write(durations)
    assert dear.read() == {names[1]: 5.0, f"{names[1]}[case]": 7.2}
