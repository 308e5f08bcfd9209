"""Draws docs/pictures/*.svg (``python docs/pictures.py``). A test holds the files against what this script draws.

Boxes, words and lanes are those of the reports (``shardwise.report``).
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from shardwise.report.element import Content, Element, svg_file
from shardwise.report.lanes import Bar, Lanes
from shardwise.report.svg import arrow, box, picture, text

ROOT = Path(__file__).parents[1]
PICTURES = Path(__file__).parent / "pictures"

#: What each package is for, in the words of the picture.
JOBS = {
    "testing": "run_on_ranks, the oracle, the probe",
    "cli": "arguments in, text out",
    "integrations": "other people's trainers",
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


def draw_floors() -> Element:
    width, margin, gap, height = 980, 20, 8, 46
    words = "A package imports only what lies below it. Packages side by side do not see each other."
    parts: list[Content] = [text(margin, 28, words, size=13)]
    y = 46
    for names, is_open in floors():
        each = (width - 2 * margin - gap * (len(names) - 1)) / len(names)
        for place, name in enumerate(names):
            x = margin + place * (each + gap)
            fill = "k2" if name == "engine" else "k0" if len(names) > 1 else "k8"
            parts += [
                box(x, y, each, height, fill),
                text(x + each / 2, y + 19, name, size=14, class_="on", anchor="middle"),
            ]
            small = 11 if each > 200 else 9
            lines = [JOBS[name]] if len(JOBS[name]) * small * 0.5 < each else _halves(JOBS[name])
            for line, half in enumerate(lines):
                parts.append(text(x + each / 2, y + 33 + 10 * line, half, size=small, class_="on", anchor="middle"))
        if is_open:
            note = f"these {len(names)} see each other"
            parts.append(text(width - margin, y - 3, note, size=10, class_="faint", anchor="end"))
        y += height + 14
    return picture(width, y + 6, "The floors of shardwise", parts, has_style=True)


def _halves(words: str) -> list[str]:
    split = words.split()
    middle = min(range(1, len(split)), key=lambda at: abs(len(" ".join(split[:at])) - len(words) / 2))
    return [" ".join(split[:middle]), " ".join(split[middle:])]


# -- one step of zero3, as it runs on CUDA


#: Colours of the units and of the optimizer's step.
FILLS = {"root": "k8", "1": "k2", "2": "k4", "3": "k0", "step": "k5"}


def bar(lane: str, unit: str, start: float, stop: float, label: str) -> Bar:
    return Bar(lane, start, stop, label, FILLS[unit])


#: Root with three blocks. Forward is 1, 2, 3; the last unit stays gathered; backward is root, 3, 2, 1.
EVENTS = (
    bar("gather", "root", 0, 1.5, "root"),
    bar("gather", "1", 1.5, 3, "1"),
    bar("compute", "1", 3, 6, "forward 1"),
    bar("gather", "2", 3, 4.5, "2"),
    bar("compute", "2", 6, 9, "forward 2"),
    bar("gather", "3", 6, 7.5, "3"),
    bar("compute", "3", 9, 12, "forward 3"),
    bar("compute", "root", 12, 13, "loss"),
    bar("gather", "2", 13, 14.5, "2"),
    bar("compute", "3", 13, 18, "backward 3"),
    bar("gather", "1", 18, 19.5, "1"),
    bar("compute", "2", 18, 23, "backward 2"),
    bar("reduce", "3", 18, 20.5, "3"),
    bar("compute", "1", 23, 28, "backward 1"),
    bar("reduce", "2", 23, 25.5, "2"),
    bar("reduce", "1", 28, 30.5, "1"),
    bar("reduce", "root", 30.5, 32, "root"),
    bar("compute", "step", 32, 34, "step"),
    bar("slot A", "1", 1.5, 6, "1"),
    bar("slot A", "3", 6, 18, "3"),
    bar("slot A", "1", 18, 28, "1"),
    bar("slot B", "2", 3, 9, "2"),
    bar("slot B", "2", 13, 23, "2"),
    bar("buffers", "3", 13.5, 20.5, "gradients of 3"),
    bar("buffers", "1", 23.5, 30.5, "gradients of 1"),
    bar("buffers 2", "2", 18.5, 25.5, "gradients of 2"),
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


def draw_timeline() -> Element:
    lanes = Lanes(LANES, end=34, width=1120, top=70, height=28, gap=12, breaks=("slot A",))
    parts: list[Content] = [
        text(20, 28, "One training step under zero3: the root and three units. Time goes from left to right.", size=15),
        text(
            20,
            46,
            "The upper three lanes are streams on CUDA; the lower four are memory, with the unit that it belongs to.",
            class_="faint",
        ),
        lanes.parts(EVENTS),
    ]
    for time, source, target in (
        (3, "gather", "compute"),
        (18, "compute", "reduce"),
        (23, "compute", "reduce"),
        (28, "compute", "reduce"),
        (32, "reduce", "compute"),
    ):
        is_down = lanes.y[source] < lanes.y[target]
        start = lanes.y[source] + (lanes.height if is_down else 0)
        end = lanes.y[target] + (0 if is_down else lanes.height)
        parts.append(arrow(lanes.x(time), start, lanes.x(time), end))
    notes = (
        "Forward enters a unit: it waits for its all-gather, releases the unit before, and issues the next all-gather.",
        "The last unit stays gathered: backward needs it first. Backward enters a unit: the next one is gathered.",
        "Backward leaves a unit: its gradients are in a buffer, the unit is released, its reduce-scatter is issued.",
        "Slots and gradient buffers are used in turn: memory is two units and the root, however many units there are.",
    )
    parts += [text(20, lanes.bottom + 30 + 18 * line, words) for line, words in enumerate(notes)]
    return picture(lanes.width, lanes.bottom + 100, "One step of zero3 in time", parts, has_style=True)


DRAWINGS = {"floors.svg": draw_floors, "timeline.svg": draw_timeline}


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (folder / name).write_text(svg_file(draw()))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES)
