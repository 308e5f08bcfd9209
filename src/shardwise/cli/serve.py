"""``serve``: answer requests of OpenAI's API with a trained model."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.output import show
from shardwise.cli.trained_model import check_packages, run_with_model
from shardwise.spec.errors import ConfigError

if TYPE_CHECKING:
    from shardwise.launch.world import World
    from shardwise.train.data.tokenizer import Tokenizer
    from shardwise.train.load import TrainedModel

#: Environment variable with the key that clients must send.
_API_KEY = "SHARDWISE_API_KEY"
#: Seconds that the processes have to exit, after the time for running answers.
_ENDING_S = 15.0


@dataclass(frozen=True, slots=True)
class _Options:
    """The parsed arguments."""

    host: str
    port: int
    name: str
    max_rows: int
    max_waiting: int
    max_length: int | None
    grace_s: float
    chat_template: Path | None
    overrides: list[str]
    is_averaged: bool


def serve(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="A run's folder or URL, a checkpoint's, or a Hugging Face folder.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 accepts other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    name: Annotated[str | None, typer.Option(help="The model's name in requests; by default the folder's.")] = None,
    max_rows: Annotated[int, typer.Option(help="Largest number of prompts that are continued at a time.", min=1)] = 32,
    max_waiting: Annotated[
        int, typer.Option(help="Largest number of prompts that wait; further ones get 429.", min=1)
    ] = 128,
    max_length: Annotated[
        int | None, typer.Option(help="Positions that a prompt and its answer may take; by default the model's.", min=2)
    ] = None,
    grace: Annotated[
        float, typer.Option(help="Seconds that answers under way have when the server ends.", min=0)
    ] = 30.0,
    chat_template: Annotated[
        Path | None, typer.Option(help="File with a chat template, in place of the tokenizer's.")
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Processes; by default as many as tp and pp need.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="parallel.field=value, repeatable.")] = None,
    average: Annotated[bool, typer.Option("--average", help="Use the averaged weights (train.ema_decay).")] = False,
) -> None:
    """Answer OpenAI's requests (/v1/completions, /v1/chat/completions) with a trained model, streamed or at once.

    The model is that of a run, of a checkpoint, or of a Hugging Face folder. It runs in one process, or with --set
    parallel.tp=2 or parallel.pp=2 in several, which this command starts. New prompts join the running ones at the next
    token. The server listens on the loopback address unless --host names another. If SHARDWISE_API_KEY is set in the
    environment, clients must send that key. After SIGTERM or Ctrl-C the server ends when the answers under way are
    complete, or after --grace seconds.

    Examples:

      shardwise serve runs/demo

      shardwise serve models/llama --set parallel.tp=2 --port 8080 --name llama

      curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"model": "demo", "prompt": "def
    "}'
    """
    from shardwise.launch.stop_request import CATCHES_STOPS
    from shardwise.train.load import model_name

    check_packages("serve", "starlette", "uvicorn")
    limits = (max_rows, max_waiting, max_length, grace)
    options = _Options(host, port, name or model_name(path), *limits, chat_template, overrides or [], average)
    run_with_model(
        context,
        path,
        options.overrides,
        nproc,
        is_averaged=average,
        check=lambda trained, count: _check(options, trained, count),
        work=lambda trained, world: _serve(options, trained, world),
        env={CATCHES_STOPS: "1"},
        grace_s=grace + _ENDING_S,
        stop_text=f"no more requests are taken, and those under way have {grace:g} s",
    )


def _check(options: _Options, trained: TrainedModel, count: int) -> None:
    """Check, before any process starts, everything that can be checked then."""
    from shardwise.serve.server import bind

    resolved = trained.resolve(options.overrides, count)
    trained.check_continues(resolved)
    _check_length(options, resolved.positions)
    section = resolved.config.parallel
    if section.tp * section.pp != count:
        raise ConfigError(
            f"{count} processes hold {count // (section.tp * section.pp)} copies of the model under tp={section.tp} and"
            f" pp={section.pp}, and a server feeds one.\n"
            f"  Set parallel.tp and parallel.pp so that their product is {count}, or start a server for each copy."
        )
    _tokenizer(options, trained)
    bind(options.host, options.port).close()


def _tokenizer(options: _Options, trained: TrainedModel) -> Tokenizer:
    from shardwise.train.data.tokenizer import FolderTokenizer

    tokenizer, template = trained.tokenizer(), trained.read_template(options.chat_template)
    if template is not None and not isinstance(tokenizer, FolderTokenizer):
        raise ConfigError(
            "--chat-template: the model's tokens are bytes, and a template needs a Hugging Face folder's tokenizer.\n"
            "  Leave it out, and ask for completions."
        )
    if isinstance(tokenizer, FolderTokenizer) and (template or tokenizer.hf_tokenizer.chat_template):
        try:  # in the main thread the template's limits of time and memory apply
            tokenizer.encode_chat([{"role": "user", "content": "a"}], template)
        except (MemoryError, TimeoutError) as error:
            raise ConfigError(
                f"the chat template: of one letter it makes no text: {str(error) or 'it takes over 1 GiB'}.\n"
                "  Give another with --chat-template FILE."
            ) from None
        except Exception:  # noqa: BLE001, S110 - the template may require other roles; requests then get its error
            pass
    return tokenizer


def _check_length(options: _Options, positions: int | None) -> None:
    if options.max_length is not None and positions is not None and options.max_length > positions:
        raise ConfigError(
            f"--max-length {options.max_length}: the model has {positions} positions.\n"
            f"  Set it to {positions} or less, or leave it out."
        )


def _serve(options: _Options, trained: TrainedModel, world: World) -> int:
    from shardwise.generation.continuous import ContinuousBatcher
    from shardwise.launch.stop_request import StopRequest
    from shardwise.serve.server import bind, is_loopback, serve

    resolved = trained.resolve(options.overrides, world.size, world.ranks_per_machine)
    _check_length(options, resolved.positions)
    is_first = world.rank == 0
    with StopRequest() as stop:
        sock = bind(options.host, options.port) if is_first else None
        tokenizer = _tokenizer(options, trained) if is_first else None
        with trained.loaded(resolved, world, is_averaged=options.is_averaged) as model:
            if sock is None or tokenizer is None:
                ContinuousBatcher(model).run(None)
                return 0
            api_key = os.environ.get(_API_KEY) or None
            if api_key is None and not is_loopback(options.host):
                sys.stderr.write(
                    f"shardwise: anyone who reaches {options.host} can use the model; set {_API_KEY} to ask for a key\n"
                )
            processes = f", {world.size} processes" if world.size > 1 else ""
            serve(
                model,
                tokenizer,
                sock,
                stop,
                name=options.name,
                host=options.host,
                max_rows=options.max_rows,
                max_waiting=options.max_waiting,
                max_length=options.max_length,
                grace_s=options.grace_s,
                chat_template=trained.read_template(options.chat_template),
                api_key=api_key,
                say=lambda address: show(f"serving {options.name} at {address}{processes}; Ctrl-C ends it"),
            )
    return 0
