"""The report of plans: what fits, how fast it is, and why, before anything is launched."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from shardwise.cost.hardware import GIB
from shardwise.planner import Estimate
from shardwise.planner.explain import gib, num_microbatches, seconds, title, why
from shardwise.planner.simulated import simulated
from shardwise.report import mesh
from shardwise.report.chart import Stack, fills_of, stacked_bars
from shardwise.report.element import Content, Element, el
from shardwise.report.memory_parts import CATEGORIES, memory_timeline, ordered
from shardwise.report.page import Section, figure, folded, left_out, legend, page, table, tiles
from shardwise.report.pipeline import simulated_chart
from shardwise.report.run_page import flat
from shardwise.report.scale import seconds as spent
from shardwise.report.streams import simulated_spans, streams_figure
from shardwise.report.time_parts import TIME
from shardwise.sim.pipeline import SimulatedPipeline
from shardwise.spec.errors import PlanError
from shardwise.spec.mesh import AXES
from shardwise.spec.text import size

#: Plans whose bars are drawn, and rows of the table, at most.
BARS, ROWS = 12, 40


def plan_report(estimates: Sequence[Estimate], *, remedies: Sequence[str] = ()) -> str:
    """One page of HTML about plans, the best first, for one model on one cluster.

    Args:
        estimates: The plans.
        remedies: Where none fits: changes with which one would, in words.

    Raises:
        PlanError: There is no plan.
    """
    if not estimates:
        raise PlanError("there is no plan to report.\n  Ask for fewer restrictions, or for more GPUs.")
    best = estimates[0]
    missing: list[str] = []
    sections = [
        Section("Plans", [_table(estimates)]),
        Section("Where the time of a step goes", _time(estimates)),
        Section("Memory", [*_memory(estimates), *_timeline(best, missing)]),
        Section("Step of the first plan", _step(best, missing)),
        Section("Mesh of the first plan", _mesh(best)),
        Section("What was asked", _asked(best)),
    ]
    sections = [section for section in sections if section.content]
    sections += left_out(missing)
    cluster = best.cluster
    heading = f"{_model(best)} on {cluster.num_gpus:,} x {cluster.gpu}"
    words = f"First plan: {name_of(best)}. " + ("It fits." if best.fits else f"It does not fit: {best.reason}.")
    num_fitting = sum(estimate.fits for estimate in estimates)
    count = (
        f"{len(estimates)} plans, of which {num_fitting} fit. Nothing here was measured: all figures are predictions."
    )
    lead = [
        el("p", words, class_="state good" if best.fits else "state bad"),
        [el("p", sentence) for sentence in why(best)],
        [el("p", "It would fit with:"), el("ul", [el("li", change) for change in remedies])] if remedies else None,
        el("p", count, class_="faint"),
        tiles(_facts(best)),
    ]
    return page(heading, lead, sections, foot="Written by shardwise from its own predictions.")


def name_of(estimate: Estimate) -> str:
    """A plan in a few words: its title, microbatch and recomputation."""
    work = estimate.workload
    recomputed = f", recompute {work.recompute}" if work.recompute not in {"none", 0} else ""
    return f"{title(estimate)}, micro {work.micro_batch}{recomputed}"


def _bars_name(index: int, estimate: Estimate) -> str:
    """A plan's place in the table and its title: short enough for a bar on a phone."""
    return f"{index + 1}. {title(estimate)}"


def _bound(estimate: Estimate) -> str:
    """The largest parts of a step's time; of a plan that does not fit, what it needs."""
    if not estimate.fits:
        return estimate.reason
    shares = {name: held / estimate.step_time_s for name, held in estimate.time.by_category.items()}
    largest = sorted(shares.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {share:.0%}" for name, share in largest if share >= 0.005)


def _model(estimate: Estimate) -> str:
    return getattr(estimate.shape, "name", "") or f"A model of {estimate.shape.num_parameters / 1e9:.3g}B parameters"


def _facts(best: Estimate) -> list[tuple[str, str, str]]:
    limit = best.cluster.device.memory_bytes
    mfu = best.mfu
    return [
        ("time of a step", seconds(best.step_time_s), f"{best.tokens_per_s_per_gpu:,.0f} tokens/s per GPU"),
        ("TFLOP/s per GPU", f"{best.tflops_per_gpu:.1f}", "MFU n/a" if mfu is None else f"MFU {100 * mfu:.1f}%"),
        ("memory of the device", gib(best.memory.device_bytes), f"of {gib(limit)}"),
        ("parameters", f"{best.shape.num_parameters / 1e9:.4g} B", f"{best.shape.num_parameters:,}"),
    ]


def _table(estimates: Sequence[Estimate]) -> Content:
    rows: list[list[Content]] = []
    for index, each in enumerate(estimates[:ROWS]):
        speed = ["n/a"] * 4
        if each.fits:
            mfu = "n/a" if each.mfu is None else f"{100 * each.mfu:.1f}%"
            per_gpu = f"{each.tokens_per_s_per_gpu:,.0f}", f"{each.tflops_per_gpu:.1f}"
            speed = [seconds(each.step_time_s), *per_gpu, mfu]
        memory, sent = gib(each.memory.device_bytes), size(sum(each.time.sent_bytes.values()))
        rows.append([
            f"{index + 1}. {name_of(each)}", "yes" if each.fits else "no", *speed, memory, sent, _bound(each)
        ])  # fmt: skip
    columns = [
        "plan",
        "fits",
        "step time",
        "tokens/s",
        "TFLOP/s",
        "MFU",
        "memory",
        "sent per step",
        "where the time goes",
    ]
    some = f", the first {ROWS} of {len(estimates)}" if len(estimates) > ROWS else ""
    return table(f"Plans, best first{some}; per GPU", columns, rows, numbers=[2, 3, 4, 5, 6, 7], words=[0, 8])


def _time(estimates: Sequence[Estimate]) -> list[Content]:
    numbered = [(_bars_name(index, each), each) for index, each in enumerate(estimates[:BARS])]
    numbered = [(name, each) for name, each in numbered if each.fits] or numbered[:1]
    shown = [each for _, each in numbered]
    found = list(dict.fromkeys(name for each in shown for name, held in each.time.by_category.items() if held > 0))
    names = ordered(found, TIME)
    fills = fills_of(names, TIME)
    stacks = [Stack(name, each.time.by_category, seconds(each.step_time_s)) for name, each in numbered]
    longest = 2 * statistics.median(each.step_time_s for each in shown)
    bars = stacked_bars(
        stacks, fills, title="Parts of the predicted time of a step, by plan.", longest=longest, shown=spent
    )
    rows = [[name, *(seconds(each.time.by_category.get(n, 0.0)) for n in names)] for name, each in numbered]
    notes = ["Plans that fit."] * (len(shown) < min(BARS, len(estimates)))
    notes += ["A bar with an arrow is longer than the axis; its time is above it."] * (
        max(each.step_time_s for each in shown) > longest
    )
    return [
        figure("Predicted time of a step", [bars, legend(fills.items())], " ".join(notes)),
        folded("Values", table("Seconds by category", ["plan", *names], rows, words=[0])),
    ]


def _memory(estimates: Sequence[Estimate]) -> list[Content]:
    shown = estimates[:BARS]
    parts = [_parts(each) for each in shown]
    names = ordered(list(dict.fromkeys(name for part in parts for name in part)), (*CATEGORIES, *BESIDE))
    fills = fills_of(names, (*CATEGORIES, *BESIDE))
    limit = shown[0].cluster.device.memory_bytes
    stacks = [
        Stack(_bars_name(index, each), part, gib(each.memory.device_bytes))
        for index, (each, part) in enumerate(zip(shown, parts, strict=True))
    ]
    capacity = f"capacity {gib(limit)}"
    bars = stacked_bars(
        stacks,
        fills,
        title="Bytes of the fullest rank, by plan.",
        limit=(limit, capacity),
        longest=2 * limit,
        unit=GIB,
        shown=gib,
    )
    rows = [
        [
            _bars_name(index, each),
            *(gib(part.get(name, 0)) for name in names),
            gib(each.memory.allocated_bytes),
            gib(each.memory.reserved_bytes),
            gib(each.memory.device_bytes),
            gib(each.memory.host_bytes),
        ]
        for index, (each, part) in enumerate(zip(shown, parts, strict=True))
    ]
    columns = ["plan", *names, "allocated", "reserved", "device", "host"]
    return [
        figure("Predicted memory of the fullest rank", [bars, legend(fills.items())]),
        folded("Values", table("Bytes by category", columns, rows, words=[0])),
    ]


#: What lies beside tensors.
BESIDE = ("allocator", "context")


def _parts(estimate: Estimate) -> dict[str, float]:
    memory = estimate.memory
    parts = {name: float(held) for name, held in memory.by_category.items() if held > 0}
    parts["allocator"] = memory.reserved_bytes - memory.allocated_bytes
    parts["context"] = memory.device_bytes - memory.reserved_bytes
    return {name: held for name, held in parts.items() if held > 0}


def _timeline(best: Estimate, missing: list[str]) -> list[Content]:
    moments = best.memory.timeline
    if len(moments) < 2:
        missing.append("Memory over a step: the prediction of this plan has no timeline.")
        return []
    return memory_timeline(moments, "Predicted memory over a step, the first plan", shown=gib, unit=GIB)


def _step(best: Estimate, missing: list[str]) -> list[Content]:
    """The first plan's simulated step: streams, or the pipeline's ranks."""
    step = simulated(best)
    if isinstance(step, SimulatedPipeline):
        missing.append("Streams: inside the stages of a pipeline they are not drawn.")
        return simulated_chart(step, num_microbatches(best))
    missing.append("Pipeline: the first plan has one stage.")
    spans, note = simulated_spans(step)
    waits = {name: held for name, held in step.microbatches[-1][0].exposed.items() if held > 0}
    return streams_figure(spans, "Simulated step of the first plan", waits=waits, note=note)


def _mesh(best: Estimate) -> list[Content]:
    found = mesh.mesh_of({axis: getattr(best.plan, axis) for axis in AXES}, best.plan.ep)
    if found is None:
        return []
    return [mesh.axes_table(found), folded("Coordinates of the ranks", mesh.ranks_table(found))]


def _asked(best: Estimate) -> list[Content]:
    def settings(caption: str, value: Any) -> Element:
        return table(caption, ["setting", "value"], list(flat(dataclasses.asdict(value)).items()), numbers=[])

    source = best.cluster.device.source or "not stated"
    return [
        el("div", settings("Workload", best.workload), settings("Cluster", best.cluster), class_="grid-2"),
        folded("All fields of the first plan", settings("First plan", best.plan), is_printed=True),
        el("p", f"Source of the GPU's figures: {source}.", class_="faint"),
    ]
