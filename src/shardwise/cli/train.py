"""``train``: check everything, start the workers, or be one of them."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.show import show, show_error
from shardwise.spec.errors import ConfigError
from shardwise.train.text import printable

if TYPE_CHECKING:
    from shardwise.launch.world import World
    from shardwise.train.config import RawConfig

_HELP = """Train a model; without CONFIG the built-in demo.

The demo is a small GPT on the source text of Python's own standard library, with ZeRO-3 over every local device.

Starts its own workers, or joins the world that torchrun or Slurm describes.

Examples:

  shardwise train

  shardwise train run.yaml --nproc 4 --set optimizer.lr=3e-4 --set train.steps=2000

  shardwise train run.yaml --resume

  torchrun --nproc-per-node 4 -m shardwise train run.yaml
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("train", help=_HELP)(train)


def train(  # noqa: PLR0917  typer calls it by name
    config: Annotated[Path | None, typer.Argument(help="YAML or TOML file; none for the demo.")] = None,
    nproc: Annotated[int | None, typer.Option(help="Processes; by default one per GPU, or 2 on CPU.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="The run's folder; by default runs/NAME.")] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="[latest|latest-good|PATH]", help="Continue; alone it means latest.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.field=value, repeatable.")] = None,
    max_restarts: Annotated[int, typer.Option(help="Start all workers again this often after one was lost.")] = 0,
) -> None:
    """Train."""
    from shardwise.launch.elastic import num_workers
    from shardwise.launch.world import read_world

    world = read_world()
    draft, is_demo = named_config(config, overrides or [], run_dir=run_dir, resume=resume)
    if world.source != "alone":
        if nproc is not None and world.source != "launcher":
            raise ConfigError(
                f"--nproc {nproc}, but {world.source} has started this process as one of {world.size}.\n"
                "  Leave --nproc out."
            )
        raise typer.Exit(_work(draft, world, run_dir, resume, is_demo=is_demo))
    raise typer.Exit(
        _launch(
            draft,
            num_workers(nproc),
            config,
            overrides or [],
            run_dir=run_dir,
            resume=resume,
            max_restarts=max_restarts,
        )
    )


def named_config(
    config: Path | None, overrides: list[str], *, run_dir: Path | None = None, resume: str | None = None
) -> tuple[RawConfig, bool]:
    """The configuration that the arguments name, and whether it is the demo's.

    Without a file, a run that is resumed by its folder brings its own ``config.yaml``; how it cuts the global batch
    into microbatches is derived anew, as the world may have changed.
    """
    from shardwise.train.config import read_config
    from shardwise.train.demo import DEMO
    from shardwise.train.rundir import CONFIG, choose

    if config is None and resume is not None:
        folder = choose(DEMO["name"], run_dir, is_resuming=True, wanted=resume)
        if (folder / CONFIG).is_file():
            return read_config(folder / CONFIG, ["train.gradient_accumulation_steps=null", *overrides]), False
    if config is None:
        return read_config(None, overrides, base=DEMO, title="the demo"), True
    return read_config(config, overrides), False


def _launch(
    draft: RawConfig,
    nproc: int,
    config: Path | None,
    overrides: list[str],
    *,
    run_dir: Path | None,
    resume: str | None,
    max_restarts: int,
) -> int:
    """Check all that can be checked, choose the folder, start the workers and wait for them."""
    from shardwise.train import rundir
    from shardwise.train.lock import RunLock
    from shardwise.train.recorder import check_extras
    from shardwise.train.rehearsal import rehearse
    from shardwise.train.resolve import resolve

    if max_restarts < 0:
        raise ConfigError(f"--max-restarts {max_restarts}: expected 0 or more.\n  Set --max-restarts 0.")
    resolved = resolve(draft, nproc, say=show)
    check_extras(resolved.config)
    if run_dir is not None:
        RunLock(run_dir).check()
    directory = rundir.choose(resolved.config.name, run_dir, is_resuming=resume is not None, wanted=resume)
    RunLock(directory).check()
    if resume is not None:
        from shardwise.train.resume import check_config, find_checkpoint, saved_config

        check_config(saved_config(find_checkpoint(directory, resume)), resolved.config, resolved.asked)
    resolved.source.check(resolved.vocab_size)
    rehearse(resolved, nproc)
    rundir.create(directory)

    from shardwise.launch.elastic import launch

    arguments = ["train", f"--run-dir={directory}"]
    arguments += [f"--resume={resume}"] if resume is not None else []
    arguments += [f"--set={override}" for override in overrides]
    arguments += [str(config)] if config is not None else []
    return launch("shardwise", arguments, nproc, max_restarts=max_restarts, log_dir=directory / rundir.LOGS)


def _work(draft: RawConfig, world: World, run_dir: Path | None, resume: str | None, *, is_demo: bool) -> int:
    """Be one of the workers."""
    from shardwise.launch.exit_codes import run_worker
    from shardwise.train.recorder import check_extras
    from shardwise.train.resolve import resolve

    def work() -> int:
        resolved = resolve(draft, world.size, world.ranks_per_machine)
        check_extras(resolved.config)
        from shardwise.train.run import train as train_here

        return train_here(resolved, world=world, run_dir=run_dir, resume=resume, is_demo=is_demo)

    try:
        return run_worker(work, world, show_error)
    except Exception:
        if world.source != "launcher" and run_dir is not None:
            path = run_dir / "logs" / f"rank-{world.rank}.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as log:
                log.write(traceback.format_exc())
            sys.stderr.write(f"rank {world.rank} failed; its traceback is in {printable(path)}\n")
        raise
