"""``data tokenize``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.show import show


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    data = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    data.callback()(_group)
    data.command(
        "tokenize",
        help="Write text as a token file, memory-mapped in training: one token per byte, or with --tokenizer what the"
        " tokenizer of a Hugging Face folder makes of it.\n\n"
        "Example: shardwise data tokenize corpus/ corpus.tokens --tokenizer models/llama",
    )(tokenize)
    app.add_typer(data, name="data")


def _group() -> None:
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
    from shardwise.spec.errors import StorageError
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
