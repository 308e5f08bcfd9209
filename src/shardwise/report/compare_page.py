"""Several runs side by side."""

from __future__ import annotations

import os.path
from collections.abc import Callable, Sequence

from shardwise.report import beside
from shardwise.report.chart import Stack, fills_of, stacked_bars
from shardwise.report.curves import CURVES, HELD_OUT, LOSS, curve_figure
from shardwise.report.element import Content, el
from shardwise.report.memory_parts import CATEGORIES, ordered
from shardwise.report.page import Section, figure, left_out, legend, page, table
from shardwise.report.run import Run, finite
from shardwise.report.run_page import flat, state, strategy
from shardwise.report.scale import loss, num_bytes, seconds
from shardwise.report.svg import NUM_STROKES, stroke
from shardwise.report.warnings import warnings


def compare_page(runs: Sequence[Run]) -> str:
    """One page of HTML that lays runs over each other."""
    names = _names(runs)
    letters = [_letter(index) for index in range(len(runs))]
    missing: list[str] = []
    sections = [
        Section("Training", _training(runs, names, letters)),
        Section("Results", [_results(runs, names, letters)]),
        Section("Predicted beside measured", _beside(runs, names, letters, missing)),
        Section("Memory", _memory(runs, names, letters, missing)),
        Section("What differs", _differences(runs, letters)),
    ]
    sections += left_out(missing)
    key = table(
        "The runs",
        ["run", "model", "strategy", "ranks", "how it ended"],
        [_row(run, name, letter) for run, name, letter in zip(runs, names, letters, strict=True)],
        numbers=[3],
        words=[4],
    )
    notes = [
        el("p", f"Note on {letter}: {words}")
        for run, letter in zip(runs, letters, strict=True)
        for words in (*warnings(run), *(f"{problem}." for problem in run.problems))
    ]
    return page(
        f"{len(runs)} runs compared",
        [key, notes],
        sections,
        foot="Written by shardwise from the files of the runs' folders.",
    )


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else f"#{index + 1}"


def _names(runs: Sequence[Run]) -> list[str]:
    """The folders' names, with as much of the path as tells them apart."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    paths = [run.directory.resolve() for run in runs]
    shared = os.path.commonpath([path.parent for path in paths])
    return [os.path.relpath(path, shared) for path in paths]


def _row(run: Run, name: str, letter: str) -> list[Content]:
    model = run.config.get("model", {})
    named = (model.get("preset") or model.get("hf") or "n/a") if isinstance(model, dict) else "n/a"
    ranks = run.summary.get("world_size") or run.plan.get("world_size") or "n/a"
    return [f"{letter} {name}", str(named), strategy(run) or "n/a", str(ranks), state(run)[0]]


def _training(runs: Sequence[Run], names: Sequence[str], letters: Sequence[str]) -> list[Content]:
    figures = [curve_figure(runs, curve, letters) for curve in (LOSS, HELD_OUT, *CURVES)]
    entries = [(f"{letter}: {name}", stroke(i)) for i, (letter, name) in enumerate(zip(letters, names, strict=True))]
    if not any(item is not None for item in figures):
        return [el("p", "No run has recorded a step.")]
    again = f" From the {NUM_STROKES + 1}th run on, colours and dashes repeat; the letters do not." * (
        len(runs) > NUM_STROKES
    )
    return [
        legend(entries, is_lines=True),
        el("p", f"Every curve has its run's letter at its end.{again}", class_="faint"),
        el("div", figures, class_="grid-3"),
    ]


def _results(runs: Sequence[Run], names: Sequence[str], letters: Sequence[str]) -> Content:
    base = beside.step_time(runs[0])
    rows: list[list[Content]] = []
    for run, name, letter in zip(runs, names, letters, strict=True):
        pace = finite(run.summary.get("tokens_per_s")) or run.mean("tokens_per_s")
        time_s = beside.step_time(run)
        peak = beside.peak_bytes(run)
        rows.append([
            f"{letter} {name}",
            _or_not(run.steps[-1] if run.records else None, "{:,}".format),
            _or_not(run.last("loss"), loss),
            _or_not(run.last("eval_loss"), loss),
            _or_not(pace, "{:,.0f}".format),
            _or_not(time_s, seconds),
            f"{time_s / base:.2f}" if time_s and base else "n/a",
            _or_not(run.median("mfu"), "{:.1%}".format),
            _or_not(peak, num_bytes),
            _or_not(run.median("collective_bytes"), num_bytes),
        ])  # fmt: skip
    columns = [
        "run",
        "step",
        "loss",
        "held-out",
        "tokens/s",
        "step time",
        "over A",
        "MFU",
        "peak memory",
        "sent per step",
    ]
    return table("Newest losses, mean speed, peak memory", columns, rows)


def _or_not(value: float | None, shown: Callable[[float], str]) -> str:
    return "n/a" if value is None else shown(value)


def _beside(runs: Sequence[Run], names: Sequence[str], letters: Sequence[str], missing: list[str]) -> list[Content]:
    rows: list[list[Content]] = [
        [f"{letter} {name}", *cells]
        for run, name, letter in zip(runs, names, letters, strict=True)
        for cells in beside.rows(run)
        if cells[1] != "n/a"
    ]
    if not rows:
        missing.append("Predicted beside measured: no run holds a prediction.")
        return []
    columns = ["run", "what", "predicted", "measured", "measured / predicted"]
    return [table("What was predicted, and what was measured", columns, rows, numbers=[2, 3, 4])]


def _memory(runs: Sequence[Run], names: Sequence[str], letters: Sequence[str], missing: list[str]) -> list[Content]:
    held = [run.predicted_bytes for run in runs]
    order = ordered(list(dict.fromkeys(name for parts in held for name in parts)), CATEGORIES)
    fills = fills_of(order, CATEGORIES) | {"measured": "k8"}
    stacks = []
    for run, name, letter, parts in zip(runs, names, letters, held, strict=True):
        if parts:
            stacks.append(Stack(f"{letter} {name}, predicted", parts, num_bytes(sum(parts.values()))))
        peak = beside.peak_bytes(run)
        if peak:
            stacks.append(Stack(f"{letter} {name}, measured", {"measured": peak}, num_bytes(peak)))
    bars = stacked_bars(
        stacks, fills, title="Peak bytes of tensors of every run, predicted and measured.", shown=num_bytes
    )
    if bars is None:
        missing.append("Memory: no run holds a prediction or a measured peak.")
        return []
    entries = [(name, fills[name]) for name in order]
    rows = [
        [f"{letter} {name}", *(num_bytes(parts.get(category, 0)) if parts else "n/a" for category in order)]
        for name, letter, parts in zip(names, letters, held, strict=True)
    ]
    return [
        figure("Peak of a step, the fullest rank", [bars, legend(entries)], "Bytes of tensors."),
        table("Predicted bytes by category", ["run", *order], rows) if order else None,
    ]


def _differences(runs: Sequence[Run], letters: Sequence[str]) -> list[Content]:
    settings = [flat(run.config) for run in runs]
    places = [flat(run.environment) for run in runs]
    made: list[Content] = []
    for caption, found in (("Settings that differ", settings), ("Environments that differ", places)):
        keys = list(dict.fromkeys(key for values in found for key in values))
        rows = [[key, *(values.get(key, "not set") for values in found)] for key in keys]
        rows = [row for row in rows if len(set(row[1:])) > 1]
        if rows:
            made.append(table(caption, ["", *letters], rows, numbers=[]))
        elif keys:
            made.append(el("p", f"{caption}: none."))
    return made or [el("p", "No run has a config.yaml.")]
