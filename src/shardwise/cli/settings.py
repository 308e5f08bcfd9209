"""Commands that start nothing: ``validate``, ``config-schema``, and ``env``, which prints versions and devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.output import show
from shardwise.spec.text import aligned


def validate(
    config: Annotated[Path, typer.Argument(help="YAML or JSON file.")],
    spec: Annotated[
        str | None, typer.Option(metavar="FILE", help="Your own model, data, loss, ... (sw.TrainSpec), as of `train`.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(help="Number of processes; by default as many as `train` would start.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.field=value, repeatable.")] = None,
) -> None:
    """Check a configuration as `train` would, and print it with everything filled in. Starts nothing.

    Example: shardwise validate run.yaml --nproc 4 --set optimizer.lr=3e-4
    """
    from shardwise.launch.elastic import num_workers
    from shardwise.train.config.resolve import resolve
    from shardwise.train.launcher import named_config, rehearse

    count = num_workers(nproc)
    resolved = resolve(named_config(config, overrides or [], spec=spec)[0], count)
    resolved.source.check(resolved.vocab_size)
    rehearse(resolved, count)
    show(resolved.to_yaml().rstrip())
    show(f"# {resolved.batch}")
    source = resolved.source
    has = source.amount if source.files else f"data {source.name}"
    show(f"# {resolved.mesh}, {has}")


def config_schema() -> None:
    """Print the JSON schema of configuration files, for editors.

    Example: shardwise config-schema > shardwise.schema.json
    """
    from shardwise.train.config.sections import schema

    show(json.dumps(schema(), indent=2))


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Print versions, devices, cores, memory and communication backends.

    Example: shardwise env --json
    """
    from shardwise.launch.environment import environment

    facts = environment()
    if as_json:
        show(json.dumps(facts, indent=2))
        return
    rows = []
    for name, value in facts.items():
        first, *others = value if isinstance(value, list) else [value]
        rows += [(name, "none" if first is None else str(first)), *(("", str(other)) for other in others)]
    show("\n".join(aligned(rows, words=range(2))))
