"""The board itself: all scenarios are there, scores follow from checks, and the page from the results."""

from __future__ import annotations

import pytest

from tests.reliability import page
from tests.reliability.all import BASELINES, SCENARIOS
from tests.reliability.board import IDS, play, score_of, summary
from tests.reliability.box import Check, Kind, Oracles


def test_every_scenario_is_registered():
    assert set(SCENARIOS) == set(IDS)
    assert len(IDS) == 67
    assert set(BASELINES) <= set(IDS)


@pytest.mark.parametrize(
    ("failed", "score"),
    [((), 2), ((Kind.WORDS,), 1), ((Kind.WORDS, Kind.SAFETY), 0), ((Kind.SAFETY, Kind.NUMBER), -5)],
)
def test_the_worst_failed_check_is_the_score(failed, score):
    assert score_of([Check("holds", True, Kind.NUMBER), *(Check("fails", False, kind) for kind in failed)]) == score


def test_the_page_is_what_the_results_say():
    held = page.read()
    assert page.PAGE.read_text() == page.render(held)
    for name, result in held["shardwise"].items():
        assert (result.fault, result.required) == (SCENARIOS[name].fault, SCENARIOS[name].required)


def test_the_summary_counts_only_what_was_run():
    held = page.read()["shardwise"]
    some = {name: held[name] for name in ("A1", "A2", "A3")}
    assert summary(some) == "3 of 3 as specified (64 of the 67 were not run); silently wrong: 0"
    assert summary(held) == "67 of 67 as specified; silently wrong: 0"


@pytest.mark.long
@pytest.mark.parametrize("name", ["A4", "B3", "C2", "D1", "D10", "E1"])
def test_a_scenario_of_each_section_is_as_specified(name):
    oracles = Oracles()
    try:
        result = play(SCENARIOS[name], SCENARIOS[name].run, oracles)
    finally:
        oracles.close()
    assert result.score == 2, result.failed
