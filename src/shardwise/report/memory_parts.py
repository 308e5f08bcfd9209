"""Memory of a run: the peak by category, predicted beside measured, and bytes over a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwise.report import beside
from shardwise.report.chart import Area, Stack, fills_of, stacked_areas, stacked_bars, stacked_columns
from shardwise.report.element import Content
from shardwise.report.page import figure, folded, legend, table
from shardwise.report.run import Run, finite
from shardwise.report.scale import num_bytes

#: Categories of memory in the order in which they are stacked.
CATEGORIES = (
    "parameters", "gradients", "optimizer", "gathered", "reduce", "activations", "logits", "host", "average",
)  # fmt: skip
#: Megabytes: ticks are round in them.
MB = 1e6


def peak(run: Run, missing: list[str]) -> list[Content]:
    """The peak of the fullest rank by category, and what was measured."""
    predicted = run.predicted_bytes
    peak = beside.peak_bytes(run)
    if not predicted:
        missing.append("Memory by category: plan.json holds no prediction.")
        return []
    names = ordered(list(predicted), CATEGORIES)
    fills = fills_of(names, CATEGORIES)
    stacks = [Stack("predicted", predicted, num_bytes(sum(predicted.values())))]
    if peak:
        fills["measured"] = "k8"
        stacks.append(Stack("measured", {"measured": peak}, num_bytes(peak)))
    bars = stacked_bars(stacks, fills, title="Bytes of the fullest rank at the peak of a step.", shown=num_bytes)
    rows = [(name, num_bytes(predicted[name]), f"{predicted[name]:,}") for name in names]
    rows.append(("sum", num_bytes(sum(predicted.values())), f"{sum(predicted.values()):,}"))
    if peak:
        rows.append(("measured peak", num_bytes(peak), f"{int(peak):,}"))
    entries = [(f"{name}, {num_bytes(predicted[name])}", fills[name]) for name in names]
    return [
        figure(
            "Peak of a step, the fullest rank",
            [bars, legend(entries)],
            "Bytes of tensors. The measured peak is the most that any rank has held.",
        ),
        folded("Values", table("Bytes of tensors by category", ["category", "size", "bytes"], rows)),
    ]


def ordered(names: Sequence[str], order: Sequence[str]) -> list[str]:
    """The names in that order, behind them those that it lacks."""
    return [name for name in order if name in names] + [name for name in names if name not in order]


def memory_timeline(
    moments: Sequence[tuple[str, Mapping[str, float]]], heading: str, *, shown: Callable[[float], str], unit: float
) -> list[Content]:
    """Bytes by category at the moments of a step.

    Args:
        moments: Name and bytes of each.
        heading: What is shown.
        shown: Text of a number of bytes.
        unit: Ticks are at round multiples of it.
    """
    found: list[tuple[str, dict[str, float]]] = [(name, dict(parts)) for name, parts in moments]
    names = ordered(list(dict.fromkeys(n for _, parts in found for n, held in parts.items() if held > 0)), CATEGORIES)
    fills = fills_of(names, CATEGORIES)
    most = max(range(len(found)), key=lambda index: sum(found[index][1].values()))
    peak, when = shown(sum(found[most][1].values())), f"moment {most + 1}, {found[most][0]}"
    words = f"Bytes of tensors at {len(found)} moments of a step. The peak is {peak}, at {when}."
    chart = stacked_columns(found, fills, title=f"{heading}. {words}", unit=unit, shown=shown)
    rows = [
        [f"{index + 1}. {name}", *(shown(parts.get(n, 0)) for n in names), shown(sum(parts.values()))]
        for index, (name, parts) in enumerate(found)
    ]
    return [
        figure(heading, [chart, legend(list(fills.items())[::-1])], words),
        folded("Values", table("Bytes by category and moment", ["moment", *names, "sum"], rows)),
    ]


def predicted_over_a_step(run: Run, missing: list[str]) -> list[Content]:
    """The planner's bytes over the moments of a step."""
    found = run.predicted.get("memory_timeline")
    moments = [
        (str(moment[0]), {str(name): float(held) for name, held in moment[1].items() if finite(held) is not None})
        for moment in (found if isinstance(found, list) else [])
        if isinstance(moment, list) and len(moment) == 2 and isinstance(moment[1], dict)
    ]
    if len(moments) < 2:
        missing.append(f"Predicted memory over a step: {why_not(run, 'memory_reason')}.")
        return []
    return memory_timeline(moments, "Predicted memory over a step", shown=num_bytes, unit=MB)


def why_not(run: Run, key: str = "reason") -> str:
    """Why there is no prediction: of a step's time, where ``key`` does not say otherwise."""
    return str(run.predicted.get(key) or "predicted.json does not hold it").rstrip(".")


def over_a_step(run: Run, missing: list[str]) -> list[Content]:
    """Measured bytes of rank 0 over one step: what the engine holds all the time, and what comes and goes."""
    held, moments, counts = (run.memory.get(key) for key in ("held_bytes", "seconds", "bytes"))
    if not _is_history(held, moments, counts):
        missing.append(
            "Memory over a step: it is measured on CPUs in the second and third step, and memory.json does not hold it."
        )
        return []
    assert isinstance(held, dict)
    assert isinstance(counts, list)
    assert isinstance(moments, list)
    names = [name for name in CATEGORIES if held.get(name)]
    base = sum(held[name] for name in names)
    rest = [max(0.0, float(count - base)) for count in counts]
    fills = fills_of([*names, "activations"], CATEGORIES)
    areas = [Area(name, [float(held[name])] * len(moments), fills[name]) for name in names]
    areas.append(Area("activations and other tensors of the step", rest, fills["activations"]))
    step = run.memory.get("step")
    ends = f"between {num_bytes(min(counts))} and {num_bytes(max(counts))}"
    title = f"Measured bytes of tensors of rank 0 over step {step}: {ends}."
    chart = stacked_areas(
        [1000 * float(moment) for moment in moments], areas, title=title, x_name="ms", unit=MB, shown=num_bytes
    )
    entries = [(area.name, area.fill) for area in areas][::-1]
    chosen = sorted({round(index * (len(moments) - 1) / 11) for index in range(12)} | {counts.index(max(counts))})
    rows = [
        (f"{1000 * moments[index]:.1f}", *(num_bytes(area.values[index]) for area in areas), num_bytes(counts[index]))
        for index in chosen
    ]
    caption = f"{title} Counting tensors slows this step."
    return [
        figure("Measured memory over a step", [chart, legend(entries, is_plain=True)], caption),
        folded("Values", table("Bytes over a step", ["ms", *(area.name for area in areas), "sum"], rows)),
        *_by_unit(run),
    ]


def _by_unit(run: Run) -> list[Content]:
    """What the step had made at its peak, by the unit whose forward made it."""
    found = run.memory.get("peak_by_unit")
    if not isinstance(found, Mapping) or not all(finite(held) is not None for held in found.values()):
        return []
    rows = [[str(name), num_bytes(held)] for name, held in found.items() if held]
    return [folded("By unit", table("Bytes at the peak that the step had made, by unit", ["made by", "size"], rows))]


def _is_history(held: Any, moments: Any, counts: Any) -> bool:
    return (
        isinstance(held, Mapping)
        and isinstance(moments, list)
        and isinstance(counts, list)
        and len(moments) == len(counts) >= 2
        and all(finite(value) is not None for value in (*held.values(), *moments, *counts))
    )
