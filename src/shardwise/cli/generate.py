"""``generate``: continue a text with a trained model."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.trained_model import run_with_model
from shardwise.spec.errors import ConfigError
from shardwise.spec.text import first_line, printable

if TYPE_CHECKING:
    from shardwise.launch.world import World
    from shardwise.train.data.tokenizer import Tokenizer
    from shardwise.train.load import TrainedModel


@dataclass(frozen=True, slots=True)
class _Options:
    """The parsed arguments."""

    texts: list[str]
    ids: list[str]
    max_new_tokens: int
    sampling: dict[str, Any]
    overrides: list[str]
    is_averaged: bool
    is_json: bool
    is_stream: bool
    is_chat: bool


def generate(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="A run's folder or URL, a checkpoint's, or a Hugging Face folder.")],
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue, repeatable.")] = None,
    tokens: Annotated[list[str] | None, typer.Option(help="Token ids to continue ('12 7 9'), repeatable.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Largest number of new tokens for each prompt.")] = 50,
    temperature: Annotated[
        float, typer.Option(help="0 chooses the likeliest token; above 0 tokens are sampled.")
    ] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample among this many likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample among the fewest tokens with this probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling generator.")] = None,
    nproc: Annotated[int | None, typer.Option(help="Processes; by default as many as the plan needs.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="parallel.field=value, repeatable.")] = None,
    average: Annotated[bool, typer.Option("--average", help="Use the averaged weights (train.ema_decay).")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Write the text as it comes; one prompt.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Prompts are a user's messages to a chat model.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print tokens and text as JSON.")] = False,
) -> None:
    """Continue text with the model of a run, of a checkpoint, or of a Hugging Face folder.

    By default the likeliest token is chosen each time; with --temperature tokens are sampled. --nproc shards the
    parameters over processes (zero3), --set parallel.tp=2 divides every layer, and --set parallel.pp=2 divides the
    layers into stages. The tokens are those of one process, up to rounding. The prompt is printed before its
    continuation. With --chat each prompt is put into the model's chat template, and only the answer is printed.

    Examples:

      shardwise generate runs/demo --prompt "def main(" --max-new-tokens 60

      shardwise generate runs/demo --prompt "import " --temperature 0.8 --top-k 40 --seed 1 --set parallel.tp=2

      shardwise generate runs/demo/checkpoints/step-00000100 --prompt "class " --nproc 2 --json

      shardwise generate runs/chats --chat --prompt "What is the capital of France?"
    """
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    options = _Options(
        prompt or [],
        tokens or [],
        max_new_tokens,
        sampling,
        overrides or [],
        average,
        as_json,
        stream,
        chat,
    )
    if stream and len(options.texts) + len(options.ids) > 1:
        raise ConfigError("--stream writes one text as it comes, but there are several prompts.\n  Give one prompt.")
    run_with_model(
        context,
        path,
        options.overrides,
        nproc,
        is_averaged=average,
        check=lambda trained, count: _check(options, trained, count),
        work=lambda trained, world: _generate(options, trained, world),
    )


def _rows(options: _Options, trained: TrainedModel) -> tuple[list[list[int]], Tokenizer | None]:
    """Return the token ids of each prompt, texts first, and the tokenizer if there are texts."""
    if not options.texts and not options.ids:
        raise ConfigError("there is no prompt.\n  Give --prompt TEXT, or --tokens '12 7 9'.")
    if re.search("[\ud800-\udfff]", "".join(options.texts)):
        raise ConfigError("--prompt is not UTF-8.\n  Write it in UTF-8, or its ids as --tokens '12 7 9'.")
    tokenizer = trained.tokenizer() if options.texts else None
    if tokenizer is None:
        rows = []
    elif options.is_chat:
        rows = _conversations(options.texts, tokenizer, trained.read_template())
    else:
        rows = [tokenizer.encode(text) for text in options.texts]
    for ids in options.ids:
        try:
            rows.append([int(word) for word in ids.replace(",", " ").split()])
        except ValueError:
            raise ConfigError(f"--tokens {ids!r}: expected numbers.\n  Write --tokens '12 7 9'.") from None
    return rows, tokenizer


def _conversations(texts: Sequence[str], tokenizer: Tokenizer, template: str | None) -> list[list[int]]:
    """Return the token ids of conversations with one message each, up to the beginning of the answer."""
    from shardwise.train.data.tokenizer import FolderTokenizer

    if not isinstance(tokenizer, FolderTokenizer) or not (template or tokenizer.hf_tokenizer.chat_template):
        raise ConfigError(
            "--chat: the model's tokenizer has no chat template, by which messages become text.\n"
            "  Leave --chat out, and write the whole text in --prompt."
        )
    try:
        return [tokenizer.encode_chat([{"role": "user", "content": text}], template) for text in texts]
    except Exception as error:  # noqa: BLE001  a template may raise anything
        raise ConfigError(
            f"--chat: the chat template refuses the message: {first_line(error)}\n"
            "  Leave --chat out, and write the whole text in --prompt."
        ) from None


def _check(options: _Options, trained: TrainedModel, count: int) -> None:
    from shardwise.generation.decode import check_fit
    from shardwise.generation.sample import Sampling

    resolved = trained.resolve(options.overrides, count)
    rows, _ = _rows(options, trained)
    Sampling(*(options.sampling[name] for name in ("temperature", "top_k", "top_p")))
    check_fit(rows, options.max_new_tokens, vocab_size=resolved.vocab_size, positions=resolved.positions)


def _generate(options: _Options, trained: TrainedModel, world: World) -> int:
    resolved = trained.resolve(options.overrides, world.size, world.ranks_per_machine)
    rows, tokenizer = _rows(options, trained)
    eos = [token for token in trained.ends(tokenizer) if token < resolved.vocab_size]
    settings = {"max_new_tokens": options.max_new_tokens, "eos": eos or None, **options.sampling}
    write = _writer(options, rows, tokenizer, eos) if world.rank == 0 else lambda _column: None
    new: list[list[int]] = [[] for _ in rows]
    for column in trained.generate(resolved, world, rows, is_averaged=options.is_averaged, **settings):
        for row, token in zip(new, column, strict=True):
            if token is not None:
                row.append(token)
        write(new)
    if world.rank == 0:
        _finish(options, rows, new, tokenizer)
    return 0


def _text(ids: Sequence[int], tokenizer: Tokenizer | None) -> str:
    return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)


def _writer(
    options: _Options, rows: Sequence[Sequence[int]], tokenizer: Tokenizer | None, eos: Collection[int]
) -> Callable[[Sequence[Sequence[int]]], None]:
    """Return a function to call with all tokens so far after each new token."""
    if not options.is_stream:
        return lambda _new: None
    begin = [] if options.is_chat else rows[0]
    shown = _text(begin, tokenizer)
    if not options.is_json:
        sys.stdout.write(printable(shown, is_block=True))
    written = len(shown)

    def write(new: Sequence[Sequence[int]]) -> None:
        nonlocal written
        text = _text([*begin, *new[0]], tokenizer)
        is_last = len(new[0]) == options.max_new_tokens or new[0][-1] in eos
        if text.endswith("\ufffd") and not is_last:
            text = text[:written]  # perhaps an incomplete character
        piece, written = text[written:], len(text)
        if options.is_json:
            sys.stdout.write(json.dumps({"token": new[0][-1], "text": piece}) + "\n")
        else:
            sys.stdout.write(printable(piece, is_block=True))
        sys.stdout.flush()

    return write


def _finish(
    options: _Options, rows: Sequence[Sequence[int]], new: Sequence[Sequence[int]], tokenizer: Tokenizer | None
) -> None:
    if options.is_stream:
        sys.stdout.write("" if options.is_json else "\n")
        return
    tokenizers = [tokenizer] * len(options.texts) + [None] * len(options.ids)
    for row, tokens, each in zip(rows, new, tokenizers, strict=True):
        if options.is_json:
            prompt, text = list(row), None if each is None else each.decode(tokens)
            sys.stdout.write(json.dumps({"prompt": prompt, "tokens": tokens, "text": text}) + "\n")
        else:
            begin = [] if options.is_chat and each is not None else row
            sys.stdout.write(printable(_text([*begin, *tokens], each), is_block=True) + "\n")
