"""The tables of docs/memory.md are what dry runs of the engine hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.memory_table import END, POLICIES, ROWS, START, WORLDS, Row, bytes_per_parameter
from shardwise.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "memory.md").read_text("utf-8")
SMALL = {"num_layers": 5, "hidden": 128, "num_heads": 4, "vocab_size": 256}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def states(lines: list[str]) -> list[list[str]]:
    """Of each line its strategy, parameters, gradients and optimizer."""
    columns = [re.split(r" {2,}", line) for line in lines]
    return [[column[0], *column[2:5]] for column in columns]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_formulas_are_what_dry_runs_hold(row: Row) -> None:
    for place, policy in enumerate(POLICIES.values()):
        for world in (2, 8):  # two numbers of ranks tell what is whole from what is cut
            held = bytes_per_parameter(row, policy, world, "gpt-nano", **SMALL)
            assert held == pytest.approx(row.value(place, world), rel=0.01), (place, world)


def test_the_table_has_the_formulas_and_measurements_that_agree_with_them() -> None:
    lines = PAGE.partition(START)[2].partition(END)[0].strip().splitlines()
    for line, row in zip(lines[2:], ROWS, strict=True):
        name, *rest = cells(line)
        assert name == row.name
        for place in range(len(POLICIES)):
            formula, *held = rest[place * (1 + len(WORLDS)) :][: 1 + len(WORLDS)]
            assert formula == row.formula(place)
            for world, number in zip(WORLDS, held, strict=True):
                assert float(number) == pytest.approx(row.value(place, world), rel=0.01, abs=0.005)


def test_zero_is_compared_by_the_same_formulas() -> None:
    stages = {"ddp": ROWS[0], **{row.strategy: row for row in ROWS[1:5]}}
    lines = PAGE.partition("| | ZeRO's paper")[2].splitlines()[2:6]
    for line in lines:
        title, _, bf16, mixed, fp32 = cells(line)
        row = stages[re.findall(r"`(\w+)`", title)[0]]
        assert [fp32, mixed, bf16] == [row.formula(place) for place in range(3)]


@pytest.mark.slow
def test_the_command_of_the_page_prints_these_states(capsys: pytest.CaptureFixture[str]) -> None:
    command, *shown = re.findall(r"```console\n\$ (.*?)```", PAGE, re.DOTALL)[0].splitlines()
    assert main(command.removeprefix("shardwise ").split()) == 0
    assert states(capsys.readouterr().out.splitlines()[: len(shown)]) == states(shown)
