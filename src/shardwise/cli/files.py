"""Commands for files: ``data tokenize``, ``checkpoint inspect|verify|import|export`` and ``export``."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Annotated

import typer

from shardwise.checkpoint.storage import place_of, step_of, storage_of, without_secrets
from shardwise.cli.output import show
from shardwise.spec.errors import CheckpointError, ConfigError, StorageError

data = typer.Typer(
    help="Prepare training data.\n\nExample: shardwise data tokenize corpus/ corpus.tokens",
    no_args_is_help=True,
    rich_markup_mode=None,
)
checkpoint = typer.Typer(
    help="Inspect, verify and convert checkpoints.\n\nExample: shardwise checkpoint verify runs/demo",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@data.command()
def tokenize(
    source: Annotated[str, typer.Argument(help="File, folder or glob of UTF-8 text or of a data set, or 'stdlib'.")],
    out: Annotated[Path, typer.Argument(help="The token file.")],
    tokenizer: Annotated[str, typer.Option(help="'bytes', or a Hugging Face folder with a tokenizer.")] = "bytes",
    column: Annotated[str, typer.Option(help="Column of the texts, in a data set.")] = "text",
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write text as a token file, which training maps into memory.

    Each byte is a token, unless --tokenizer names a Hugging Face folder with a tokenizer.

    Example: shardwise data tokenize corpus/ corpus.tokens --tokenizer models/llama
    """
    from shardwise.train.data.examples import Texts, read_examples
    from shardwise.train.data.source import find_source
    from shardwise.train.data.token_files import DataError, write_tokens
    from shardwise.train.data.tokenizer import find_tokenizer

    found = find_source(without_secrets(source))
    if found.kind not in {"text", "records"}:
        raise DataError(f"{source} is not text.\n  Name a file, folder or glob of text, or of rows with one.")
    encoder = find_tokenizer(tokenizer)
    try:
        examples = read_examples(found, Texts(encoder, column if found.kind == "records" else None))
        ids = (example.ids for example in examples)
        count = write_tokens(out, ids, vocab_size=encoder.vocab_size, should_replace=force)
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror}.\n  Name another place.") from None
    show(f"{out}: {count:,} tokens from {len(found.files)} files, vocabulary {encoder.vocab_size:,}")


@checkpoint.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint's folder or URL, or a run's (its newest checkpoint).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say what a checkpoint holds: step, world, tensors, sizes. Reads the manifest only.

    Example: shardwise checkpoint inspect runs/demo/checkpoints/step-00000300
    """
    from shardwise.checkpoint.reader import describe_summary, open_checkpoint

    summary = open_checkpoint(_checkpoints(path)[-1]).summary()
    show(json.dumps(summary, indent=2) if as_json else describe_summary(summary))


@checkpoint.command()
def verify(path: Annotated[Path, typer.Argument(help="A checkpoint's folder or URL, or a run's.")]) -> None:
    """Read every file of a checkpoint (or of all checkpoints of a run) and compare its hash.

    Example: shardwise checkpoint verify runs/demo
    """
    from shardwise.checkpoint.reader import open_checkpoint

    problems: list[str] = []
    for folder in _checkpoints(path):
        try:
            opened = open_checkpoint(folder)
            opened.verify()
        except CheckpointError as error:
            problems.append(str(error))
        else:
            num_sliced = sum(bool(opened.manifest.table.slices(name)) for name in opened.tensors)
            sliced = f", {num_sliced} tensors in slices" if num_sliced else ""
            show(f"{folder}: good, {len(opened.manifest.files)} files, step {opened.step}{sliced}")
    if problems:
        raise CheckpointError("\n".join(problems))


class Backend(enum.Enum):
    """Triton's backend that runs the model."""

    PYTHON = "python"
    VLLM = "vllm"


_ModelKey = Annotated[
    str | None,
    typer.Option(help="Key of the model's state dict in the saved one, such as 'model' or 'app.model'; '': the top."),
]
_NO_OPTIMIZER = typer.Option("--no-optimizer", help="Leave out the optimizer's state.")
_FLAT = typer.Option("--flat-optimizer", help="The optimizer's settings by parameter, as torchtitan has them.")


@checkpoint.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="The folder that dcp.save() was given.")],
    out: Annotated[Path, typer.Argument(help="The new checkpoint's folder, such as checkpoints/step-00001000.")],
    trust: Annotated[bool, typer.Option("--trust", help="Let the folder execute code.")] = False,
    model_key: _ModelKey = None,
    optimizer_key: Annotated[str | None, typer.Option(help="The same for the optimizer's state dict.")] = None,
    no_optimizer: Annotated[bool, _NO_OPTIMIZER] = False,
    optimizer_class: Annotated[
        str | None, typer.Option(help="Class of the optimizer, if its state does not show it.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the model's weights, such as fp32; by default the stored one.")
    ] = None,
) -> None:
    """Convert a folder of torch.distributed.checkpoint (FSDP2, torchtitan, FSDP1) into a checkpoint for sw.load.

    The checkpoint loads under any plan. One process reads a tensor at a time. Reading the folder's .metadata executes
    code, so that --trust is required.

    Example: shardwise checkpoint import dcp/step-1000 checkpoints/step-00001000 --trust
    """
    if not trust:
        raise typer.BadParameter(
            f"reading {source} executes code: its .metadata is a pickle, as are the values in it that are not tensors."
            " Give --trust if you know who wrote the folder.",
            param_hint="--trust",
        )
    from shardwise.checkpoint.dcp_import import import_dcp

    found = import_dcp(
        source,
        out,
        model_key=model_key,
        optimizer_key=optimizer_key,
        has_optimizer=not no_optimizer,
        optimizer_class=optimizer_class,
        dtype=dtype,
    )
    state = f"{found.optimizer} state of step {found.step}" if found.optimizer else "no optimizer state"
    show(f"{out}: {found.num_tensors} tensors of the model, {state}")
    _show_left_out(found.left_out)


@checkpoint.command("export")
def export_to_dcp(
    path: Annotated[Path, typer.Argument(help="A checkpoint's folder or URL, or a run's (its newest checkpoint).")],
    out: Annotated[Path, typer.Argument(help="The new folder.")],
    model_key: _ModelKey = "model",
    optimizer_key: Annotated[str, typer.Option(help="The same for the optimizer's state dict.")] = "optimizer",
    no_optimizer: Annotated[bool, _NO_OPTIMIZER] = False,
    flat_optimizer: Annotated[bool, _FLAT] = False,
) -> None:
    """Convert a checkpoint into a folder of torch.distributed.checkpoint.

    dcp.load reads the folder under any layout. One process writes a file at a time.

    Example: shardwise checkpoint export runs/demo dcp/step-300
    """
    from shardwise.checkpoint.dcp_export import export_dcp
    from shardwise.checkpoint.reader import open_checkpoint

    left_out = export_dcp(
        open_checkpoint(_checkpoints(path)[-1]),
        out,
        model_key=model_key or "",
        optimizer_key=optimizer_key,
        has_optimizer=not no_optimizer,
        is_flat=flat_optimizer,
    )
    show(f"{out}: read it with torch.distributed.checkpoint.load(state_dict, checkpoint_id={str(out)!r})")
    _show_left_out(left_out)


def _show_left_out(names: list[str]) -> None:
    if names:
        show(f"left out: {', '.join(names[:8])}" + (f" and {len(names) - 8} more" if len(names) > 8 else ""))


def export(
    source: Annotated[Path, typer.Argument(help="A run's folder or URL (its newest checkpoint), or a checkpoint's.")],
    folder: Annotated[Path | None, typer.Argument(help="The new folder.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the written weights, such as bf16.")] = None,
    average: Annotated[bool, typer.Option("--average", help="Export the averaged weights (train.ema_decay).")] = False,
    max_shard_bytes: Annotated[float, typer.Option(help="Largest size of a file.")] = 5e9,
    *,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge a LoRA run's adapter into the model; by default the adapter alone.")
    ] = False,
    triton: Annotated[Path | None, typer.Option(help="Add the model to this model repository of Triton.")] = None,
    backend: Annotated[Backend, typer.Option(help="Triton's backend.")] = Backend.PYTHON,
    name: Annotated[str | None, typer.Option(help="The model's name in the repository; by default the run's.")] = None,
) -> None:
    """Write a run's model as a folder that transformers loads: weights, configuration, tokenizer.

    One process reads the checkpoint a block at a time. With --triton DIR the model is written into a model repository
    of Triton instead: for the Python backend, which continues text as `shardwise serve` does, or with --backend vllm
    for the vLLM backend. The repository refers to a Hugging Face folder by its path and does not copy it.

    Examples:

      shardwise export runs/demo exported --dtype bf16

      shardwise export runs/demo --triton model_repository --name demo
    """
    from shardwise.train.export import export_trained
    from shardwise.train.load import find_model, model_name

    if (folder is None) == (triton is None):
        raise ConfigError("the model goes to one place.\n  Name a new folder, or a repository: --triton DIR.")
    if triton is None and (name is not None or backend is not Backend.PYTHON):
        raise ConfigError("--name and --backend are for Triton.\n  Leave them out, or add --triton DIR.")
    trained = find_model(source)
    if hint := trained.check_average(is_asked=average):
        typer.echo(hint, err=True)
    if triton is not None:
        from shardwise.serve.repository import write_repository

        name = name or model_name(source)
        written = {"dtype": dtype, "is_averaged": average, "max_shard_bytes": max_shard_bytes}
        path = write_repository(trained, triton, name=name, backend=backend.value, **written)
        show(f"{path}: start Triton with `tritonserver --model-repository {triton.resolve()}`")
        return
    assert folder is not None
    options = {"is_averaged": average, "max_shard_bytes": max_shard_bytes, "merges_adapter": merge}
    loader = export_trained(trained, folder, dtype=dtype, **options)
    show(f"{folder}: load it with {loader}.from_pretrained({str(folder)!r})")


def _checkpoints(path: Path) -> list[Path]:
    """Return the checkpoint itself, or those of a run, oldest first."""
    from shardwise.spec.run_files import CHECKPOINTS

    place = place_of(path)
    names = storage_of(place).list(place / CHECKPOINTS)
    if not names and not (path / CHECKPOINTS).is_dir():
        return [place]
    found = [place / CHECKPOINTS / name for name in names if step_of(name) is not None]
    if not found:
        raise CheckpointError(f"{path} holds no checkpoint.\n  Name another run, or a step-* folder.")
    return found
