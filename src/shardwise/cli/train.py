"""``train``: check everything, then start the workers, or run as one of them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.output import show
from shardwise.spec.errors import ConfigError


def train(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Argument(help="YAML or JSON file, or a run's folder; none for the demo.")
    ] = None,
    spec: Annotated[
        str | None,
        typer.Option(metavar="FILE[:NAME]|MODULE:NAME", help="Your own model, data, loss, ...: an sw.TrainSpec."),
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Processes; by default one per GPU, or 2 on CPU.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="The run's folder; by default runs/NAME.")] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="[latest|latest-good|PATH|URL]", help="Continue a run; without a value: latest."),
    ] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.field=value, repeatable.")] = None,
    max_restarts: Annotated[int, typer.Option(help="Start all workers again this often after one was lost.")] = 0,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take over the folder of a lost run, after 20 s without a sign of life.")
    ] = False,
    profile_steps: Annotated[
        str | None, typer.Option(metavar="FIRST:LAST", help="Write a Chrome trace of these steps, both included.")
    ] = None,
    check_streams: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Make N steps and report races between CUDA streams; needs no GPU."),
    ] = None,
) -> None:
    """Train a model; without CONFIG the built-in demo.

    The demo is a small GPT on the source text of Python's own standard library, with ZeRO-3 over every local device.

    The command starts its own processes, or joins the world that torchrun or Slurm describes.

    Examples:

      shardwise train

      shardwise train run.yaml --nproc 4 --set optimizer.lr=3e-4 --set train.steps=2000

      shardwise train run.yaml --resume

      shardwise train runs/demo --resume

      shardwise train run.yaml --spec mine.py --nproc 2

      shardwise train run.yaml --profile-steps 10:12

      shardwise train run.yaml --check-streams 3

      torchrun --nproc-per-node 4 -m shardwise train run.yaml
    """
    from shardwise.launch.elastic import num_workers
    from shardwise.launch.stop_request import catch_early
    from shardwise.launch.world import World, read_world
    from shardwise.train.launcher import launch_training, named_config, step_range_of, train_worker

    profiled = step_range_of(profile_steps)
    world = read_world()
    if world.source == "slurm" and world.size == 1 and nproc is not None:
        world = World()  # this single task of srun starts the ranks
    if world.source == "slurm":  # Slurm sends its signal before the time limit only once, maybe while torch is imported
        catch_early()
    overrides = overrides or []
    if check_streams is not None:
        overrides = [*overrides, f"train.steps={check_streams}", "schedule.warmup_steps=0", "checkpoint.final=false"]
    raw, is_demo, run_dir = named_config(config, overrides, spec=spec, run_dir=run_dir, resume=resume)
    if world.source != "alone":
        if nproc is not None and world.source != "launcher":
            raise ConfigError(
                f"--nproc {nproc}, but {world.source} has started this process as one of {world.size}.\n"
                "  Leave --nproc out."
            )
        train_here = functools.partial(
            train_worker,
            raw,
            world,
            run_dir=run_dir,
            resume=resume,
            takes_over=take_over,
            is_demo=is_demo and check_streams is None,
            profiled=profiled,
        )
        if check_streams is None:
            raise typer.Exit(train_here())
        from shardwise.testing.streams.command import checked

        raise typer.Exit(checked(train_here, world.rank))
    raise typer.Exit(
        launch_training(
            raw,
            num_workers(nproc),
            context.obj,
            run_dir=run_dir,
            resume=resume,
            takes_over=take_over,
            max_restarts=max_restarts,
            say=show,
        )
    )
