"""Verbs about files: ``data tokenize``, ``checkpoint inspect``, ``checkpoint verify`` and ``export``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.output import show
from shardwise.spec.errors import CheckpointError, StorageError


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    data = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    data.callback()(_data)
    data.command(
        "tokenize",
        help="Write text as a token file, memory-mapped in training: one token per byte, or with --tokenizer what the"
        " tokenizer of a Hugging Face folder makes of it.\n\n"
        "Example: shardwise data tokenize corpus/ corpus.tokens --tokenizer models/llama",
    )(tokenize)
    app.add_typer(data, name="data")
    checkpoint = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    checkpoint.callback()(_checkpoint)
    checkpoint.command(
        "inspect",
        help="Say what a checkpoint holds: step, world, tensors, sizes. Reads the manifest only.\n\n"
        "Example: shardwise checkpoint inspect runs/demo/checkpoints/step-00000300",
    )(inspect)
    checkpoint.command(
        "verify",
        help="Read every file of a checkpoint (or of all checkpoints of a run) and compare its hash.\n\n"
        "Example: shardwise checkpoint verify runs/demo",
    )(verify)
    app.add_typer(checkpoint, name="checkpoint")
    app.command(
        "export",
        help="Write a run's model as a folder that transformers loads: weights, configuration, tokenizer. Reads the"
        " checkpoint one block at a time, in one process.\n\n"
        "Example: shardwise export runs/demo exported --dtype bf16",
    )(export)


def _data() -> None:
    """Prepare training data.

    Example: shardwise data tokenize corpus/ corpus.tokens
    """


def tokenize(
    source: Annotated[str, typer.Argument(help="File, folder or glob of UTF-8 text, or 'stdlib'.")],
    out: Annotated[Path, typer.Argument(help="The token file.")],
    tokenizer: Annotated[str, typer.Option(help="'bytes', or a Hugging Face folder with a tokenizer.")] = "bytes",
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,  # noqa: FBT002  typer's form
) -> None:
    """Write a token file."""
    from shardwise.train.data import DataError, find_source, write_tokens
    from shardwise.train.tokenizer import find_tokenizer
    from shardwise.train.tokenizer import tokenize as blocks

    found = find_source(source)
    if found.kind != "text":
        raise DataError(f"{source} is not text.\n  Name a file, folder or glob of text.")
    held = find_tokenizer(tokenizer)
    try:
        count = write_tokens(out, blocks(found, held), vocab_size=held.vocab_size, should_replace=force)
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror}.\n  Name another place.") from None
    show(f"{out}: {count:,} tokens from {len(found.files)} files, vocabulary {held.vocab_size:,}")


def _checkpoint() -> None:
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


def export(
    source: Annotated[Path, typer.Argument(help="A run's folder (its newest checkpoint), or a checkpoint's.")],
    folder: Annotated[Path, typer.Argument(help="The new folder.")],
    dtype: Annotated[str | None, typer.Option(help="Of the weights in the files, such as bf16.")] = None,
    average: Annotated[bool, typer.Option("--average", help="The run's averaged weights.")] = False,  # noqa: FBT002  typer's form
    max_shard_bytes: Annotated[float, typer.Option(help="A file holds no more.")] = 5e9,
) -> None:
    """Write a Hugging Face folder."""
    from shardwise.train.export import export_trained
    from shardwise.train.trained import find_trained

    trained = find_trained(source)
    if average:
        trained.check_average()
    export_trained(trained, folder, dtype=dtype, is_averaged=average, max_shard_bytes=max_shard_bytes)
    show(f"{folder}: load it with transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})")


def _checkpoints(path: Path) -> list[Path]:
    """The checkpoint itself, or those of a run, oldest first."""
    from shardwise.checkpoint import CHECKPOINTS

    if not (path / CHECKPOINTS).is_dir():
        return [path]
    found = sorted(folder for folder in (path / CHECKPOINTS).glob("step-*") if folder.name[5:].isdecimal())
    if not found:
        raise CheckpointError(f"{path} holds no checkpoint.\n  Name another run, or a step-* folder.")
    return found
