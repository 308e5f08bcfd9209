"""``python -m bench.compare``, in a checkout: ask, measure case by case, print the tables, write the files."""

from __future__ import annotations

import datetime as dt
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from bench.compare import run, table
from bench.compare.request import make_requests, split
from shardwise.cli.output import check_writable, show, write
from shardwise.launch.elastic import num_workers
from shardwise.launch.exit_codes import show_error
from shardwise.launch.world import read_world
from shardwise.spec.errors import ConfigError, ShardwiseError

_HELP = """Time engines in turns, A B C A B C, and print medians, per-round ratios and memory.

Cases: host (48 tiny layers: what hooks and launches cost), compute (arithmetic), wide (communication); all three where
neither --case nor CONFIG is given. CONFIG gives the model and the data of a run configuration instead.

The strategy data_parallel is one process with a replica (and a thread) for each of the --nproc ranks, and gets the
batches of all of them in one.

Peers: single, torch-ddp, torch-fsdp1, torch-fsdp2, torch-fsdp2-noreshard, torch-zero1; and with the extra
shardwise[peers] installed deepspeed-1, deepspeed-2, deepspeed-3 (deepspeed: all three).

Examples:

  python -m bench.compare --case wide --peers torch-ddp,torch-fsdp2,deepspeed

  python -m bench.compare --case host --strategies zero3,zero3+flat,zero3+reshard_after_forward=false

  python -m bench.compare --case compute --strategies ddp,data_parallel --peers torch-ddp

  python -m bench.compare run.yaml --strategies ddp,zero1,zero3 --rounds 8 --json result.json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare; the exit code. Files are written after each case, so that a failure of a later case loses none."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )
    app.command(help=_HELP)(_compare)
    try:
        app(given, prog_name="python -m bench.compare", obj=given)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except ShardwiseError as error:
        show_error(error)
        return error.exit_code
    return 0


def _compare(  # noqa: PLR0917  typer calls it by name
    context: typer.Context,
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
    world = read_world()
    if world.source != "alone":
        raise ConfigError(
            f"compare starts its own processes, but {world.source} has started this one as one of {world.size}.\n"
            "  Call it once, without a launcher, with --nproc."
        )
    requests = make_requests(
        cases=_names(case or ""),
        config=config,
        strategies=_names(strategies),
        peers=_names(peers),
        num_ranks=num_workers(nproc),
        rounds=rounds,
        steps=steps,
    )
    for path in (json_file, markdown_file):
        check_writable(path)
    command = shlex.join(["python", "-m", "bench.compare", *context.obj])
    results = []
    for request in requests:
        results.append(run.run(request))
        show(table.text(results[-1]) + "\n")
        if json_file is not None:
            found = [result.as_dict() for result in results]
            write(json_file, json.dumps(found[0] if len(requests) == 1 else found, indent=1) + "\n")
        if markdown_file is not None:
            date = dt.datetime.now(tz=dt.UTC).date().isoformat()
            write(markdown_file, table.markdown(results, date=date, command=command))


def _names(text: str) -> list[str]:
    return [name.strip() for name in split(text, ",") if name.strip()]


if __name__ == "__main__":
    sys.exit(main())
