"""Verbs that start nothing: ``validate``, ``config-schema``, and ``env``: what this machine and installation offer."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.cli.output import show
from shardwise.spec.text import aligned

_PACKAGES = ("numpy", "pydantic", "safetensors", "transformers", "tensorboard", "wandb")


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.command(
        "validate",
        help="Check a configuration as `train` would, and print it with everything filled in. Starts nothing.\n\n"
        "Example: shardwise validate run.yaml --nproc 4 --set optimizer.lr=3e-4",
    )(validate)
    app.command(
        "config-schema",
        help="Print the JSON schema of configuration files, for editors.\n\n"
        "Example: shardwise config-schema > shardwise.schema.json",
    )(config_schema)
    app.command(
        "env",
        help="Print versions, devices, cores, memory and communication backends.\n\nExample: shardwise env --json",
    )(env)


def validate(
    config: Annotated[Path, typer.Argument(help="YAML or TOML file.")],
    nproc: Annotated[int | None, typer.Option(help="Processes to check for; as `train` would start.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.field=value, repeatable.")] = None,
) -> None:
    """Check a configuration."""
    from shardwise.launch.elastic import num_workers
    from shardwise.train.config import read_config
    from shardwise.train.resolve import resolve
    from shardwise.train.start import rehearse

    count = num_workers(nproc)
    resolved = resolve(read_config(config, overrides or []), count)
    resolved.source.check(resolved.vocab_size)
    rehearse(resolved, count)
    show(resolved.config.to_yaml().rstrip())
    show(f"# {resolved.batch}")
    show(f"# {resolved.mesh}, {resolved.source.num_tokens:,} tokens in {len(resolved.source.files)} files")


def config_schema() -> None:
    """Print the schema."""
    from shardwise.train.config import schema

    show(json.dumps(schema(), indent=2))


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,  # noqa: FBT002  typer's form
) -> None:
    """Print what there is."""
    facts = collect()
    if as_json:
        show(json.dumps(facts, indent=2))
        return
    rows = []
    for name, value in facts.items():
        first, *others = value if isinstance(value, list) else [value]
        rows += [(name, "none" if first is None else str(first)), *(("", str(other)) for other in others)]
    show("\n".join(aligned(rows, words=range(2))))


def collect() -> dict[str, Any]:
    """Facts by name; values are text, numbers, switches or lists of text."""
    import torch
    from torch import distributed

    backends = [
        name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(distributed, f"is_{name}_available", lambda: False)()
    ]
    devices = [
        f"cuda:{i} {p.name}, {p.total_memory / 2**30:.1f} GiB, bf16 {'yes' if p.major >= 8 else 'no'}"
        for i, p in ((i, torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count()))
    ]
    return {
        "shardwise": _version("shardwise"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: _version(name) for name in _PACKAGES},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": _memory(),
        "devices": devices or ["cpu"],
        "backends": ", ".join(backends),
        "bf16": "cuda" if devices and torch.cuda.is_bf16_supported() else _cpu_bf16(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    except (ValueError, OSError, AttributeError):
        return "unknown"


def _cpu_bf16() -> str:
    import torch

    held = torch.backends.cpu.get_cpu_capability()
    return f"cpu computes in it ({held}), by conversion where the processor has no instructions for it"
