"""``compare``: our engine and others in turns, on the same model and data. The harness is ``bench/compare``."""

from __future__ import annotations

import importlib
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.launch.elastic import num_workers
from shardwise.spec.errors import ConfigError

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


#: The harness, in a checkout; the verb is not in the list of an installation without it.
_VERB = Path(__file__).parents[3] / "bench" / "compare" / "verb.py"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("compare", help=_HELP, hidden=not _VERB.is_file())(compare)


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

    world = read_world()
    if world.source != "alone":
        raise ConfigError(
            f"compare starts its own processes, but {world.source} has started this one as one of {world.size}.\n"
            "  Call it once, without a launcher, with --nproc."
        )
    _harness().compare(
        cases=case,
        config=config,
        strategies=strategies,
        peers=peers,
        num_ranks=num_workers(nproc),
        rounds=rounds,
        steps=steps,
        json_file=json_file,
        markdown_file=markdown_file,
        command=shlex.join(["shardwise", *sys.argv[1:]]),
    )


def _harness() -> Any:
    """The module ``bench.compare.verb`` of the repository that this package is run from.

    Raises:
        ConfigError: The package is installed without the repository.
    """
    root = _VERB.parents[2]
    if not _VERB.is_file():
        raise ConfigError(
            "compare needs the benchmark harness (bench/), which is in the repository and not in the installed"
            " package.\n  Clone the repository and install it from there: pip install -e '.[peers]'."
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module("bench.compare.verb")
