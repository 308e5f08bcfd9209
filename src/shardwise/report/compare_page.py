"""The report of several runs side by side."""

from __future__ import annotations

import os.path
from collections.abc import Sequence

from shardwise.report.page import page
from shardwise.report.parts import MEMORY, stacked
from shardwise.report.run import Run
from shardwise.report.run_page import CURVES, HELD_OUT, LOSS, curve_figure, flat, memory_stacks
from shardwise.spec.text import size


def compare_page(runs: Sequence[Run]) -> str:
    """One page of HTML that lays runs over each other."""
    letters = [chr(ord("A") + index) if index < 26 else f"#{index + 1}" for index in range(len(runs))]
    names = [f"{letter} {name}" for letter, name in zip(letters, _names(runs), strict=True)]
    figures = [
        curve_figure({curve: [curve.line(run, letter) for letter, run in zip(letters, runs, strict=True)]})
        for curve in (LOSS, HELD_OUT, *CURVES)
    ]
    stacks = [stack for letter, run in zip(letters, runs, strict=True) for stack in memory_stacks(run, f"{letter}, ")]
    return page(
        "compare.html.jinja",
        f"{len(runs)} runs compared",
        letters=letters,
        runs=list(zip(names, runs, strict=True)),
        training=[figure for figure in figures if figure],
        memory=stacked(stacks, MEMORY, shown=size),
        settings=_differences([flat(run.config) for run in runs]),
        environments=_differences([flat(run.environment) for run in runs]),
    )


def _names(runs: Sequence[Run]) -> list[str]:
    """The folders' names, with as much of the path as tells them apart."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    paths = [run.directory.resolve() for run in runs]
    shared = os.path.commonpath([path.parent for path in paths])
    return [os.path.relpath(path, shared) for path in paths]


def _differences(found: Sequence[dict[str, str]]) -> list[list[str]] | None:
    """Settings that are not the same everywhere; ``None`` where nothing is set."""
    keys = list(dict.fromkeys(key for values in found for key in values))
    rows = [[key, *(values.get(key, "not set") for values in found)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1] if keys else None
