"""Common parts of commands that use a trained model: find it, and start as many processes as its plan needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shardwise.launch.exit_codes import show_error
from shardwise.spec.errors import ConfigError

if TYPE_CHECKING:
    from shardwise.launch.world import World
    from shardwise.train.load import TrainedModel


def check_packages(verb: str, *names: str) -> None:
    """Refuse a command whose packages are missing."""
    from importlib.util import find_spec

    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{verb} needs {' and '.join(missing)}.\n  Install shardwise[{verb}].")


def run_with_model(
    context: typer.Context,
    path: Path,
    overrides: list[str],
    nproc: int | None,
    *,
    is_averaged: bool,
    check: Callable[[TrainedModel, int], Any],
    work: Callable[[TrainedModel, World], int],
    **launching: Any,
) -> None:
    """Find the trained model at ``path``, and run ``work`` in this process or in new ones.

    ``check`` refuses, before any process starts, what cannot work with that number of processes. ``work`` runs on each
    rank and returns its exit code. ``launching`` goes to :func:`shardwise.launch.elastic.launch`.

    Raises:
        typer.Exit: At the end, with the exit code.
        ConfigError, CheckpointError: The model cannot be used as requested.
    """
    from shardwise.launch.elastic import launch, num_workers
    from shardwise.launch.exit_codes import run_worker
    from shardwise.launch.world import read_world
    from shardwise.train.load import find_model

    world = read_world()
    trained = find_model(path)
    hint = trained.check_average(is_asked=is_averaged)
    if world.source == "alone":
        if hint:
            typer.echo(hint, err=True)
        section = trained.draft(overrides).config.parallel
        count = num_workers(nproc if nproc is not None else max(1, section.tp * section.pp))
        check(trained, count)
        if count > 1:
            raise typer.Exit(launch("shardwise", context.obj, count, **launching))
    raise typer.Exit(run_worker(lambda: work(trained, world), world, show_error))
