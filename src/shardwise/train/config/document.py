"""YAML files, and JSON as a part of YAML, as plain values with the line of each key.

An unquoted YAML scalar is kept both as a value and as its text, so that the declared type of a field decides what
``no``, ``010`` or ``1:30`` mean: for a text field the text, for a number or a switch an error. Scalars follow the core
schema: ``true`` and ``false`` are switches, ``1e-5`` is a number, ``010`` and ``1:30`` are text. Tags, several
documents, duplicate keys, deep nesting and excessive aliases are refused.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shardwise.spec.errors import ConfigError
from shardwise.spec.run_files import CONFIG
from shardwise.spec.text import printable

MAX_BYTES = 1 << 20
MAX_DEPTH = 24
MAX_VALUES = 20_000

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_SPECIAL = {"": None, "~": None, "null": None, "true": True, "false": False, ".nan": float("nan")}
_SPECIAL |= {f"{sign}.inf": float(f"{sign}inf") for sign in ("", "+", "-")}
_SPECIAL |= {form(word): value for word, value in _SPECIAL.items() for form in (str.title, str.upper)}
_SPECIAL |= {".NaN": float("nan")}

Key = tuple[str, ...]


class Problem(Exception):  # noqa: N818  collected into one ConfigError; callers never see it
    """One mistake, with its place in a file."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}")
        self.where, self.message = where, message


@dataclass(slots=True)
class Document:
    """The values of a file."""

    values: Any  # the plain value; a mapping if the file has any keys
    #: ``file:line`` by path: the line of the key, or of the value if it has no key
    where: dict[Key, str] = field(default_factory=dict)
    texts: dict[Key, str] = field(default_factory=dict)  # the text of unquoted scalars, by path

    def merge(self, over: Document) -> None:
        """Merge ``over`` into these values: mappings key by key, everything else is replaced."""
        self.values = _merge_values(self.values, over.values)
        self.where |= over.where
        self.texts = {path: text for path, text in self.texts.items() if path not in over.where} | over.texts


def _merge_values(base: Any, over: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return base | {key: _merge_values(base[key], value) if key in base else value for key, value in over.items()}


def read_document(path: Path, *, takes_toml: bool = False) -> Document:
    """Read a YAML or JSON file whose values are a mapping; with ``takes_toml`` also a TOML file of another project."""
    is_toml = path.suffix.lower() == ".toml"
    if is_toml and not takes_toml:
        raise ConfigError(
            f"{path} is TOML; a configuration is YAML or JSON.\n"
            "  Write it as YAML: a table [optimizer] becomes 'optimizer:' with its keys indented below, 'lr: 0.1' each."
            f"\n  One of torchtitan: shardwise convert {path} --out run.yaml"
        )
    try:
        text = _read_text(path)
        document = Document(tomllib.loads(text)) if is_toml else parse_yaml(text, str(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}.\n  Correct the file.") from None
    except (FileNotFoundError, IsADirectoryError):
        kind = f"is a folder without a {CONFIG}, not a run's" if path.is_dir() else "does not exist"
        raise ConfigError(
            f"{path} {kind}.\n  Name a YAML or JSON file, or a run's folder; `shardwise config-schema` lists the keys."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.\n  Check the path and its permissions.") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text.\n  Save the file as UTF-8.") from None
    except Problem as problem:
        raise ConfigError(f"{problem}\n  Correct the file.") from None
    if document.values is None:
        document.values = {}
    if not isinstance(document.values, dict):
        kind = "a list" if isinstance(document.values, list) else "a text"  # the text itself may be a secret
        raise ConfigError(f"{path}: expected sections (a mapping), got {kind}.\n  Correct the file.")
    return document


def _read_text(path: Path) -> str:
    data = path.read_bytes()
    if len(data) > MAX_BYTES:
        raise Problem(str(path), f"{len(data):,} bytes; a configuration has at most {MAX_BYTES:,}")
    return data.decode("utf-8")


def parse_yaml(text: str, file: str) -> Document:
    """Parse a YAML text."""
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except RecursionError:
        raise Problem(f"{file}:1", f"nested more than {MAX_DEPTH} levels deep") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        reason = " ".join(part for part in (error.context, error.problem) if part)
        raise Problem(f"{file}:{line}", f"not valid YAML: {reason}") from None
    except yaml.YAMLError as error:
        raise Problem(f"{file}:1", f"not valid YAML: {str(error).splitlines()[0]}") from None
    document = Document(None)
    if node is not None:
        document.values = _value(node, (), document, file)
    return document


_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}


def _value(node: Any, path: Key, document: Document, file: str) -> Any:
    """Return the value of a node, expanding aliases; ``document`` records the places and texts of all values below."""
    here = _place(file, node)
    document.where.setdefault(path, here)
    if len(document.where) > MAX_VALUES:
        raise Problem(here, f"more than {MAX_VALUES:,} values once aliases are expanded")
    if len(path) > MAX_DEPTH:
        raise Problem(here, f"nested more than {MAX_DEPTH} levels deep")
    if node.tag not in _PLAIN_TAGS:
        raise Problem(here, f"tags such as {node.tag!r} are not allowed in a configuration")
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*path, str(index)), document, file) for index, item in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        return {
            _key(key, path, document, file): _value(item, (*path, key.value), document, file)
            for key, item in node.value
        }
    if node.style:
        return node.value
    document.texts[path] = node.value
    return plain_scalar(node.value)


def _key(node: Any, path: Key, document: Document, file: str) -> str:
    """Return the key of an entry in the mapping at ``path``, and record its place."""
    here = _place(file, node)
    if not isinstance(node, yaml.ScalarNode):
        raise Problem(here, "a key must be plain text")
    if node.value == "<<":
        raise Problem(here, "merge keys (<<) are not supported; use extends: to build on another file")
    if first := document.where.get((*path, node.value)):
        raise Problem(here, f"duplicate key {node.value!r}, first given at {first}")
    document.where[*path, node.value] = here
    return node.value


def _place(file: str, node: Any) -> str:
    return f"{file}:{node.start_mark.line + 1}"


def plain_scalar(text: str) -> Any:
    """Return the value of an unquoted YAML scalar."""
    if text in _SPECIAL:
        return _SPECIAL[text]
    if len(text) <= 64 and _INT.match(text):
        return int(text.replace("_", ""))
    return float(text) if len(text) <= 64 and _FLOAT.match(text) else text


#: By project: the number of marks that a file needs at least, and top-level keys that our configurations never have.
MARKS: Mapping[str, tuple[int, Collection[str]]] = {
    "Accelerate": (1, {"distributed_type", "compute_environment", "fsdp_config", "deepspeed_config"}),
    "DeepSpeed": (
        1,
        {
            *("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "bf16", "fp16"),
            *("gradient_clipping", "gradient_accumulation_steps", "zero_allow_untested_optimizer"),
        },
    ),
    "torchtitan": (
        2,
        {"job", "training", "parallelism", "lr_scheduler", "activation_checkpoint", "metrics", "profiling", "float8"},
    ),
}


def kind_of(values: Mapping[str, Any]) -> str | None:
    """Return the project whose configuration has these keys; ``None`` if it is ours or unknown."""
    return next((kind for kind, (least, marks) in MARKS.items() if len(marks & values.keys()) >= least), None)


def check_is_ours(path: Path, values: Mapping[str, Any]) -> None:
    """Refuse a configuration of another project, and the configuration of an ``sw.Run``."""
    if kind := kind_of(values):
        raise ConfigError(
            f"{printable(path)} is a configuration of {kind}, not of shardwise.\n"
            f"  Convert it: shardwise convert {printable(path)} --out run.yaml"
        )
    if path.name == CONFIG and "config" in values:
        raise ConfigError(
            f"{printable(path.parent)} is of a loop with sw.Run, which no verb starts.\n"
            "  Start its program again: it continues the run."
        )
