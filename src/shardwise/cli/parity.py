"""``parity``: compare every strategy with one process, on the user's model and data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.launch.exit_codes import show_error
from shardwise.spec.errors import ConfigError

if TYPE_CHECKING:
    from shardwise.launch.world import World
    from shardwise.train.config.sections import RawConfig

#: The strategies compared without ``--strategies``.
STRATEGIES = ("ddp", "zero1", "zero2", "shard_grad_op", "zero3")


def parity(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Argument(help="YAML or JSON file, or a run's folder; none for the demo.")
    ] = None,
    spec: Annotated[
        str | None, typer.Option(metavar="FILE[:NAME]|MODULE:NAME", help="Your own model, data, loss: an sw.TrainSpec.")
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Processes; by default one per GPU, or 2 on CPU.")] = None,
    strategies: Annotated[str, typer.Option(help="Presets, separated by commas.")] = ",".join(STRATEGIES),
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 3,
    locate: Annotated[bool, typer.Option("--locate", help="Compare every module, even if the results agree.")] = False,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.field=value, repeatable.")] = None,
) -> None:
    """Train a few steps under every strategy and in one process, and compare to the last bit.

    Compares losses, gradient norms and parameters, and exits with 0 if all are equal and with 1 if something differs.
    A plan that makes sums in a different order (parallel.tp, weights that pipeline stages share) must agree within the
    tolerance that the table shows. If a plan has groups of ranks (dp_replicate, hsdp), the one process adds gradients
    inside each group first. Without CONFIG it trains the demo's model on the demo's data.

    If something differs, the command names the first module, in the order of a step, whose output, input gradient or
    parameter gradient is not that of one process, with the ranks, the size and the kind of the difference (scaled by
    the size of an axis, a missing sum, a shifted slice, ...).

    Examples:

      shardwise parity

      shardwise parity run.yaml --nproc 3 --strategies zero2,zero3 --steps 5

      shardwise parity --nproc 4 --set parallel.tp=2 --set parallel.pp=2

      shardwise parity --nproc 2 --set parallel.tp=2 --strategies zero3 --locate
    """
    from shardwise.launch.elastic import num_workers
    from shardwise.launch.exit_codes import run_worker
    from shardwise.launch.world import read_world
    from shardwise.train.launcher import launch_parity, named_config

    world = read_world()
    names = [name.strip() for name in strategies.split(",") if name.strip()]
    if steps < 1:
        raise ConfigError(f"--steps {steps}: expected at least 1.\n  Set --steps 3.")
    if not names:
        raise ConfigError(f"--strategies {strategies!r} names none.\n  Use some of: {', '.join(STRATEGIES)}.")
    raw, _, _ = named_config(config, overrides or [], spec=spec)
    if world.source != "alone":
        raise typer.Exit(
            run_worker(lambda: _compare(raw, world, names, steps, locate=locate or None), world, show_error)
        )
    raise typer.Exit(launch_parity(raw, num_workers(nproc), context.obj, strategies=names))


def _compare(raw: RawConfig, world: World, strategies: list[str], steps: int, *, locate: bool | None) -> int:
    from shardwise.train.parity import compare_here

    report = compare_here(raw, world, strategies=strategies, num_steps=steps, locate=locate)
    if world.rank == 0:
        typer.echo(str(report))
    return 0 if report.holds else 1
