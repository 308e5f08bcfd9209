"""Draws docs/pictures/*.svg (``python docs/pictures.py``). A test holds the files against what this script draws."""

from __future__ import annotations

import functools
import itertools
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

from drawing import Bar, Content, Lanes, arrow, box, picture_file, text

from shardwise.report.parts import ACTIONS
from shardwise.sim.step import SimulatedStep, StepUnit, Transfer, simulate_step
from shardwise.spec.placement import PRESETS
from shardwise.spec.schedule import PipelinePolicy
from shardwise.spec.schedule.simulate import Durations, simulate

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "shardwise"
PICTURES = Path(__file__).parent / "pictures"

#: What each package is for, in the words of the picture.
JOBS = {
    "testing": "run_on_ranks, the oracle, the probe",
    "cli": "arguments in, text out",
    "integrations": "other people's trainers",
    "serve": "answers requests over HTTP",
    "train": "the trainer: configuration, data, loop, run folder",
    "report": "reports of plans and runs",
    "api": "what a user calls, one file for each verb",
    "planner": "chooses a plan",
    "generation": "inference",
    "parallel.pipeline": "stages, their steps and messages",
    "checkpoint": "files",
    "measure": "what a model holds, by running it",
    "engine": "when units are gathered, released, reduced",
    "engine.storage": "how a shard is held",
    "engine.extensions": "what attaches to the engine",
    "weights.state": "whole tensors in and out",
    "weights.init": "first values",
    "optim": "what meets shards at the step",
    "parallel.sharded_embedding": "tables with rows on all ranks",
    "parallel.experts": "mixtures of experts",
    "parallel.tensor": "tp: cut weights",
    "parallel.context": "cp: cut sequences",
    "sim": "simulation",
    "cost": "costs",
    "models": "our GPT",
    "comm": "the only door to torch.distributed",
    "launch": "worlds and processes",
    "spec": "plain data and arithmetic, no torch",
    "torch_private": "private names of torch",
    "nested": "tensors in containers",
}

# -- the floors, as pyproject.toml enforces them


def floors() -> list[tuple[list[str], bool]]:
    """Packages that exist, from top to bottom, and whether those of a floor may import each other."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(contract["layers"] for contract in tools["contracts"] if contract["type"] == "layers")
    found = []
    for layer in layers:
        names = (name.strip(" ()") for name in layer.replace(":", "|").split("|"))
        there = [name for name in names if any(SOURCE.glob(f"{name.replace('.', '/')}*"))]
        drawn = list(dict.fromkeys(_package(name) for name in there))
        if drawn:
            found.append((drawn, ":" in layer and len(drawn) > 1))
    return found


def _package(name: str) -> str:
    """A package itself. For a module of a package beside others of it: the package."""
    is_module = "." in name and not (SOURCE / name.replace(".", "/")).is_dir()
    return name.rpartition(".")[0] if is_module else name


def draw_floors() -> str:
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
    return picture_file(width, y + 6, "The floors of shardwise", parts)


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


def draw_timeline() -> str:
    lanes = Lanes(LANES, end=33, width=1120, top=70, height=28, gap=12, breaks=("slot A",))
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
    return picture_file(lanes.width, lanes.bottom + 100, "One step of zero3 in time", parts)


# -- what moves when, by strategy: the simulator's step


#: Of the pages' text, so that words in pictures are as large as those around them.
WIDTH = 740
#: Units of the pictures: a root with three blocks. A transfer of a block takes as long as its forward.
UNITS = ("root", "1", "2", "3")
STREAMS = {"compute": "compute", "gather": "all-gather", "reduce": "reduce-scatter"}
#: What a rank of four holds between steps of parameters, gradients and optimizer state: the whole, or a part.
HELD = {"ddp": "111", "zero1": "110", "zero2": "100", "shard_grad_op": "000", "zero3": "000"}
WORDS = {
    "ddp": "Every rank holds everything. Gradients of a unit are all-reduced while backward continues.",
    "zero1": "The optimizer's state is sharded. After the step the next forward gathers the updated parameters.",
    "zero2": "Gradients are sharded too: what reduce-scatter has sent is no longer held.",
    "shard_grad_op": "Parameters are sharded too, and stay gathered from forward to backward.",
    "zero3": "Units are released after forward and gathered once more in backward: two units and the root are whole.",
}


def simulated(strategy: str) -> SimulatedStep:
    """A step of the four units under a strategy, in units of a block's forward."""
    row = PRESETS[strategy]
    gather = (0.4, 0.8) if row.shards_optimizer else ()
    reduce = (0.4, 0.8) if row.shards_optimizer else (0.8, 1.6)  # an all-reduce sends twice as much

    def transfers(seconds: tuple[float, ...], *, is_root: bool) -> tuple[Transfer, ...]:
        return (Transfer(seconds[0 if is_root else 1]),) if seconds else ()

    units = [
        StepUnit(
            name,
            forward_s=0.2 if name == "root" else 1.0,
            backward_s=0.4 if name == "root" else 2.0,
            forward_end_s=0.6 if name == "root" else 0.0,
            backward_end_s=0.2 if name == "root" else 0.0,
            gather=transfers(gather, is_root=name == "root"),
            reduce=transfers(reduce, is_root=name == "root"),
        )
        for name in UNITS
    ]
    return simulate_step(units, row, optimizer_s=0.3 if row.shards_optimizer else 0.8)


def draw_strategy(strategy: str) -> str:
    step = simulated(strategy)
    ((timeline, _),) = step.microbatches
    names = {key: name for key, name in STREAMS.items() if key in timeline.streams}
    if "gather" not in names:
        names["reduce"] = "all-reduce"
    lanes = Lanes(names, end=15, width=WIDTH, top=96, height=26, gap=8)
    parts: list[Content] = [text(20, 26, strategy, size=15), text(20, 46, WORDS[strategy], class_="faint")]
    for place, (name, part) in enumerate(zip(("parameters", "gradients", "optimizer"), HELD[strategy], strict=True)):
        x, width = 20 + 240 * place, 80.0 if part == "1" else 20.0
        share = "whole" if part == "1" else "a quarter"
        parts += [
            box(x, 62, 80, 16, "paper"),
            box(x, 62, width, 16, ("k0", "k2", "k7")[place]),
            text(x + 88, 75, f"{name}: {share}"),
        ]
    bars = [bar("compute", "step", timeline.end_s, timeline.end_s + step.optimizer_s, "step")]
    for stream, spans in timeline.streams.items():
        seen: set[str] = set()
        for span in spans:
            unit = span.task.label
            label = f"{'B' if unit in seen else 'F'}{unit}" if stream == "compute" else unit
            seen.add(unit)
            if span.end_s > span.begin_s:
                bars.append(bar(stream, unit, span.begin_s, span.end_s, label if unit != "root" else ""))
    parts += lanes.parts(bars)
    return picture_file(lanes.width, lanes.bottom + 14, f"One step under {strategy}", parts)


# -- a pipeline's schedules, and a block that tp cuts


def draw_pipeline() -> str:
    """1F1B and a zero-bubble schedule of the same stages and microbatches."""
    top = 66
    parts: list[Content] = [text(20, 28, "Four ranks of a pipeline, eight microbatches. Empty is the bubble.", size=15)]
    for name in ("1f1b", "zb-h1"):
        built = PipelinePolicy(name, num_microbatches=8).build(4)
        timing = simulate(built, Durations())
        lanes = Lanes({str(rank): f"rank {rank}" for rank in range(4)}, end=33, width=WIDTH, top=top, height=22, gap=5)
        bars = [
            Bar(
                str(rank),
                span.start,
                span.end,
                f"{ACTIONS[span.action.kind][0]}{span.action.microbatch}",
                f"k{ACTIONS[span.action.kind][2]}",
            )
            for rank, spans in enumerate(timing.spans)
            for span in spans
        ]
        share = f"{float(timing.bubble_share):.0%}"
        parts += [text(20, top - 10, f"{name}: a rank is idle for {share} of the step"), *lanes.parts(bars)]
        top = int(lanes.bottom) + 44
    note = "F: forward. B: backward, or the half of it that makes the gradient of the input. W: the other half."
    parts.append(text(20, top - 14, note, class_="faint"))
    return picture_file(WIDTH, top, "Schedules of a pipeline", parts)


def draw_tensor() -> str:
    """The MLP of a block on two ranks."""
    parts: list[Content] = [
        text(20, 28, "The MLP of a block under tp=2: each rank multiplies by half of both weights.", size=15)
    ]
    for rank in range(2):
        y = 60 + 120 * rank
        parts.append(text(20, y + 42, f"rank {rank}"))
        half = ("left", "right")[rank]
        boxes = (
            (64, 60, 70, "k8", "x", "whole"),
            (156, 90, 70, "k0", "up", f"{half} columns"),
            (278, 90, 70, "k4", "activation", f"{half} half"),
            (400, 90, 70, "k0", "down", f"{('upper', 'lower')[rank]} rows"),
            (522, 100, 70, "k4", "partial sum", "of every output"),
            (674, 56, 70, "k8", "y", "whole"),
        )
        for x, width, height, fill, name, words in boxes:
            middle = x + width / 2
            parts += [
                box(x, y, width, height, fill),
                text(middle, y + 32, name, class_="on", anchor="middle", size=14),
                text(middle, y + 50, words, class_="on", anchor="middle", size=11),
            ]
        ends = [(x, x + width) for x, width, *_ in boxes]
        parts += [arrow(stop + 4, y + 35, start - 4, y + 35) for (_, stop), (start, _) in itertools.pairwise(ends)]
    parts += [box(636, 50, 20, 210, "k3"), text(646, 280, "all-reduce", anchor="middle")]
    return picture_file(WIDTH, 296, "The MLP of a block under tensor parallelism", parts)


DRAWINGS: dict[str, Callable[[], str]] = {
    "floors.svg": draw_floors,
    "timeline.svg": draw_timeline,
    "pipeline.svg": draw_pipeline,
    "tensor.svg": draw_tensor,
    **{f"moves-{strategy}.svg": functools.partial(draw_strategy, strategy) for strategy in HELD},
}


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (folder / name).write_text(draw())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES)
