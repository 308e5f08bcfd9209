"""The museum: every bug still applies, some are found at their modules, and nothing is found without a bug."""

from __future__ import annotations

import re

import pytest

from tests.museum import page, peers
from tests.museum.catalogue import BUGS, ORDER, STREAMS, Finding, Result
from tests.museum.programs import PROGRAMS, TRANSFORMERS
from tests.museum.run import run
from tests.streams import planted as of_streams

#: One that parity locates, one that a resume shows, and one that the engine refuses.
FEW = {
    "a row-parallel bias is added on every rank": "parity",
    "a resumed epoch begins anew": "resume",
    "moments of the optimizer are not loaded": "checkpoint",
}
#: What no tool finds. A tool that learns to find one is good news: take the bug off this list.
SILENT = {
    "running statistics stay those of each rank",
    "Muon does not orthogonalize",
    "the number of items is that of the whole batch in each microbatch",
    "inputs of units are cast though nobody asked",
    "ranks of tp drop the same places of their own features",
    "data-parallel ranks drop the same places",
    "every epoch has the same order",
    "every rank reads the same samples",
}


def test_every_bug_applies_to_the_source_as_it_is():
    for bug in BUGS.values():
        with bug.planted():
            pass
    assert len(BUGS) >= 40


def test_every_bug_says_where_it_comes_from_and_has_a_program():
    for bug in BUGS.values():
        assert bug.source.startswith(("https://", "commit ")), bug.name
        assert bug.story.endswith("."), bug.name
        is_of_streams = bug.program.removeprefix(STREAMS) in of_streams.BUGS
        assert bug.program in PROGRAMS or is_of_streams or bug.program.startswith(ORDER), bug.name
    assert len({bug.source for bug in BUGS.values() if bug.source.startswith("https")}) >= 40


def test_a_bug_of_each_kind_is_found():
    for name, result in run(list(FEW)):
        assert FEW[name] in {finding.tool for finding in result.findings}, f"{name}: {result}"
        assert result.is_located(BUGS[name]) in {None, True}, f"{name}: {result}"


@pytest.mark.long
@pytest.mark.timeout(900)  # the tools of one bug alone may take LIMIT_S
@pytest.mark.preload(*TRANSFORMERS)
def test_every_bug_is_found_but_for_those_that_are_known_to_be_silent():
    results = dict(run(list(BUGS)))
    assert {name for name, result in results.items() if not result.is_found} == SILENT
    unplaced = {name for name, result in results.items() if result.is_located(BUGS[name]) is False}
    assert unplaced <= SILENT


@pytest.mark.long
@pytest.mark.timeout(900)  # the tools of one bug alone may take LIMIT_S
@pytest.mark.preload(*TRANSFORMERS)
def test_nothing_is_found_without_a_bug():
    by_program = {bug.program: bug.name for bug in BUGS.values()}
    for name, result in run(list(by_program.values()), is_planted=False):
        program = PROGRAMS.get(BUGS[name].program)
        if program is not None and program.is_refused:
            assert [finding.tool for finding in result.findings] == ["checkpoint"], name
        else:
            assert not result.findings, f"{BUGS[name].program}: {result.findings}"


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, peer in peers.PEERS.items() if peer.plant is not None])
def test_the_peers_script_is_right_without_a_bug(name):
    said, numbers = peers.look(name, is_planted=False)
    if "missing weights" in name:
        assert re.search("Missing key", said), said
    else:
        assert (said, numbers) == ("nothing", "right")


def test_the_page_is_what_the_results_say():
    held = page.read()
    assert page.PAGE.read_text() == page.render(held)
    assert set(page.results_of(held)) == set(BUGS)


def test_the_score_counts_what_is_found_and_where():
    bug = BUGS["a row-parallel bias is added on every rank"]
    right, wrong = (Result([Finding("parity", "", module)], 1.0) for module in ("blocks.0.mlp.down", "lm_head"))
    assert (right.is_located(bug), wrong.is_located(bug)) == (True, False)
    nothing = Result([], 1.0)
    results = {bug.name: right, "a resumed epoch begins anew": nothing}
    assert page.score(results) == (
        "1 of 2 are found, 1 are not. Of the 1 that are in modules, 1 are found at the right module."
    )
