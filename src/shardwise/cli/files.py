"""Verbs about files: ``data tokenize``, ``checkpoint inspect|verify|import|export`` and ``export``."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Annotated

import typer

from shardwise.checkpoint.storage import place_of, step_of, storage_of, without_secrets
from shardwise.cli.output import show
from shardwise.spec.errors import CheckpointError, ConfigError, StorageError


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
    checkpoint.command(
        "import",
        help="Turn a folder of torch.distributed.checkpoint (FSDP2, torchtitan, FSDP1) into a checkpoint that sw.load"
        " reads on any layout, a tensor at a time, in one process. Reading its .metadata executes code: --trust.\n\n"
        "Example: shardwise checkpoint import dcp/step-1000 checkpoints/step-00001000 --trust",
    )(import_)
    checkpoint.command(
        "export",
        help="Turn a checkpoint into a folder that dcp.load of torch.distributed.checkpoint reads on any layout, a file"
        " at a time, in one process.\n\n"
        "Example: shardwise checkpoint export runs/demo dcp/step-300",
    )(export_to_dcp)
    app.add_typer(checkpoint, name="checkpoint")
    app.command(
        "export",
        help="Write a run's model as a folder that transformers loads: weights, configuration, tokenizer. Reads the"
        " checkpoint one block at a time, in one process. With --triton DIR write it into a model repository of Triton"
        " instead, for its Python backend, which continues text as `shardwise serve` does, or with --backend vllm for"
        " its vLLM backend; a Hugging Face folder is named there, not copied.\n\n"
        "Examples: shardwise export runs/demo exported --dtype bf16\n\n"
        "shardwise export runs/demo --triton model_repository --name demo",
    )(export)


def _data() -> None:
    """Prepare training data.

    Example: shardwise data tokenize corpus/ corpus.tokens
    """


def tokenize(
    source: Annotated[str, typer.Argument(help="File, folder or glob of UTF-8 text or of a data set, or 'stdlib'.")],
    out: Annotated[Path, typer.Argument(help="The token file.")],
    tokenizer: Annotated[str, typer.Option(help="'bytes', or a Hugging Face folder with a tokenizer.")] = "bytes",
    column: Annotated[str, typer.Option(help="Of a data set: that of the texts.")] = "text",
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,  # noqa: FBT002  typer's form
) -> None:
    """Write a token file."""
    from shardwise.train.data.examples import Texts, read_examples
    from shardwise.train.data.source import find_source
    from shardwise.train.data.token_files import DataError, write_tokens
    from shardwise.train.data.tokenizer import find_tokenizer

    found = find_source(without_secrets(source))
    if found.kind not in {"text", "records"}:
        raise DataError(f"{source} is not text.\n  Name a file, folder or glob of text, or of rows with one.")
    held = find_tokenizer(tokenizer)
    try:
        made = read_examples(found, Texts(held, column if found.kind == "records" else None))
        ids = (example.ids for example in made)
        count = write_tokens(out, ids, vocab_size=held.vocab_size, should_replace=force)
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror}.\n  Name another place.") from None
    show(f"{out}: {count:,} tokens from {len(found.files)} files, vocabulary {held.vocab_size:,}")


def _checkpoint() -> None:
    """Look at checkpoints.

    Example: shardwise checkpoint verify runs/demo
    """


def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint's folder or URL, or a run's (its newest checkpoint).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,  # noqa: FBT002  typer's form
) -> None:
    """Print what the manifest says."""
    from shardwise.checkpoint import describe_summary, open_checkpoint

    summary = open_checkpoint(_checkpoints(path)[-1]).summary()
    show(json.dumps(summary, indent=2) if as_json else describe_summary(summary))


def verify(path: Annotated[Path, typer.Argument(help="A checkpoint's folder or URL, or a run's.")]) -> None:
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
            num_sliced = sum(bool(checkpoint.manifest.table.slices(name)) for name in checkpoint.tensors)
            sliced = f", {num_sliced} tensors in slices" if num_sliced else ""
            show(f"{folder}: good, {len(checkpoint.manifest.files)} files, step {checkpoint.step}{sliced}")
    if problems:
        raise CheckpointError("\n".join(problems))


class Backend(enum.Enum):
    """Triton's backend that runs the model."""

    PYTHON = "python"
    VLLM = "vllm"


_ModelKey = Annotated[
    str | None,
    typer.Option(
        help="Where the model's state dict is in the saved one, such as 'model' or 'app.model'; '': at the top."
    ),
]
_NO_OPTIMIZER = typer.Option("--no-optimizer", help="The model alone.")
_FLAT = typer.Option("--flat-optimizer", help="The optimizer's settings by parameter, as torchtitan has them.")


def import_(  # noqa: PLR0917  typer calls it by name
    source: Annotated[Path, typer.Argument(help="The folder that dcp.save() was given.")],
    out: Annotated[Path, typer.Argument(help="The new checkpoint's folder, such as checkpoints/step-00001000.")],
    trust: Annotated[bool, typer.Option("--trust", help="The folder may execute code here.")] = False,  # noqa: FBT002  typer's form
    model_key: _ModelKey = None,
    optimizer_key: Annotated[str | None, typer.Option(help="The same of the optimizer's state dict.")] = None,
    no_optimizer: Annotated[bool, _NO_OPTIMIZER] = False,  # noqa: FBT002  typer's form
    optimizer_class: Annotated[str | None, typer.Option(help="Such as AdamW, where its state does not tell.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the model's weights, such as fp32; by default their own.")
    ] = None,
) -> None:
    """Write a checkpoint from a folder of torch.distributed.checkpoint."""
    if not trust:
        raise typer.BadParameter(
            f"reading {source} executes code: its .metadata is a pickle, as are the values in it that are no tensors."
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


def export_to_dcp(  # noqa: PLR0917  typer calls it by name
    path: Annotated[Path, typer.Argument(help="A checkpoint's folder or URL, or a run's (its newest checkpoint).")],
    out: Annotated[Path, typer.Argument(help="The new folder.")],
    model_key: _ModelKey = "model",
    optimizer_key: Annotated[str, typer.Option(help="The same of the optimizer's state dict.")] = "optimizer",
    no_optimizer: Annotated[bool, _NO_OPTIMIZER] = False,  # noqa: FBT002  typer's form
    flat_optimizer: Annotated[bool, _FLAT] = False,  # noqa: FBT002  typer's form
) -> None:
    """Write a folder of torch.distributed.checkpoint."""
    from shardwise.checkpoint import open_checkpoint
    from shardwise.checkpoint.dcp_export import export_dcp

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
    dtype: Annotated[str | None, typer.Option(help="Of the weights in the files, such as bf16.")] = None,
    average: Annotated[bool, typer.Option("--average", help="The run's averaged weights.")] = False,  # noqa: FBT002  typer's form
    max_shard_bytes: Annotated[float, typer.Option(help="A file holds no more.")] = 5e9,
    *,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a LoRA run the whole model; without it the adapter by itself.")
    ] = False,
    triton: Annotated[
        Path | None, typer.Option(help="A model repository of Triton, to which the model is added.")
    ] = None,
    backend: Annotated[Backend, typer.Option(help="Of Triton.")] = Backend.PYTHON,
    name: Annotated[str | None, typer.Option(help="The model's in the repository; by default the run's.")] = None,
) -> None:
    """Write a Hugging Face folder, or a model of a Triton repository."""
    from shardwise.train.export import export_trained
    from shardwise.train.trained import find_trained, model_name

    if (folder is None) == (triton is None):
        raise ConfigError("the model goes to one place.\n  Name a new folder, or a repository: --triton DIR.")
    trained = find_trained(source)
    if average:
        trained.check_average()
    if triton is not None:
        from shardwise.serve.repository import write_repository

        name = name or model_name(source)
        written = {"dtype": dtype, "is_averaged": average, "max_shard_bytes": max_shard_bytes}
        path = write_repository(trained, triton, name=name, backend=backend.value, **written)
        show(f"{path}: start Triton with `tritonserver --model-repository {triton.resolve()}`")
        return
    assert folder is not None
    options = {"is_averaged": average, "max_shard_bytes": max_shard_bytes, "merges_adapter": merge}
    export_trained(trained, folder, dtype=dtype, **options)
    is_adapter = (folder / "adapter_config.json").is_file()
    loader = "peft.AutoPeftModelForCausalLM" if is_adapter else "transformers.AutoModelForCausalLM"
    show(f"{folder}: load it with {loader}.from_pretrained({str(folder)!r})")


def _checkpoints(path: Path) -> list[Path]:
    """The checkpoint itself, or those of a run, oldest first."""
    from shardwise.checkpoint import CHECKPOINTS

    place = place_of(path)
    held = storage_of(place).list(place / CHECKPOINTS)
    if not held and not (path / CHECKPOINTS).is_dir():
        return [place]
    found = [place / CHECKPOINTS / name for name in held if step_of(name) is not None]
    if not found:
        raise CheckpointError(f"{path} holds no checkpoint.\n  Name another run, or a step-* folder.")
    return found
