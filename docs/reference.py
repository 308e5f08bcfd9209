"""Writes docs/reference/*.md, the pages that the site has beside those of the repository (``docs/conf.py`` calls it).

They are made from the code: public names with their docstrings, help texts of the command, the schema of configuration
files; and lists of files. None is kept in the repository.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import shardwise as sw
from shardwise.cli import main as shardwise_command
from shardwise.cli.app import VERBS
from shardwise.train.config.sections import schema

ROOT = Path(__file__).parents[1]

#: Public names by what they are for. A name in no group, or in two, is an error.
GROUPS: dict[str, tuple[str, ...]] = {
    "Set up": (
        "parallelize",
        "ParallelPlan",
        "PrecisionPolicy",
        "OffloadPolicy",
        "RecomputePolicy",
        "ActivationOffloadPolicy",
        "PipelinePolicy",
        "Placements",
        "wrap_by_class",
        "wrap_by_name",
        "wrap_by_size",
        "block",
        "fully_shard",
        "register_fsdp_forward_method",
        "from_pretrained",
        "deferred_init",
        "convert_sync_batchnorm",
        "chunk_cross_entropy",
        "bf16_supported",
        "DataParallel",
        "DistributedSampler",
    ),
    "The trainer, with your own parts, and around your own loop": (
        "train",
        "TrainSpec",
        "Mean",
        "Callback",
        "Run",
        "launch",
    ),
    "Train": (
        "train_step",
        "eval_step",
        "gradient_sync",
        "clip_grad_norm",
        "GradScaler",
        "join",
        "data_parallel_rank",
        "data_parallel_size",
        "check_replicas",
    ),
    "Optimizers and averages": (
        "flat_parameters",
        "optimizer_in_backward",
        "Muon",
        "muon_groups",
        "ExponentialMovingAverage",
        "declare_elementwise",
        "declare_granularity",
    ),
    "Save and load": (
        "save",
        "save_async",
        "finish_save",
        "save_failure",
        "load",
        "newest_checkpoint",
        "full_state_dict",
        "load_full_state_dict",
        "export",
    ),
    "Look inside": (
        "summary",
        "full_parameters",
        "iterate_full_parameters",
        "lerp_parameters",
        "logical_shape",
        "record_collectives",
        "record_pipeline",
        "CollectiveEvent",
        "parity",
    ),
    "Predict": ("dry_run", "DryRun", "trace_model", "TracedModel", "ModelShape"),
    "Generate and score": ("generate", "generate_stream", "score", "Score"),
    "Errors": (
        "ShardwiseError",
        "ConfigError",
        "PlanError",
        "MemoryBudgetError",
        "MeshError",
        "PlacementError",
        "StateError",
        "StorageError",
        "CommError",
        "RankDisagreement",
        "CommTimeout",
        "CheckpointError",
        "NonFiniteError",
    ),
}
#: Public names that have pages of their own, or none.
ELSEWHERE = {"__version__", "models"}
MODULES = ("shardwise.planner", "shardwise.testing")


def write_pages(folder: Path) -> None:
    """Write all pages. A page that has not changed keeps its time, so that Sphinx does not read it again."""
    folder.mkdir(exist_ok=True)
    pages = {
        "api": api(),
        "command": command(),
        "configuration": configuration(),
        "examples": examples(),
        "decisions": listing("Decisions", "One page for each decision, with what else was possible.", "docs/adr"),
        "measurements": listing(
            "Measurements",
            "What was measured, when, on which machine, and the command that repeats it.",
            "bench/results",
            newest_first=True,
        ),
    }
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


def api() -> str:
    """Public names of the package by group, and those of its public modules."""
    named = [name for names in GROUPS.values() for name in names]
    if sorted(named) != sorted(set(sw.__all__) - ELSEWHERE):
        different = sorted(set(named) ^ set(sw.__all__) - ELSEWHERE) or "names that are in two groups"
        raise ValueError(f"GROUPS of docs/reference.py and shardwise.__all__ differ: {different}")
    parts = ["# Python", "Every public name, written `sw.name` after `import shardwise as sw`."]
    for title, names in GROUPS.items():
        parts += [f"## {title}", described("shardwise", names)]
    for module in MODULES:
        names = importlib.import_module(module).__all__
        parts += [f"## {module}", f"Written `from {module} import {names[0]}`.", described(module, names)]
    return "\n\n".join(parts) + "\n"


def described(module: str, names: Iterable[str]) -> str:
    """Directives that show signatures and docstrings."""
    lines = ["```{eval-rst}", f".. currentmodule:: {module}"]
    for name in names:
        value = getattr(importlib.import_module(module), name)
        is_error = isinstance(value, type) and issubclass(value, Exception)
        kind = "exception" if is_error else "class" if isinstance(value, type) else "function"
        lines += ["", f".. auto{kind}:: {name}", *(["   :members:"] if kind == "class" else [])]
    return "\n".join([*lines, "```"])


def help_of(*words: str) -> str:
    """What the command prints for ``--help``."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        shardwise_command([*words, "--help"])
    return out.getvalue().strip()


def verbs() -> Iterator[tuple[str, ...]]:
    """Every verb, and those of a group of verbs."""
    for verb in VERBS:
        listed = help_of(verb).partition("Commands:\n")[2]
        below = re.findall(r"^  ([a-z-]+)  ", listed, re.MULTILINE)
        yield from [(verb, name) for name in below] or [(verb,)]


def command() -> str:
    """The help texts of all verbs."""
    parts = ["# Command line", "What `shardwise VERB --help` prints.", f"```text\n{help_of()}\n```"]
    for words in verbs():
        parts += [f"## {' '.join(words)}", f"```text\n{help_of(*words)}\n```"]
    return "\n\n".join(parts) + "\n"


def configuration() -> str:
    """Sections and keys of configuration files, from their schema."""
    found = schema()
    top = {name: field for name, field in found["properties"].items() if "$ref" not in field}
    words = (
        "The keys of a file for `shardwise train`, in YAML or JSON. `shardwise config-schema` prints them as a JSON"
        " schema, with which editors complete and check; `shardwise validate FILE` prints a file with every key filled"
        " in; `--set section.key=value` overrides one.\n\nThe keys of `parallel` are the fields of `sw.ParallelPlan`:"
        " `None`, `True` and `False` are `null`, `true` and `false` in a file, and a policy is a mapping of its class's"
        " fields ([Python](api.md)), for example `mp_policy: {param_dtype: bf16}`."
    )
    parts = ["# Configuration", words, keys(top)]
    for name, field in found["properties"].items():
        if "$ref" in field:
            section = found["$defs"][field["$ref"].rpartition("/")[2]]
            parts += [f"## {name}", section.get("description", ""), keys(section["properties"])]
            if name == "data":
                parts += ["### A source of `data.mix`", keys(found["$defs"]["MixedSection"]["properties"])]
    return "\n\n".join(filter(None, parts)) + "\n"


def keys(fields: Mapping[str, Any]) -> str:
    """A table of keys, with their defaults and what they are."""
    lines = ["| key | default | what it is |", "|---|---|---|"]
    for name, field in fields.items():
        default = json.dumps(field["default"]) if "default" in field else ""
        words = re.sub(r"([|*_<])", r"\\\1", field.get("description", ""))
        choices = next((each["enum"] for each in (field, *field.get("anyOf", ())) if "enum" in each), ())
        if choices:
            words = f"One of {', '.join(f'`{choice}`' for choice in choices)}. {words}"
        lines.append(f"| `{name}` | {default and f'`{default}`'} | {words} |")
    return "\n".join(lines)


def examples() -> str:
    """Every program of examples/, whole."""
    parts = ["# Examples", "Whole programs, in the folder `examples` of the repository. Each says how it is started."]
    for path in sorted((ROOT / "examples").glob("*.py")):
        shown = f"```{{literalinclude}} /examples/{path.name}\n:language: python\n```"
        parts += [f"({path.stem}-py)=", f"## {path.name}", shown]
    return "\n\n".join(parts) + "\n"


def listing(title: str, words: str, folder: str, *, newest_first: bool = False) -> str:
    """The Markdown files of a folder, in the order of their names."""
    pages = sorted((path.stem for path in (ROOT / folder).glob("*.md")), reverse=newest_first)
    lines = "\n".join(f"/{folder}/{name}" for name in pages)
    return f"# {title}\n\n{words}\n\n```{{toctree}}\n:maxdepth: 1\n\n{lines}\n```\n"
