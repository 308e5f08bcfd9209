"""The output of ``plan`` and ``print(plans)``: a page of 80 columns, or JSON with the same content."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

from shardwise.cost.hardware import GIB, Cluster
from shardwise.cost.workload import Workload
from shardwise.planner.explain import gib, left_out, misfits, recommendation, seconds, table_rows, title, why
from shardwise.planner.memory import num_microbatches
from shardwise.planner.planned import Largest, Planned, Remedy, fastest_of
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.policies import FULL_PRECISION
from shardwise.spec.shape import ModelShape
from shardwise.spec.shown import Page, changed_fields
from shardwise.spec.text import aligned

WIDTH, HEIGHT = 80, 40
_LEAST_ROWS = 3
_BAR = 34
#: Columns of the table that contain text.
WORDS = (1, 3)


def heading(shape: ModelShape, cluster: Cluster, workload: Workload) -> list[str]:
    """The heading: model, cluster, and workload."""
    nodes = -(-cluster.num_gpus // cluster.gpus_per_node)
    where = f"{cluster.num_gpus} x {cluster.device} in " + (f"{nodes} nodes" if nodes > 1 else "one node")
    if nodes > 1 and cluster.device.measured is None:
        where += f", {cluster.node_bandwidth / 1e9:.0f} GB/s a node"
    active = (
        f" ({shape.num_active_parameters / 1e9:.1f}B active)"
        if shape.num_active_parameters != shape.num_parameters
        else ""
    )
    kind = "sample" if workload.seq_len == 1 else "sequence"
    batch = f"{workload.global_batch:,} {kind}{'s' * (workload.global_batch > 1)}"
    batch += f" of {workload.seq_len:,} tokens" if workload.seq_len > 1 else ""
    device, precision = cluster.device, workload.precision
    hint = ""
    if "fp16" in device.peaks and precision not in device.peaks:
        hint = f"{device.name} has no units for {precision}, which takes as long as fp32: try --precision fp16"
    elif precision == "fp32" and "bf16" in device.peaks:
        more = device.peaks["bf16"] / device.peaks["fp32"]
        hint = f"in fp32 matrix products take {more:.0f} times as long as in bf16: try --precision bf16"
    return [
        f"{shape.name}, {count(shape.num_parameters)} parameters{active}",
        f"on {where}",
        f"a step: {batch}, {precision}, {_trained(workload)}",
        *filter(None, [hint]),
    ]


def _trained(workload: Workload) -> str:
    adapters = "" if workload.lora_rank is None else f", LoRA of rank {workload.lora_rank}"
    return workload.optimizer + adapters


def count(number: float) -> str:
    """A number of parameters: ``8.03B``."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= 0.9995 * size:  # else it would be rounded to 1000 of the smaller unit
            return f"{number / size:.3g}{unit}"
    return f"{number:,.0f}"


def table(plans: Sequence[Planned]) -> list[str]:
    """The table as text: a line for each plan, more if its name is long."""
    rows = cells(plans)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    room = WIDTH - sum(widths) + widths[1] - 2 * (len(widths) - 1)
    lines: list[list[str]] = []
    for row in rows:
        name, *more = textwrap.wrap(row[1], room, break_on_hyphens=False)
        lines += [[row[0], name, *row[2:]], *(["", f"  {text}", *("" for _ in row[2:])] for text in more)]
    return aligned(lines, words=WORDS)


def cells(plans: Sequence[Planned]) -> list[list[str]]:
    """The table's header, and a row for each plan."""
    rows = [["", "plan", "batch", "recompute", "GiB", "step", "TFLOP/s", "MFU"]]
    for place, made in enumerate(plans, 1):
        mfu = "n/a" if made.mfu is None else f"{made.mfu:.0%}"
        speed = [seconds(made.step_time_s), f"{made.tflops_per_gpu:.0f}", mfu]
        batch = f"{made.workload.micro_batch}x{num_microbatches(made.plan, made.workload)}"
        needed = f"{made.memory.device_bytes / GIB:.1f}"
        rows.append(
            [
                str(place) if made.fits else "-",
                title(made) + (" (tight)" if made.is_tight else ""),
                batch,
                str(made.workload.recompute),
                needed,
                *(speed if made.fits else ["no fit", "", ""]),
            ]
        )
    return rows


def memory_bars(made: Planned) -> list[str]:
    """A bar for each category of the device's memory."""
    capacity = made.cluster.device.memory_bytes
    parts = {name: size for name, size in made.memory.by_category.items() if size > 0}
    parts["beside tensors"] = made.memory.device_bytes - made.memory.allocated_bytes
    parts["free"] = capacity - made.memory.device_bytes
    whole = max(capacity, made.memory.device_bytes)
    lines = []
    for name, size in parts.items():
        bar = ("." if name == "free" else "\N{FULL BLOCK}") * round(_BAR * max(size, 0) / whole)
        shown = "<0.1" if 0 < size < GIB / 20 else f"{size / GIB:.1f}"
        lines.append(f"  {name:<15}{shown:>7}  {bar}".rstrip())
    if made.memory.host_bytes:
        lines.append(f"  {'host':<15}{made.memory.host_bytes / GIB:>7.1f}  of each rank, in the host's memory")
    return lines


def screen(
    shape: ModelShape,
    cluster: Cluster,
    workload: Workload,
    plans: Sequence[Planned],
    *,
    found: Sequence[Remedy] | None = None,
    command: str = "",
    measured: Sequence[str] = (),
) -> str:
    """The page. ``found``: changes that make a plan fit, ``None`` if not searched; ``measured``: notes about runs."""
    rows = table_rows(plans)
    shown = [made for made in rows if made.fits] or rows
    below = [*reasons(plans, found), *(["", *command.splitlines()] if command else [])]
    above = [*heading(shape, cluster, workload), *([""] if measured else []), *_wrapped(measured)]
    while len(lines := [*above, "", *table(shown), "", *below]) > HEIGHT and len(shown) > _LEAST_ROWS:
        shown = shown[:-1]
    return "\n".join(lines)


def reasons(plans: Sequence[Planned], found: Sequence[Remedy] | None = None) -> list[str]:
    """Memory of the first plan, why it is recommended, and what limits it; or why nothing fits."""
    best, lines = plans[0], []
    if best.fits:
        capacity = gib(best.cluster.device.memory_bytes)
        lines += [f"memory of plan 1 on the fullest GPU, in GiB of {capacity}", *memory_bars(best), ""]
        chosen = [recommendation(plans)] if len(plans) > 1 else []
        return [*lines, *_wrapped([*chosen, *why(best), *filter(None, [misfits(table_rows(plans))])])]
    lines += [
        *_wrapped([f"Nothing fits. Nearest is {title(best)}: {best.reason}.", *left_out(best)]),
        *memory_bars(best),
    ]
    if found is None:
        return lines
    lines += ["", "It fits with" if found else "Neither more GPUs nor shorter sequences were found to help."]
    return lines + _wrapped([f"- {remedy.change}: {_shown(remedy.plan)}" for remedy in found])


def page_of(plans: Sequence[Planned]) -> Page:
    """The page for a notebook."""
    first, rows = plans[0], table_rows(plans)
    shown = [made for made in rows if made.fits] or rows
    return Page(heading(first.shape, first.cluster, first.workload), cells(shown), reasons(plans), WORDS)


def brief(made: Planned) -> str:
    """A plan in one line."""
    speed = f"{seconds(made.step_time_s)} a step, {made.tflops_per_gpu:.0f} TFLOP/s per GPU" if made.fits else "no fit"
    capacity = made.cluster.device.memory_bytes
    return f"{title(made)}: {gib(made.memory.device_bytes)} of {gib(capacity)}, {speed}"


def _shown(made: Planned) -> str:
    recompute = made.workload.recompute
    saved = "" if recompute == "none" else f", recompute {recompute}"
    return f"{title(made)}{saved}, {gib(made.memory.device_bytes)} a GPU"


def _wrapped(sentences: Sequence[str]) -> list[str]:
    return [
        line
        for text in sentences
        for line in textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    ]


def largest_page(shape: ModelShape, cluster: Cluster, workload: Workload, found: Sequence[Largest]) -> list[str]:
    """The largest models by strategy and saving."""
    savings = list(dict.fromkeys(each.saving for each in found))
    rows = [["strategy", *savings]]
    for strategy in dict.fromkeys(each.strategy for each in found):
        by_saving = {each.saving: each.plan for each in found if each.strategy == strategy}
        rows.append([strategy, *(_model(by_saving[saving]) for saving in savings)])
    return [
        f"largest models of {shape.name}'s proportions on {cluster.num_gpus} x {cluster.device}",
        "parameters (layers x hidden); data parallelism alone, unless --fix says more",
        f"sequences of {workload.seq_len:,} tokens, one a forward, {workload.precision}, {_trained(workload)}",
        "",
        *aligned(rows),
    ]


def _model(made: Planned | None) -> str:
    if made is None:
        return "none"
    return f"{count(made.shape.num_parameters)} ({made.shape.num_layers} x {made.shape.hidden})"


# -- JSON


def as_json(
    shape: ModelShape, cluster: Cluster, workload: Workload, plans: Sequence[Planned], found: Sequence[Remedy]
) -> dict[str, Any]:
    """The page's content as JSON; docs/planning.md lists the keys."""
    return {
        "model": {
            "name": shape.name,
            "family": shape.family,
            "parameters": shape.num_parameters,
            "active_parameters": shape.num_active_parameters,
            "layers": shape.num_layers,
            "hidden": shape.hidden,
        },
        "cluster": {
            "gpu": str(cluster.device),
            "gpus": cluster.num_gpus,
            "gpus_per_node": cluster.gpus_per_node,
            "memory_bytes": cluster.device.memory_bytes,
            "node_bytes_per_s": cluster.node_bandwidth,
        },
        "workload": {
            "seq_len": workload.seq_len,
            "global_batch": workload.global_batch,
            "precision": workload.precision,
            "optimizer": workload.optimizer,
            "lora_rank": workload.lora_rank,
        },
        "plans": [plan_as_json(made) for made in plans],
        "recommended": 0 if plans[0].fits else None,
        "fastest": plans.index(fastest_of(plans)) if plans[0].fits else None,
        "why": [recommendation(plans), *why(plans[0])] if plans[0].fits else [plans[0].reason],
        "remedies": [{"change": remedy.change, "plan": plan_as_json(remedy.plan)} for remedy in found],
    }


def plan_as_json(made: Planned) -> dict[str, Any]:
    """A plan as JSON."""
    return {
        "title": title(made),
        "plan": plan_fields_of(made.plan),
        "micro_batch": made.workload.micro_batch,
        "accumulation_steps": num_microbatches(made.plan, made.workload),
        "recompute": made.workload.recompute,
        "in_backward": made.workload.in_backward,
        "chunked_loss": made.workload.chunked_loss,
        "fits": made.fits,
        "is_tight": made.is_tight,
        "reason": made.reason,
        "step_time_s": made.step_time_s,
        "tokens_per_s_per_gpu": made.tokens_per_s_per_gpu,
        "tflops_per_gpu": made.tflops_per_gpu,
        "mfu": made.mfu,
        "memory": {
            "allocated_bytes": made.memory.allocated_bytes,
            "reserved_bytes": made.memory.reserved_bytes,
            "device_bytes": made.memory.device_bytes,
            "host_bytes": made.memory.host_bytes,
            "first_step_bytes": made.memory.first_step_bytes,
            "by_category": dict(made.memory.by_category),
        },
        "time_by_category_s": dict(made.time.by_category),
        "sent_bytes_by_axis": dict(made.time.sent_bytes),
    }


def plan_fields_of(plan: ParallelPlan) -> dict[str, Any]:
    """The fields of a plan that differ from the defaults, as in a configuration's ``parallel`` section."""
    fields = changed_fields(plan)
    for name, value in fields.items():
        if name == "mp_policy":
            fields[name] = plan.precision.as_dict() if plan.precision != FULL_PRECISION else None
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            items = changed_fields(value).items()
            fields[name] = {key: list(each) if isinstance(each, tuple) else each for key, each in items}
    return fields
