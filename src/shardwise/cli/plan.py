"""``plan``: which plans fit, how fast they are, and why. Starts nothing; torch is asked for a GPU's name only."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.output import show
from shardwise.spec.errors import ConfigError
from shardwise.spec.text import aligned, did_you_mean

if TYPE_CHECKING:
    from shardwise.planner import Estimate
    from shardwise.spec.shape import ModelShape

_HELP = """Plans for a model on a cluster: what fits, how fast, and why. Needs neither GPUs nor torch.

MODEL is a well-known name (llama-3-8b, gpt-175b, ...), a Hugging Face folder or config.json, or a run configuration,
whose parallel and train sections then fix what they say.

Examples:

  shardwise plan llama-3-8b --gpus 8 --gpu H100-80GB-SXM --seq 8192 --global-batch 64

  shardwise plan gpt-175b --gpus 128 --gpu A100-40GB-SXM --seq 2048 --global-batch 1024 --fix strategy=zero3

  shardwise plan run.yaml --gpus 16 --gpu A100-80GB-SXM --json
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("plan", help=_HELP)(plan)


def plan(  # noqa: PLR0917  typer's form
    model: Annotated[str, typer.Argument(help="Well-known name, Hugging Face folder, config.json, or configuration.")],
    gpu: Annotated[str | None, typer.Option(help="Name of the GPU, or a file of `shardwise calibrate`.")] = None,
    gpus: Annotated[int, typer.Option(help="GPUs in all.")] = 8,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of one node.")] = 8,
    network: Annotated[float | None, typer.Option(help="Gbit/s of a node's network, one direction.")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    global_batch: Annotated[int | None, typer.Option(help="Sequences of a step, over all GPUs.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Sequences of a forward; by default searched.")] = None,
    precision: Annotated[str, typer.Option(help="What products compute in: bf16, fp16, fp32.")] = "bf16",
    optimizer: Annotated[str, typer.Option(help="adamw, adam or sgd.")] = "adamw",
    strategy: Annotated[str | None, typer.Option(help="Only this strategy.")] = None,
    tp: Annotated[int | None, typer.Option(help="Only this many tensor-parallel ranks.")] = None,
    pp: Annotated[int | None, typer.Option(help="Only this many pipeline ranks.")] = None,
    activation_checkpointing: Annotated[str | None, typer.Option(help="Only none, selective or full.")] = None,
    fix: Annotated[list[str] | None, typer.Option(help="field=value of the plan, repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,  # noqa: FBT002  typer's form
) -> None:
    """Plan."""
    from shardwise.planner import Cluster, Workload
    from shardwise.planner.search import search

    shape = find_shape(model)
    fixed = read_fixed(fix or [])
    options = {
        "strategy": strategy,
        "tp": tp,
        "pp": pp,
        "recompute": activation_checkpointing,
        "micro_batch": micro_batch,
    }
    fixed |= {name: value for name, value in options.items() if value is not None}
    cluster = Cluster(
        gpu=gpu or this_gpu(), num_gpus=gpus, gpus_per_node=gpus_per_node, inter_gbits_per_s_per_node=network
    )
    workload = Workload(
        seq_len=seq or min(shape.seq_len, 2048),
        global_batch=global_batch or gpus,
        precision=precision,
        optimizer=optimizer,
    )
    plans = search(shape, cluster, workload, **fixed)
    show(json.dumps([as_dict(made) for made in plans], indent=1) if as_json else screen(plans))


def find_shape(model: str) -> ModelShape:
    """The shape of what the argument names."""
    from shardwise.spec.shape.names import known_shape

    return known_shape(model)


def read_fixed(given: list[str]) -> dict[str, Any]:
    """``field=value`` each, the value written as in YAML."""
    import yaml

    from shardwise.planner.candidate import WORKLOAD_FIELDS
    from shardwise.spec.plan import plan_fields

    fixed: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name not in {*plan_fields(), *WORKLOAD_FIELDS}:
            hint = did_you_mean(name, [*plan_fields(), *WORKLOAD_FIELDS])
            raise ConfigError(
                f"--fix {text}: expected field=value, the field of a plan.\n {hint or ' For example tp=2.'}"
            )
        fixed[name] = yaml.safe_load(value)
    return fixed


def this_gpu() -> str:
    """The name of this machine's GPU in the hardware table."""
    from shardwise.cost.hardware import gpus

    raise ConfigError(f"no --gpu was given.\n  Name one of {', '.join(gpus())}.")


def screen(plans: list[Estimate]) -> str:
    """One page: the table, the best plan's memory, why, and what to do next."""
    from shardwise.planner.explain import gib, seconds, table_rows, title, why

    best = plans[0]
    rows = [["", "plan", "micro", "recompute", "memory", "step", "TFLOP/s", "MFU"]]
    for place, made in enumerate(table_rows(plans), 1):
        speed = [
            seconds(made.step_time_s),
            f"{made.tflops_per_gpu:.0f}",
            "n/a" if made.mfu is None else f"{made.mfu:.0%}",
        ]
        rows.append(
            [
                str(place),
                title(made),
                f"{made.workload.micro_batch}",
                str(made.workload.recompute),
                gib(made.memory.device_bytes),
                *(speed if made.fits else ["does not fit", "", ""]),
            ]
        )
    return "\n".join([*aligned(rows, words={1, 3}), "", *why(best)])


def as_dict(made: Estimate) -> dict[str, Any]:
    """An estimate as JSON."""
    return {"strategy": str(made.plan.strategy), "fits": made.fits, "step_time_s": made.step_time_s}
