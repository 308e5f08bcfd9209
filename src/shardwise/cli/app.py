"""Verbs, and what every verb shares: how errors are shown and which code the process leaves with."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from shardwise.cli.output import CONFIG_ENDINGS
from shardwise.launch.exit_codes import show_error
from shardwise.spec.errors import ShardwiseError

#: Verb (or group of verbs) and the module that has it. Modules import torch inside their functions only.
VERBS = {
    "train": "shardwise.cli.train",
    "launch": "shardwise.cli.launch",
    "calibrate": "shardwise.cli.calibrate",
    "parity": "shardwise.cli.parity",
    "dry-run": "shardwise.cli.dry_run",
    "generate": "shardwise.cli.generate",
    "eval": "shardwise.cli.eval",
    "serve": "shardwise.cli.serve",
    "plan": "shardwise.cli.plan",
    "schedule": "shardwise.cli.schedule",
    "report": "shardwise.cli.report",
    "convert": "shardwise.cli.convert",
    "validate": "shardwise.cli.settings",
    "config-schema": "shardwise.cli.settings",
    "data": "shardwise.cli.files",
    "checkpoint": "shardwise.cli.files",
    "export": "shardwise.cli.files",
    "env": "shardwise.cli.settings",
}


def build() -> typer.Typer:
    """The whole application. A module registers its verbs by a function ``register(app)``."""
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
    for module in dict.fromkeys(VERBS.values()):
        register: Callable[[typer.Typer], Any] = importlib.import_module(module).register
        register(app)
    for command in app.registered_commands:  # its first sentence in the list, whole
        command.short_help = " ".join((command.help or "").split()).partition(". ")[0].removesuffix(".") + "."
    return app


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. Errors of ours become one block of text and their exit code; others keep their traceback."""
    given = fill_in_resume(sys.argv[1:] if arguments is None else arguments)
    try:
        result = build()(given, prog_name="shardwise", standalone_mode=True, obj=given)
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

    A following word is its value unless it begins with ``-`` or ends as a configuration file does.
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
        help="Print the version and leave.",
        is_eager=True,  # before typer asks for a verb
        callback=lambda value: _show_version() if value else None,
    ),
) -> None:
    del version


def _show_version() -> None:
    from importlib.metadata import version as installed

    typer.echo(f"shardwise {installed('shardwise')}")
    raise typer.Exit
