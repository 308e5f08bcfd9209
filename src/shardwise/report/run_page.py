"""The report of one run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardwise.report import beside, memory_parts, mesh, time_parts
from shardwise.report.curves import CURVES, curve_figure, loss_figure
from shardwise.report.element import Content, el
from shardwise.report.page import Section, folded, left_out, page, prose, table, tiles
from shardwise.report.pipeline import pipeline_chart
from shardwise.report.run import Run, finite
from shardwise.report.scale import loss, num_bytes, seconds
from shardwise.report.streams import measured_streams, predicted_streams
from shardwise.report.warnings import warnings
from shardwise.spec.errors import PlanError
from shardwise.spec.schedule.builders import pipeline_policy


def run_page(run: Run) -> str:
    """One page of HTML."""
    missing: list[str] = []
    sections = [
        Section("Training", _training(run, missing)),
        Section("Predicted beside measured", _beside(run, missing)),
        Section(
            "Memory",
            [
                *memory_parts.peak(run, missing),
                *memory_parts.predicted_over_a_step(run, missing),
                *memory_parts.over_a_step(run, missing),
            ],
        ),
        Section("Where the time went", time_parts.bars(run, missing)),
        Section("Streams", [*predicted_streams(run, missing), *measured_streams(run, missing)]),
        Section("Pipeline", _pipeline(run, missing)),
        Section("Mesh and ownership", _mesh(run, missing)),
        Section("Configuration", _configuration(run, missing)),
        Section("Environment", _environment(run, missing)),
    ]
    sections = [section for section in sections if any(item is not None for item in section.content)]
    sections += left_out(missing)
    notes = [*warnings(run), *(f"{problem[0].upper()}{problem[1:]}." for problem in run.problems)]
    lead = [
        _state(run),
        el("ul", [el("li", note) for note in notes], class_="notes") if notes else None,
        tiles(_facts(run)),
    ]
    return page(f"Run {run.name}", lead, sections, foot="Written by shardwise from the files of the run's folder.")


def state(run: Run) -> tuple[str, bool | None]:
    """How the run ended, in words, and whether well; ``None``: it has not ended, or it was stopped and can go on."""
    if not run.summary:
        newest = f" The newest recorded step is {run.steps[-1]:,}." if run.records else ""
        return f"No end is recorded: the run is still going, or it was killed.{newest}", None
    code, reason = run.summary.get("exit_code"), run.summary.get("reason", "")
    steps = run.summary.get("steps")
    if code == 0:
        return f"Finished after {steps:,} steps." if isinstance(steps, int) else "Finished.", True
    if code == 75:
        return f"Stopped after step {steps} with exit code 75: {reason}", None
    return f"Ended with exit code {code} after step {steps}: {reason}", False


def _state(run: Run) -> Content:
    words, is_good = state(run)
    class_ = {True: "state good", False: "state bad", None: "state"}[is_good]
    model = run.config.get("model", {})
    name = model.get("preset") or model.get("hf") if isinstance(model, dict) else None
    what = [f"model {name}"] if name else []
    what += [f"strategy {s}"] if (s := run.summary.get("strategy") or strategy(run)) else []
    world = run.summary.get("world_size") or run.plan.get("world_size")
    what += [f"{world} ranks"] if world else []
    batch, data = run.plan.get("batch"), run.config.get("data")
    if isinstance(batch, dict) and isinstance(data, dict) and batch.get("global") and data.get("seq_len"):
        what.append(f"{batch['global']} sequences of {data['seq_len']} tokens a step")
    return [el("p", words, class_=class_), el("p", ", ".join(what), class_="faint") if what else None]


def strategy(run: Run) -> str | None:
    """The strategy's name."""
    parallel = run.plan.get("parallel") or run.config.get("parallel")
    return str(parallel["strategy"]) if isinstance(parallel, dict) and "strategy" in parallel else None


def _facts(run: Run) -> list[tuple[str, str, str]]:
    summary, facts = run.summary, []
    steps = _number(summary, "steps") if summary else (run.steps[-1] if run.records else None)
    train = run.config.get("train")
    planned = train.get("steps") if isinstance(train, dict) else None
    if steps is not None:
        facts.append(("steps", f"{steps:,}", f"of {planned:,}" if isinstance(planned, int) else ""))
    first, final = _number(summary, "first_loss"), _number(summary, "final_loss")
    if final is None:
        final = run.last("loss")
    if final is not None:
        facts.append(("training loss", loss(final), f"from {loss(first)}" if first is not None else ""))
    first, final = _number(summary, "eval_loss_first"), _number(summary, "eval_loss_final")
    if final is not None:
        facts.append(("held-out loss", loss(final), f"from {loss(first)}" if first is not None else ""))
    pace = _number(summary, "tokens_per_s")
    pace = run.mean("tokens_per_s") if pace is None else pace
    if pace is not None:
        facts.append(("tokens per second", f"{pace:,.0f}", "over all ranks"))
    time_s = beside.step_time(run)
    if time_s is not None:
        predicted = beside.first("predicted_step_time_s", summary, run.plan)
        facts.append(
            ("time of a step", seconds(time_s), f"mean; predicted {seconds(predicted)}" if predicted else "mean")
        )
    whole, waited = run.mean("step_time_s"), run.mean("exposed_time_s")
    if whole and waited is not None:
        facts.append(("communication", f"{waited / whole:.1%}", "of a step, exposed"))
    if (mfu := run.median("mfu")) is not None:
        facts.append(("MFU", f"{100 * mfu:.1f}%", "median, per GPU"))
    peak = beside.peak_bytes(run)
    if peak is not None:
        predicted = beside.first("predicted_peak_memory_bytes", summary, run.plan)
        facts.append(("peak memory", num_bytes(peak), f"predicted {num_bytes(predicted)}" if predicted else ""))
    return facts


def _number(values: Mapping[str, Any], key: str) -> float | None:
    return finite(values.get(key))


def _training(run: Run, missing: list[str]) -> list[Content]:
    if not run.records:
        missing.append("Training: no step has been recorded in metrics.jsonl.")
        return []
    found = [loss_figure(run), *(curve_figure([run], curve) for curve in CURVES)]
    made: list[Content] = [el("div", found, class_="grid-3")]
    first = run.steps[0]
    if first > 1:
        made.append(el("p", f"The first recorded step is {first:,}: what came before is not in metrics.jsonl."))
    if not run.has("mfu"):
        missing.append(
            "Share of the devices' peak (MFU): the peak of these devices, or the model's work, is not known."
        )
    return made


def _beside(run: Run, missing: list[str]) -> list[Content]:
    rows = beside.rows(run)
    if not any(row[1] != "n/a" for row in rows):
        missing.append("Predicted beside measured: the run's files hold no prediction.")
        return []
    caption, columns = (
        "What the planner said, and what was measured",
        ["", "predicted", "measured", "measured / predicted"],
    )
    is_timed = beside.first("predicted_step_time_s", run.summary, run.plan) is not None
    why = None if is_timed else el("p", prose(f"No time was predicted: {memory_parts.why_not(run)}."), class_="faint")
    return [table(caption, columns, rows), why]


def _pipeline(run: Run, missing: list[str]) -> list[Content]:
    parallel = run.plan.get("parallel") or run.config.get("parallel") or {}
    pp = parallel.get("pp", 1) if isinstance(parallel, dict) else 1
    if not isinstance(pp, int) or pp < 2:
        missing.append("Pipeline: the plan has one stage.")
        return []
    batch = run.plan.get("batch")
    given = parallel.get("pipeline")
    try:
        policy = pipeline_policy(given)
        count = policy.num_microbatches or (batch or {}).get("accumulation")
        policy = pipeline_policy(
            {"schedule": policy.schedule, "num_microbatches": count, "num_virtual_stages": policy.num_virtual_stages}
        )
        return pipeline_chart(policy, pp)
    except (PlanError, TypeError, AttributeError):
        missing.append("Pipeline: its schedule cannot be read from plan.json.")
        return []


def _mesh(run: Run, missing: list[str]) -> list[Content]:
    sizes = run.plan.get("mesh")
    parallel = run.plan.get("parallel")
    ep = parallel.get("ep", 1) if isinstance(parallel, dict) else 1
    found = mesh.mesh_of(sizes, ep) if isinstance(sizes, dict) else None
    if found is None:
        missing.append("Mesh: plan.json holds none.")
        return []
    units = run.plan.get("units")
    made: list[Content] = [mesh.axes_table(found)]
    if isinstance(units, list) and units and all(isinstance(unit, dict) for unit in units):
        made += mesh.ownership(units)
    else:
        missing.append("Who owns what: plan.json does not say.")
    if found.world_size > 1:
        made.append(folded("Coordinates of the ranks", mesh.ranks_table(found)))
    if run.model:
        made.append(folded("The model's units as text (model.txt)", el("pre", run.model.rstrip(), tabindex=0)))
    return made


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """A nested mapping as ``section.field`` and text."""
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{before}{key}.")
        else:
            found[f"{before}{key}"] = _text(value)
    return found


def _text(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value) or "none"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _configuration(run: Run, missing: list[str]) -> list[Content]:
    if not run.config:
        missing.append("Configuration: the folder has no config.yaml.")
        return []
    rows = list(flat(run.config).items())
    return [
        folded(
            f"All {len(rows)} settings", table("config.yaml", ["setting", "value"], rows, numbers=[]), is_printed=True
        )
    ]


def _environment(run: Run, missing: list[str]) -> list[Content]:
    if not run.environment:
        missing.append("Environment: the folder has no environment.json.")
        return []
    rows = [(key, _text(value)) for key, value in run.environment.items()]
    return [table("Where the run was made", ["what", "value"], rows, numbers=[])]
