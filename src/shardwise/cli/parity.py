"""``parity``: every strategy against one process, on the user's own model and data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.output import show_error
from shardwise.spec.errors import ConfigError
from shardwise.train.start import named_config

if TYPE_CHECKING:
    from shardwise.launch.world import World
    from shardwise.train.config import RawConfig

#: What is compared where --strategies does not say.
STRATEGIES = ("ddp", "zero1", "zero2", "shard_grad_op", "zero3")

_HELP = """Train a few steps under every strategy and in one process, and compare to the last bit.

Compares losses, gradient norms and parameters; leaves with 0 where all are equal, with 1 where something differs.
Where a plan makes sums in another order (parallel.tp, weights that pipeline stages share) they must be near: the
table says how near.
Where a plan has groups of ranks (dp_replicate, hsdp), the one process adds gradients inside each group first.
Without CONFIG the demo's model and data.

Examples:

  shardwise parity

  shardwise parity run.yaml --nproc 3 --strategies zero2,zero3 --steps 5

  shardwise parity --nproc 4 --set parallel.tp=2 --set parallel.pp=2
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("parity", help=_HELP)(parity)


def parity(
    config: Annotated[Path | None, typer.Argument(help="YAML or TOML file; none for the demo.")] = None,
    nproc: Annotated[int | None, typer.Option(help="Processes; by default one per GPU, or 2 on CPU.")] = None,
    strategies: Annotated[str, typer.Option(help="Presets, separated by commas.")] = ",".join(STRATEGIES),
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 3,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.field=value, repeatable.")] = None,
) -> None:
    """Compare."""
    from shardwise.launch.elastic import num_workers
    from shardwise.launch.world import read_world

    world = read_world()
    names = [name.strip() for name in strategies.split(",") if name.strip()]
    if steps < 1:
        raise ConfigError(f"--steps {steps}: expected at least 1.\n  Set --steps 3.")
    if not names:
        raise ConfigError(f"--strategies {strategies!r} names none.\n  Use some of: {', '.join(STRATEGIES)}.")
    draft, _ = named_config(config, overrides or [])
    if world.source != "alone":
        raise typer.Exit(_work(draft, world, names, steps))
    raise typer.Exit(_launch(draft, num_workers(nproc), config, overrides=overrides or [], names=names, steps=steps))


def _launch(
    draft: RawConfig, nproc: int, config: Path | None, *, overrides: list[str], names: list[str], steps: int
) -> int:
    """Check everything, then start the workers."""
    from shardwise.launch.elastic import launch
    from shardwise.spec.exact import check_exact
    from shardwise.spec.plan import ParallelPlan
    from shardwise.train.proof import under_strategies
    from shardwise.train.resolve import resolve

    for name in names:
        ParallelPlan(strategy=name)
    resolved = resolve(draft, nproc, raises_masters=False)
    for name, plan in under_strategies(resolved.plan, names).items():
        check_exact(plan, name)
        plan.mesh(nproc, nproc)
    resolved.source.check(resolved.vocab_size)
    arguments = ["parity", f"--strategies={','.join(names)}", f"--steps={steps}"]
    arguments += [f"--set={override}" for override in overrides]
    arguments += [str(config)] if config is not None else []
    return launch("shardwise", arguments, nproc)


def _work(draft: RawConfig, world: World, names: list[str], steps: int) -> int:
    from shardwise.launch.exit_codes import run_worker

    return run_worker(lambda: _compare(draft, world, names, steps), world, show_error)


def _compare(draft: RawConfig, world: World, names: list[str], steps: int) -> int:
    from shardwise.launch.world import join, shutdown
    from shardwise.train.data import open_data
    from shardwise.train.proof import compare_with_one_process
    from shardwise.train.resolve import resolve

    resolved = resolve(draft, world.size, world.ranks_per_machine, raises_masters=False)
    config = resolved.config
    device = join(world)
    try:
        data = open_data(
            resolved.source,
            seq_len=resolved.seq_len,
            held_out=config.data.held_out,
            vocab_size=resolved.vocab_size,
            seed=config.train.seed,
        )
        report = compare_with_one_process(resolved, data, device, strategies=names, num_steps=steps)
    finally:
        shutdown()
    if world.rank == 0:
        typer.echo(str(report))
    return 0 if report.holds else 1
