"""The tables of docs/which-plan.md and both support.md are those that their scripts make."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import strategy_table, support_table

DOCS = Path(__file__).parents[2] / "docs"
SUPPORT = (DOCS / "support.md").read_text("utf-8")


def between(text: str, start: str, end: str) -> str:
    return text.partition(start)[2].partition(end)[0].strip()


def test_memory_and_time_of_each_strategy_are_the_planners() -> None:
    text = (DOCS / "which-plan.md").read_text("utf-8")
    stale = "run: python -m bench.strategy_table"
    assert between(text, strategy_table.START, strategy_table.END) == strategy_table.table().strip(), stale


def test_the_degrees_of_each_family_are_the_planners() -> None:
    start, end = "<!-- families: made by python -m bench.support_table -->", "<!-- end of families -->"
    assert between(SUPPORT, start, end) == support_table.families().strip(), "run: python -m bench.support_table"


def rows(text: str, heading: str) -> list[list[str]]:
    table = text.partition(heading)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


BY_NAME = {option.written: option for option in support_table.OPTIONS}


@pytest.mark.slow
def test_what_the_page_calls_refused_is_refused_with_these_words() -> None:
    refused = rows(support_table.REFUSED.read_text("utf-8"), "\n| option | with | message |")
    assert len(refused) > 10
    for first, second, *message in refused:
        (one,), (other,) = names(first), names(second)
        if other in support_table.STRATEGIES:
            found = support_table.refusal(other, BY_NAME[one])
        else:
            found = support_table.refusal("zero3", BY_NAME[one], BY_NAME[other])
        assert found == " | ".join(message), (first, second, "run: python -m bench.support_table")


@pytest.mark.slow
def test_options_that_the_page_calls_possible_run() -> None:
    """A part of them, another one for each strategy; ``python -m bench.support_table`` tries all."""
    table = rows(SUPPORT, "\n| option | `ddp` |")
    assert [names(row[0]) for row in table] == [[option.written] for option in support_table.OPTIONS]
    for place, strategy in enumerate(support_table.STRATEGIES):
        for option, *cells in table[place :: len(support_table.STRATEGIES)]:
            (name,) = names(option)
            is_refused = support_table.refusal(strategy, BY_NAME[name]) is not None
            assert cells[place] == ("no" if is_refused else "yes"), (strategy, name)
