"""``compare``: our engine and torch's own in turns, on the same model and data."""

from __future__ import annotations

import datetime as dt
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.file import check_writable, write
from shardwise.cli.show import show
from shardwise.cli.train import num_processes
from shardwise.spec.errors import ConfigError
from shardwise.train.compare.variant import split
from shardwise.train.text import printable

if TYPE_CHECKING:
    from shardwise.train.compare.result import Result

_HELP = """Time engines in turns, A B C A B C, and print medians, per-round ratios and memory.

Cases: host (48 tiny layers: what hooks and launches cost), compute (arithmetic), wide (communication); all three where
neither --case nor CONFIG is given. CONFIG gives the model and the data of a run configuration instead.

The strategy data_parallel is one process with a replica (and a thread) for each of the --nproc ranks, and gets the
batches of all of them in one.

Peers: single, torch-ddp, torch-fsdp1, torch-fsdp2, torch-fsdp2-noreshard, torch-zero1; and with the extra
shardwise[peers] installed deepspeed-1, deepspeed-2, deepspeed-3 (deepspeed: all three).

Examples:

  shardwise compare --case wide --peers torch-ddp,torch-fsdp2,deepspeed

  shardwise compare --case host --strategies zero3,zero3+flat,zero3+reshard_after_forward=false

  shardwise compare --case compute --strategies ddp,data_parallel --peers torch-ddp

  shardwise compare run.yaml --strategies ddp,zero1,zero3 --rounds 8 --json result.json
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("compare", help=_HELP)(compare)


def compare(  # noqa: PLR0917  typer calls it by name
    config: Annotated[Path | None, typer.Argument(help="Run configuration that gives model and data.")] = None,
    case: Annotated[str | None, typer.Option(metavar="[host|compute|wide]", help="One case, or several: a,b.")] = None,
    strategies: Annotated[
        str, typer.Option(metavar="a,b", help="Strategies of ours; NAME+flat, NAME+FIELD=VALUE of the plan.")
    ] = "zero3",
    peers: Annotated[
        str, typer.Option(metavar="a,b", help="Engines to compare with.")
    ] = "single,torch-ddp,torch-fsdp1,torch-fsdp2",
    nproc: Annotated[int | None, typer.Option(help="Ranks; by default one per GPU, or 2 on CPU.")] = None,
    rounds: Annotated[int, typer.Option(help="Turns of every engine.")] = 5,
    steps: Annotated[int | None, typer.Option(help="Steps per turn; by default what suits the case.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result; of several cases, a list of results.")
    ] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="Write the tables as Markdown.")] = None,
) -> None:
    """Compare."""
    from shardwise.launch.world import read_world
    from shardwise.train.compare.request import make_requests

    world = read_world()
    if world.source != "alone":
        raise ConfigError(
            f"compare starts its own processes, but {world.source} has started this one as one of {world.size}.\n"
            "  Call it once, without a launcher, with --nproc."
        )
    requests = make_requests(
        cases=_names(case),
        config=config,
        strategies=_names(strategies),
        peers=_names(peers),
        num_ranks=num_processes(nproc),
        rounds=rounds,
        steps=steps,
    )
    for path in (json_file, markdown_file):
        check_writable(path)

    from shardwise.train.compare.run import run
    from shardwise.train.compare.table import markdown

    results = []
    for request in requests:
        results.append(run(request))
        _print(results[-1])
        # After each case, so that what was measured is not lost with what comes after it.
        if json_file is not None:
            found: list[dict[str, Any]] = [result.as_dict() for result in results]
            write(json_file, json.dumps(found[0] if len(requests) == 1 else found, indent=1) + "\n")
        if markdown_file is not None:
            date = dt.datetime.now(tz=dt.UTC).date().isoformat()
            write(markdown_file, markdown(results, date=date, command=_command()))


def _print(result: Result) -> None:
    from shardwise.train.compare import table

    if not sys.stdout.isatty():
        show(table.text(result) + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for title, grid in ((str(result.request.case), table.engines(result)), ("", table.comparisons(result))):
        shown = Table(title=printable(title) or None, title_justify="left", title_style="bold")
        for place, name in enumerate(grid.header):
            shown.add_column(name, justify="right" if place else "left")
        for row in grid.rows:
            shown.add_row(*row)
        console.print(shown)
    for note in table.notes(result):
        console.print(note, highlight=False, markup=False)


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in split(text or "", ",") if name.strip()]


def _command() -> str:
    return shlex.join(["shardwise", *sys.argv[1:]])
