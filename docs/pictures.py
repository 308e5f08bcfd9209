"""Draws docs/pictures/*.svg (``python docs/pictures.py``). A test holds the files against what this script draws."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURES = Path(__file__).parent / "pictures"

#: What each package is for, in the words of the picture.
JOBS = {
    "testing": "run_on_ranks, the oracle, the probe",
    "cli": "arguments in, text out",
    "train": "the trainer: configuration, data, loop, run folder",
    "report": "reports of plans and runs",
    "api": "what a user calls, one file for each verb",
    "planner": "chooses a plan",
    "generation": "inference",
    "pipeline": "stages, their steps and messages",
    "checkpoint": "files",
    "measure": "what a model holds, by running it",
    "engine": "when units are gathered, released, reduced",
    "forms": "how a shard is held",
    "features": "what attaches to the engine",
    "state": "whole tensors in and out",
    "init": "first values",
    "optim": "what meets shards at the step",
    "embedding": "tables with rows on all ranks",
    "expert": "mixtures of experts",
    "tensor": "tp: cut weights",
    "context": "cp: cut sequences",
    "sim": "simulation",
    "cost": "costs",
    "models": "our GPT",
    "comm": "the only door to torch.distributed",
    "launch": "worlds and processes",
    "spec": "plain data and arithmetic, no torch",
    "torch_private": "private names of torch",
}

INK, FAINT, PAPER = "#1f2933", "#7b8794", "#ffffff"
COLOURS = {"root": "#cbd2d9", "1": "#9fd3c7", "2": "#f6c48f", "3": "#a9c5ee", "step": "#e3c6ea"}


def text(x: float, y: float, words: str, *, size: int = 13, colour: str = INK, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{colour}" stroke="{INK}"'
        ' stroke-width="0.7"/>'
    )


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" stroke="{FAINT}" fill="none" marker-end="url(#head)"/>'


def picture(width: int, height: int, title: str, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' font-family="DejaVu Sans, Verdana, sans-serif" role="img"><title>{escape(title)}</title>'
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{FAINT}"/></marker></defs>'
    )
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="{PAPER}"/>', *parts, "</svg>\n"])


# -- the floors, as pyproject.toml enforces them


def floors() -> list[tuple[list[str], bool]]:
    """Packages that exist, from top to bottom, and whether those of a floor may import each other."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(contract["layers"] for contract in tools["contracts"] if contract["type"] == "layers")
    found = []
    for layer in layers:
        names = [name.strip(" ()") for name in layer.replace(":", "|").split("|")]
        there = [name for name in names if any((ROOT / "src/shardwise").glob(f"{name}*"))]
        if there:
            found.append((there, ":" in layer))
    return found


def draw_floors() -> str:
    width, margin, gap, top = 980, 20, 8, 46
    parts = [
        text(margin, 28, "A package imports only what lies below it. Packages side by side do not see each other.")
    ]
    y = top
    for names, is_open in floors():
        height = 46
        each = (width - 2 * margin - gap * (len(names) - 1)) / len(names)
        for place, name in enumerate(names):
            x = margin + place * (each + gap)
            colour = COLOURS["1"] if name == "engine" else COLOURS["3"] if len(names) > 1 else COLOURS["root"]
            parts += [box(x, y, each, height, colour), text(x + each / 2, y + 19, name, size=14, anchor="middle")]
            small = 11 if each > 200 else 9
            lines = [JOBS[name]] if len(JOBS[name]) * small * 0.5 < each else _halves(JOBS[name])
            for line, words in enumerate(lines):
                parts.append(text(x + each / 2, y + 33 + 10 * line, words, size=small, anchor="middle"))
        if is_open:
            parts.append(
                text(width - margin, y - 3, f"these {len(names)} see each other", size=10, colour=FAINT, anchor="end")
            )
        y += height + 14
    return picture(width, y + 6, "The floors of shardwise", parts)


def _halves(words: str) -> list[str]:
    split = words.split()
    middle = min(range(1, len(split)), key=lambda at: abs(len(" ".join(split[:at])) - len(words) / 2))
    return [" ".join(split[:middle]), " ".join(split[middle:])]


# -- one step of zero3, as it runs on CUDA


@dataclass(frozen=True)
class Event:
    """Something that occupies a lane from ``start`` to ``stop``, for a unit."""

    lane: str
    unit: str
    start: float
    stop: float
    label: str


#: Root with three blocks. Forward is 1, 2, 3; the last unit stays gathered; backward is root, 3, 2, 1.
EVENTS = (
    Event("gather", "root", 0, 1.5, "root"),
    Event("gather", "1", 1.5, 3, "1"),
    Event("compute", "1", 3, 6, "forward 1"),
    Event("gather", "2", 3, 4.5, "2"),
    Event("compute", "2", 6, 9, "forward 2"),
    Event("gather", "3", 6, 7.5, "3"),
    Event("compute", "3", 9, 12, "forward 3"),
    Event("compute", "root", 12, 13, "loss"),
    Event("gather", "2", 13, 14.5, "2"),
    Event("compute", "3", 13, 18, "backward 3"),
    Event("gather", "1", 18, 19.5, "1"),
    Event("compute", "2", 18, 23, "backward 2"),
    Event("reduce", "3", 18, 20.5, "3"),
    Event("compute", "1", 23, 28, "backward 1"),
    Event("reduce", "2", 23, 25.5, "2"),
    Event("reduce", "1", 28, 30.5, "1"),
    Event("reduce", "root", 30.5, 32, "root"),
    Event("compute", "step", 32, 34, "step"),
    Event("slot A", "1", 1.5, 6, "1"),
    Event("slot A", "3", 6, 18, "3"),
    Event("slot A", "1", 18, 28, "1"),
    Event("slot B", "2", 3, 9, "2"),
    Event("slot B", "2", 13, 23, "2"),
    Event("buffers", "3", 13.5, 20.5, "gradients of 3"),
    Event("buffers", "1", 23.5, 30.5, "gradients of 1"),
    Event("buffers 2", "2", 18.5, 25.5, "gradients of 2"),
)
LANES = {
    "compute": "compute",
    "gather": "all-gather",
    "reduce": "reduce-scatter",
    "slot A": "slot A",
    "slot B": "slot B",
    "buffers": "gradient buffer A",
    "buffers 2": "gradient buffer B",
}


def draw_timeline() -> str:
    left, top, scale, height, gap = 140, 70, 24.0, 28, 12
    places = {lane: top + index * (height + gap) + (18 if index > 2 else 0) for index, lane in enumerate(LANES)}
    parts = [
        text(20, 28, "One training step under zero3: the root and three units. Time goes from left to right.", size=15),
        text(
            20,
            46,
            "The upper three lanes are streams on CUDA; the lower four are memory, with the unit that it belongs to.",
            size=12,
            colour=FAINT,
        ),
    ]
    for lane, name in LANES.items():
        parts.append(text(left - 12, places[lane] + 19, name, anchor="end"))
        parts.append(f'<path d="M{left} {places[lane] + height} h{34 * scale:g}" stroke="#e4e7eb"/>')
    for event in EVENTS:
        x, width = left + event.start * scale, (event.stop - event.start) * scale
        parts.append(box(x, places[event.lane], width, height, COLOURS[event.unit]))
        parts.append(text(x + width / 2, places[event.lane] + 19, event.label, size=12, anchor="middle"))
    for time, source, target in (
        (3, "gather", "compute"),
        (18, "compute", "reduce"),
        (23, "compute", "reduce"),
        (28, "compute", "reduce"),
        (32, "reduce", "compute"),
    ):
        is_down = places[source] < places[target]
        start = places[source] + (height if is_down else 0)
        end = places[target] + (0 if is_down else height)
        parts.append(arrow(left + time * scale, start, left + time * scale, end))
    bottom = places["buffers 2"] + height
    notes = (
        "Forward enters a unit: it waits for its all-gather, releases the unit before, and issues the next all-gather.",
        "The last unit stays gathered: backward needs it first. Backward enters a unit: the next one is gathered.",
        "Backward leaves a unit: its gradients are in a buffer, the unit is released, its reduce-scatter is issued.",
        "Slots and gradient buffers are used in turn: memory is two units and the root, however many units there are.",
    )
    parts += [text(20, bottom + 30 + 18 * line, words, size=12) for line, words in enumerate(notes)]
    return picture(int(left + 34 * scale + 20), bottom + 110, "One step of zero3 in time", parts)


DRAWINGS = {"floors.svg": draw_floors, "timeline.svg": draw_timeline}


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (folder / name).write_text(draw())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES)
