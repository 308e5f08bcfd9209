"""The commands, and the handling of errors and exit codes that they share."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import typer

from shardwise import __version__
from shardwise.cli.output import CONFIG_ENDINGS
from shardwise.launch.exit_codes import show_error
from shardwise.spec.errors import ShardwiseError

#: Functions of the commands by name; some are groups of commands. Modules import torch inside their functions only.
VERBS = {
    "train": "train:train",
    "launch": "launch:launch",
    "calibrate": "calibrate:calibrate",
    "parity": "parity:parity",
    "dry-run": "dry_run:dry_run",
    "generate": "generate:generate",
    "eval": "eval:evaluate",
    "serve": "serve:serve",
    "plan": "plan:plan",
    "schedule": "schedule:schedule",
    "report": "report:report",
    "convert": "convert:convert",
    "validate": "settings:validate",
    "config-schema": "settings:config_schema",
    "env": "settings:env",
    "export": "files:export",
    "data": "files:data",
    "checkpoint": "files:checkpoint",
}


def build() -> typer.Typer:
    """Return the whole application. The help of a command is its function's docstring."""
    app = typer.Typer(
        name="shardwise",
        help="Train any PyTorch model on many devices: DDP, ZeRO and FSDP from one engine.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )
    app.callback()(_version_option)
    for verb, module_name in VERBS.items():
        module, _, name = module_name.partition(":")
        command: Any = getattr(importlib.import_module(f"shardwise.cli.{module}"), name)
        if isinstance(command, typer.Typer):
            for each in command.registered_commands:
                each.short_help = _summary(each.callback)
            app.add_typer(command, name=verb)
        else:
            app.command(verb, short_help=_summary(command))(command)
    return app


def _summary(verb: object) -> str:
    """Return the first sentence of a command's docstring, uncut, for lists of commands."""
    words = verb.__doc__ or "Python's -OO takes help away"
    return " ".join(words.split()).partition(". ")[0].removesuffix(".") + "."


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Errors of shardwise become a block of text and their exit code; others keep their traceback."""
    words = fill_in_resume(sys.argv[1:] if arguments is None else arguments)
    try:
        result = build()(words, prog_name="shardwise", standalone_mode=True, obj=words)
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
            return 1
        return end.code or 0
    except ShardwiseError as error:
        show_error(error)
        return error.exit_code
    except BrokenPipeError:
        return 74
    return result if isinstance(result, int) else 0


def fill_in_resume(arguments: Sequence[str]) -> list[str]:
    """Give a bare ``--resume`` its value ``latest``.

    The following word is its value, unless that begins with ``-`` or is the name of a configuration file.
    """
    result: list[str] = []
    for index, argument in enumerate(arguments):
        if argument == "--":
            return [*result, *arguments[index:]]
        result.append(argument)
        if argument == "--resume":
            following = arguments[index + 1] if index + 1 < len(arguments) else "-"
            if following.startswith("-") or following.lower().endswith(CONFIG_ENDINGS) or not following:
                result[-1] = "--resume=latest"
    return result


def _version_option(
    version: bool = typer.Option(  # noqa: FBT001  typer's form
        False,  # noqa: FBT003
        "--version",
        help="Print the version and exit.",
        is_eager=True,  # before typer requires a command
        callback=lambda value: _show_version() if value else None,
    ),
) -> None:
    del version


def _show_version() -> None:
    typer.echo(f"shardwise {__version__}")
    raise typer.Exit
