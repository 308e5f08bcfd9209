"""``dry-run``: run the engine as one rank of a simulated world."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.output import CONFIG_ENDINGS, check_writable, show, write
from shardwise.spec.errors import ConfigError, StateError
from shardwise.spec.text import aligned, first_line, printable, size

if TYPE_CHECKING:
    from torch import nn

    from shardwise.api.dry_run import DryRun, OptimizerFactory
    from shardwise.spec.plan import ParallelPlan
    from shardwise.train.model.build import Objective, TokenBatch

#: The strategies run without ``--strategies`` and without a configuration.
STRATEGIES = ("ddp", "zero1", "zero2", "shard_grad_op", "zero3", "hsdp", "hybrid_shard_grad_op")


def dry_run(
    model: Annotated[str, typer.Argument(help="Built-in name, YAML or JSON file, or Hugging Face folder.")],
    world_size: Annotated[int, typer.Option(help="Number of ranks of the simulated world.")],
    rank: Annotated[int, typer.Option(help="The rank to run.")] = 0,
    strategies: Annotated[str | None, typer.Option(help="Presets, separated by commas.")] = None,
    seq: Annotated[
        int | None, typer.Option(help="Tokens per sample; by default the model's, 2,048 for folders.")
    ] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Samples per rank and forward.")] = None,
    precision: Annotated[str | None, typer.Option(help="Parameters' dtype in computation: fp32, bf16, fp16.")] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="adamw, adam, sgd (without momentum) or muon, instead of the configuration's.")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of one node: the default size of hsdp's groups.")] = 8,
    backend: Annotated[str, typer.Option(help="nccl, gloo, or auto: what this machine would use.")] = "nccl",
    spec: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Your own model, data, loss (sw.TrainSpec); MODEL is a configuration."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write everything to this file, with each event.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="section.field=value of a configuration, repeatable.")
    ] = None,
    check_order: Annotated[
        bool, typer.Option("--check-order", help="Also show that the collectives of all ranks can never deadlock.")
    ] = False,
) -> None:
    """Run the real engine as one rank of many, without GPUs, peers or values, and print what it sends and holds.

    MODEL is a built-in name (gpt-175b, gpt-1t, ...), a run configuration, or a Hugging Face folder (causal language
    model).

    Examples:

      shardwise dry-run gpt-1t --world-size 1024

      shardwise dry-run gpt-175b --world-size 128 --strategies zero3 --seq 2048 --micro-batch 1 --precision bf16

      shardwise dry-run gpt-175b --world-size 128 --strategies zero3,hsdp --gpus-per-node 8

      shardwise dry-run run.yaml --world-size 8 --set parallel.strategy=zero2

      shardwise dry-run gpt-1t --world-size 1024 --strategies zero1 --check-order
    """
    from shardwise.api.dry_run import dry_run as run_dry

    for option, value in (
        ("--world-size", world_size),
        ("--seq", seq),
        ("--micro-batch", micro_batch),
        ("--gpus-per-node", gpus_per_node),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{option} {value}: expected at least 1.\n  Set {option} 1 or more.")
    check_writable(json_file)
    local_size = min(gpus_per_node, world_size)
    if spec is not None:
        overrides = [*(overrides or []), f"spec={spec}"]
    subject = _subject(model, world_size, local_size, overrides or [], seq, micro_batch)
    plans, left_out = _plans(
        subject.plan, strategies, precision or subject.compute_dtype, world_size=world_size, local_size=local_size
    )
    results, orders = [], []
    for plan in plans:
        options = {
            "world_size": world_size,
            "batch": subject.batch,
            "loss_fn": subject.objective.scalar,
            "forward": subject.objective.forward,
            "optimizer": optimizer or subject.optimizer,
            "ranks_per_machine": local_size,
            "num_microbatches": subject.num_microbatches,
            "has_average": subject.has_average,
            "in_backward": subject.in_backward,
        }
        results.append(run_dry(subject.build, plan, rank=rank, backend=backend, **options))
        if check_order:
            orders.append(_order(subject.build, plan, options, results[-1].strategy))
    show("\n".join([table(results), *left_out, *orders]))
    if json_file is not None:
        content = [{**dataclasses.asdict(result), "traffic": result.traffic} for result in results]
        write(json_file, json.dumps(content, indent=1) + "\n")


def _order(build: Callable[[], nn.Module], plan: ParallelPlan, options: dict[str, Any], strategy: str) -> str:
    """Return a line that says that the collectives of all ranks cannot deadlock. Raise StateError if they can."""
    from shardwise.testing.streams import DeadlockError, refuse_deadlocks, world_traces

    traces = world_traces(build, plan, **options)
    try:
        count = refuse_deadlocks(traces, ["one queue"])
    except DeadlockError as error:
        raise StateError(f"{strategy}: {error}\n  Report this plan: shardwise promises one order.") from None
    return f"{strategy}: no deadlock: {count:,} collectives and messages of {len(traces):,} ranks follow one order"


@dataclasses.dataclass(frozen=True)
class _Subject:
    """The subject of the dry run: the model and its training settings.

    ``compute_dtype`` is the dtype of the folder's weights (with masters in fp32), or ``None`` for fp32.
    """

    build: Callable[[], nn.Module]
    batch: Any
    objective: Objective
    num_microbatches: int = 1
    optimizer: str | OptimizerFactory = "adamw"
    has_average: bool = False
    plan: ParallelPlan | None = None
    compute_dtype: str | None = None
    in_backward: bool = False


def _subject(
    model: str, world_size: int, local_size: int, overrides: list[str], seq: int | None, micro_batch: int | None
) -> _Subject:
    path = Path(model).expanduser()
    if model.lower().endswith(CONFIG_ENDINGS):
        return _from_file(path, world_size, local_size, overrides, seq, micro_batch)
    if overrides:
        raise ConfigError(
            "--set needs a configuration file.\n  Name one, or use --strategies, --seq and --micro-batch."
        )
    if path.is_dir() or path.name == "config.json":
        return _from_folder(path if path.is_dir() else path.parent, seq, micro_batch or 1)
    return _from_preset(model, seq, micro_batch or 1)


def _from_preset(name: str, seq: int | None, micro_batch: int) -> _Subject:
    from shardwise.models import PRESETS, gpt
    from shardwise.train.model.build import objective

    if name not in PRESETS:
        raise ConfigError(
            f"{printable(name)!r} is not a built-in model, and no configuration or folder that is there.\n"
            f"  Built in: {', '.join(PRESETS)}."
        )
    tokens = _tokens(micro_batch, seq or PRESETS[name].seq_len)
    return _Subject(lambda: gpt(name), tokens, objective(is_from_hf=False, cp=1))


def _tokens(micro_batch: int, seq_len: int) -> TokenBatch:
    import torch

    from shardwise.train.model.build import TokenBatch

    tokens_BT = torch.empty(micro_batch, seq_len, dtype=torch.int64, device="meta")
    return TokenBatch(tokens_BT, tokens_BT)


def _from_folder(folder: Path, seq: int | None, micro_batch: int) -> _Subject:
    from shardwise.train.config.resolve import DEFAULT_SEQ_LEN, stored_dtype
    from shardwise.train.model.build import objective
    from shardwise.train.model.pretrained import model_from_folder

    stored = stored_dtype(folder)
    return _Subject(
        lambda: model_from_folder(folder, reads_weights=False),
        _tokens(micro_batch, seq or DEFAULT_SEQ_LEN),
        objective(is_from_hf=True, cp=1),
        compute_dtype=stored if stored in {"bf16", "fp16"} else None,
    )


def _from_file(
    path: Path, world_size: int, local_size: int, overrides: list[str], seq: int | None, micro_batch: int | None
) -> _Subject:
    import torch

    from shardwise.train.config.resolve import resolve
    from shardwise.train.config.sections import read_config
    from shardwise.train.model.build import blank_batch, for_dry_run, objective_of

    resolved = resolve(read_config(path, overrides), world_size, local_size, checks_data=False)
    config, batch = resolved.config, resolved.batch
    if resolved.spec.data is not None and (seq is not None or micro_batch is not None):
        raise ConfigError(
            "--seq and --micro-batch: the spec's own samples say how long they are.\n"
            "  Leave them out, and set train.micro_batch_size."
        )
    resolved = dataclasses.replace(
        resolved,
        seq_len=seq or resolved.seq_len,
        batch=dataclasses.replace(batch, micro=micro_batch or batch.micro),
    )
    build, make_optimizer = for_dry_run(resolved)
    return _Subject(
        build,
        blank_batch(resolved, torch.device("meta"), reads_iterables=True),
        objective_of(resolved),
        num_microbatches=batch.accumulation,
        optimizer=make_optimizer,
        has_average=config.train.ema_decay is not None,
        plan=resolved.plan,
        in_backward=config.optimizer.in_backward,
    )


def _plans(
    file_plan: ParallelPlan | None, strategies: str | None, precision: str | None, *, world_size: int, local_size: int
) -> tuple[list[ParallelPlan], list[str]]:
    """Return the plans to run, and a note for each default strategy that does not fit the world."""
    from shardwise.spec.errors import MeshError
    from shardwise.spec.plan import ParallelPlan
    from shardwise.spec.policies import PrecisionPolicy

    names = [name.strip() for name in (strategies or "").split(",") if name.strip()]
    base = file_plan or ParallelPlan()
    if precision is not None:
        base = dataclasses.replace(base, mp_policy=PrecisionPolicy(param_dtype=precision, master_dtype="fp32"))
    if file_plan is not None and not names:
        return [base], []
    if names:
        return [dataclasses.replace(base, strategy=name) for name in names], []
    plans, left_out = [], []
    for name in STRATEGIES:
        plan = dataclasses.replace(base, strategy=name)
        try:
            plan.mesh(world_size, local_size)
        except MeshError as error:
            left_out.append(f"{name} is left out: {first_line(error)}")
        else:
            plans.append(plan)
    return plans, left_out


def table(results: list[DryRun]) -> str:
    """Return a table with one row per strategy: bytes of memory by category, and bytes sent."""
    first = results[0]
    header = ["strategy", "peak", *first.bytes_by_category, "sent per step"]
    rows = [
        [
            result.strategy,
            size(result.peak_bytes),
            *(size(num_bytes) for num_bytes in result.bytes_by_category.values()),
            size(result.sent_bytes),
        ]
        for result in results
    ]
    lines = [
        f"{first.num_parameters:,} parameters, rank {first.rank} of {first.world_size}, one step of the steady state",
        *aligned([header, *rows]),
    ]
    lines += [
        f"{result.strategy}: "
        + ", ".join(f"{count} x {kind} ({size(sent)})" for kind, (count, sent) in result.traffic.items())
        for result in results
    ]
    lines += [
        f"{result.strategy}: pipeline bubble {result.bubble_share:.1%} of the step, with stages that take equally long"
        for result in results
        if result.bubble_share is not None
    ]
    return "\n".join(lines)
