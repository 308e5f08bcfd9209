"""The verb ``shardwise compare``, once its options are parsed: ask, measure case by case, print, write."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path

from bench.compare import run, table
from bench.compare.request import make_requests, split
from shardwise.cli.output import check_writable, show, write


def compare(
    *,
    cases: str | None,
    config: Path | None,
    strategies: str,
    peers: str,
    num_ranks: int,
    rounds: int,
    steps: int | None,
    json_file: Path | None,
    markdown_file: Path | None,
    command: str,
) -> None:
    """Measure every case and print its tables.

    Files are written after each case, so that a failure of a later case loses nothing that was measured.

    Args:
        cases: Names of cases, ``a,b``; ``None`` for all of them, or for that of ``config``.
        config: A run configuration that gives model and data.
        strategies: Variants of our engine, ``a,b``.
        peers: Names of other engines, ``a,b``.
        num_ranks: Ranks of every engine.
        rounds: Turns of every engine.
        steps: Steps of a turn; ``None`` for the case's own number.
        json_file: Where to write all results as JSON.
        markdown_file: Where to write all tables as Markdown.
        command: The command line, for the Markdown file.

    Raises:
        ConfigError: A mistake in the options; no process has been started.
        ComparisonFailed: A worker failed.
    """
    requests = make_requests(
        cases=_names(cases or ""),
        config=config,
        strategies=_names(strategies),
        peers=_names(peers),
        num_ranks=num_ranks,
        rounds=rounds,
        steps=steps,
    )
    for path in (json_file, markdown_file):
        check_writable(path)
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
