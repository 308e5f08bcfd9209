"""``checkpoint inspect`` and ``checkpoint verify``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.show import show


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    group.callback()(_group)
    group.command(
        "inspect",
        help="Say what a checkpoint holds: step, world, tensors, sizes. Reads the manifest only.\n\n"
        "Example: shardwise checkpoint inspect runs/demo/checkpoints/step-00000300",
    )(inspect)
    group.command(
        "verify",
        help="Read every file of a checkpoint (or of all checkpoints of a run) and compare its hash.\n\n"
        "Example: shardwise checkpoint verify runs/demo",
    )(verify)
    app.add_typer(group, name="checkpoint")


def _group() -> None:
    """Look at checkpoints.

    Example: shardwise checkpoint verify runs/demo
    """


def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint's folder, or a run's (its newest checkpoint).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,  # noqa: FBT002  typer's form
) -> None:
    """Print what the manifest says."""
    from shardwise.checkpoint import describe_summary, open_checkpoint

    summary = open_checkpoint(_checkpoints(path)[-1]).summary()
    show(json.dumps(summary, indent=2) if as_json else describe_summary(summary))


def verify(path: Annotated[Path, typer.Argument(help="A checkpoint's folder, or a run's.")]) -> None:
    """Compare every hash; all bad checkpoints are named."""
    from shardwise.checkpoint import open_checkpoint
    from shardwise.spec.errors import CheckpointError

    problems: list[str] = []
    for folder in _checkpoints(path):
        try:
            checkpoint = open_checkpoint(folder)
            checkpoint.verify()
        except CheckpointError as error:
            problems.append(str(error))
        else:
            num_sliced = sum(entry.slices is not None for entry in checkpoint.manifest.tensors.values())
            sliced = f", {num_sliced} tensors in slices" if num_sliced else ""
            show(f"{folder}: good, {len(checkpoint.manifest.files)} files, step {checkpoint.step}{sliced}")
    if problems:
        raise CheckpointError("\n".join(problems))


def _checkpoints(path: Path) -> list[Path]:
    """The checkpoint itself, or those of a run, oldest first."""
    from shardwise.checkpoint import CHECKPOINTS
    from shardwise.spec.errors import CheckpointError

    if not (path / CHECKPOINTS).is_dir():
        return [path]
    found = sorted(folder for folder in (path / CHECKPOINTS).glob("step-*") if folder.name[5:].isdecimal())
    if not found:
        raise CheckpointError(f"{path} holds no checkpoint.\n  Name another run, or a step-* folder.")
    return found
