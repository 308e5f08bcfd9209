"""Configuration files as trees that remember where every value was written.

YAML and TOML become the same three kinds of :class:`Node`. A plain scalar keeps its text beside its value, so that the
declared type of a field decides what ``no``, ``010`` or ``1:30`` mean, not the file format: for a text field they are
that text, for a number or a switch they are errors.

Plain YAML scalars follow the core schema: ``true``/``false`` are switches, ``1e-5`` is a number, ``010`` and ``1:30``
are text. Tags, several documents, duplicate keys, deep nesting and floods of aliases are refused before anything is
built.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from shardwise.spec.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_DEPTH = 24
MAX_NODES = 20_000

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_SPECIAL = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_SPECIAL |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_SPECIAL |= {f"{sign}.{word}": float(f"{sign}inf") for sign in ("", "+", "-") for word in ("inf", "Inf", "INF")}
_SPECIAL |= {".nan": float("nan"), ".NaN": float("nan"), ".NAN": float("nan")}


class Problem(Exception):  # noqa: N818  collected into one ConfigError, never seen by a caller
    """One thing wrong at one place of a file."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}")


@dataclass(slots=True)
class Node:
    """A value and where it was written.

    Attributes:
        kind: ``map``, ``list`` or ``scalar``.
        where: ``file:line``, or ``--set section.field``.
        value: ``dict[str, Node]``, ``list[Node]`` or the plain value.
        text: How a plain (unquoted) scalar was written; ``None`` for quoted ones, maps and lists.
        keys_at: For maps: where each key was written.
    """

    kind: Literal["map", "list", "scalar"]
    where: str
    value: Any
    text: str | None = None
    keys_at: dict[str, str] = field(default_factory=dict)

    def plain(self) -> Any:
        """The value without positions."""
        if self.kind == "map":
            return {key: node.plain() for key, node in self.value.items()}
        if self.kind == "list":
            return [node.plain() for node in self.value]
        return self.value


def read_tree(path: Path) -> Node:
    """Read one YAML or TOML file.

    Raises:
        ConfigError: The file cannot be read, is too large, or is not a mapping of the format its name says.
    """
    try:
        data = path.read_bytes() if path.is_file() else None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.\n  Check the path and its permissions.") from None
    if data is None:
        kind = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise ConfigError(f"{path} {kind}.\n  Name a YAML or TOML file; `shardwise config-schema` lists its keys.")
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{path} has {len(data):,} bytes; a configuration has at most {MAX_BYTES:,}.\n  Name another file."
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text.\n  Save the file as UTF-8.") from None
    try:
        tree = parse_toml(text, str(path)) if path.suffix == ".toml" else parse_yaml(text, str(path))
    except Problem as problem:
        raise ConfigError(f"{problem}\n  Correct the file.") from None
    if tree.kind != "map":
        if tree.kind == "scalar" and tree.value is None:
            return Node("map", f"{path}:1", {})
        raise ConfigError(f"{tree.where}: expected sections (a mapping), got {_noun(tree)}.\n  Correct the file.")
    return tree


def parse_yaml(text: str, file: str, *, where: str | None = None) -> Node:
    """The tree of a YAML text; ``where`` replaces every position (values given by ``--set``)."""
    try:
        _check_events(text, file)
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        reason = " ".join(part for part in (error.context, error.problem) if part)
        raise Problem(where or f"{file}:{line}", f"not valid YAML: {reason}") from None
    except yaml.YAMLError as error:
        raise Problem(where or f"{file}:1", f"not valid YAML: {str(error).splitlines()[0]}") from None
    if root is None:
        return Node("scalar", where or f"{file}:1", None, text="")
    return _Builder(file, where).build(root, depth=0)


def parse_toml(text: str, file: str) -> Node:
    """The tree of a TOML text. Positions are those of the line on which a key was first written."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        found = re.search(r"\(at line (\d+), column \d+\)", str(error))
        line = int(found.group(1)) if found else max(1, len(text.splitlines()))
        reason = re.sub(r"\s*\(at [^)]*\)", "", str(error)) or "nested too deeply"
        first = _first_toml_key(text, line) if "overwrite" in reason else None
        if first is not None:
            reason = f"duplicate key {first[0]!r}, first given at {file}:{first[1]}"
        raise Problem(f"{file}:{line}", f"not valid TOML: {reason}") from None
    return _from_plain(data, _toml_lines(text), file, ())


def merge(base: Node, over: Node) -> Node:
    """``over`` laid on ``base``: mappings key by key, everything else replaced."""
    if base.kind != "map" or over.kind != "map":
        return over
    value = dict(base.value)
    for key, node in over.value.items():
        value[key] = merge(value[key], node) if key in value else node
    return Node("map", over.where, value, keys_at={**base.keys_at, **over.keys_at})


class _Builder:
    """Turns composed YAML nodes into :class:`Node`; counts nodes, so that aliases cannot explode."""

    def __init__(self, file: str, where: str | None) -> None:
        self.file, self.where, self.count = file, where, 0

    def at(self, node: yaml.Node) -> str:
        return self.where or f"{self.file}:{node.start_mark.line + 1}"

    def build(self, node: yaml.Node, depth: int) -> Node:
        self.count += 1
        if depth > MAX_DEPTH:
            raise Problem(self.at(node), f"nested more than {MAX_DEPTH} levels deep")
        if self.count > MAX_NODES:
            raise Problem(self.at(node), f"more than {MAX_NODES:,} values once aliases are expanded")
        if isinstance(node, yaml.ScalarNode):
            if node.style is None:
                return Node("scalar", self.at(node), plain_scalar(node.value), text=node.value)
            return Node("scalar", self.at(node), node.value)
        if isinstance(node, yaml.SequenceNode):
            return Node("list", self.at(node), [self.build(item, depth + 1) for item in node.value])
        assert isinstance(node, yaml.MappingNode)  # YAML has no fourth kind
        return self.mapping(node, depth)

    def mapping(self, node: yaml.MappingNode, depth: int) -> Node:
        value: dict[str, Node] = {}
        keys_at: dict[str, str] = {}
        for key, item in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise Problem(self.at(key), "a key must be plain text")
            if key.value in value:
                raise Problem(self.at(key), f"duplicate key {key.value!r}, first given at {keys_at[key.value]}")
            if key.value == "<<":
                raise Problem(self.at(key), "merge keys (<<) are not supported; use extends: to build on another file")
            keys_at[key.value] = self.at(key)
            value[key.value] = self.build(item, depth + 1)
        return Node("map", self.at(node), value, keys_at=keys_at)


def plain_scalar(text: str) -> Any:
    """The value of an unquoted YAML scalar."""
    if text in _SPECIAL:
        return _SPECIAL[text]
    if len(text) <= 64 and _INT.match(text):
        return int(text.replace("_", ""))
    if len(text) <= 64 and _FLOAT.match(text):
        return float(text)
    return text


def _check_events(text: str, file: str) -> None:
    """Refuse what the composer must not see: tags, several documents, deep nesting, too many aliases."""
    depth = documents = aliases = 0
    for event in yaml.parse(text, Loader=yaml.BaseLoader):
        line = event.start_mark.line + 1 if event.start_mark is not None else 1
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise Problem(f"{file}:{line}", "a second document begins here; a configuration is one document")
        if getattr(event, "tag", None) is not None:
            raise Problem(f"{file}:{line}", f"tags such as {event.tag!r} are not allowed in a configuration")
        if isinstance(event, yaml.AliasEvent):
            aliases += 1
            if aliases > 100:
                raise Problem(f"{file}:{line}", "more than 100 aliases")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise Problem(f"{file}:{line}", f"nested more than {MAX_DEPTH} levels deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _toml_lines(text: str) -> dict[tuple[str, ...], int]:
    """Line by key path, for the ordinary forms ``[table]`` and ``key = value``."""
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\s*([A-Za-z0-9_.\"' -]+?)\s*\]", line):
            table = tuple(part.strip().strip("\"'") for part in header.group(1).split("."))
            lines.setdefault(table, number)
        elif entry := re.match(r"\s*([A-Za-z0-9_.\"'-]+)\s*=", line):
            key = tuple(part.strip().strip("\"'") for part in entry.group(1).split("."))
            lines.setdefault(table + key, number)
    return lines


def _first_toml_key(text: str, line: int) -> tuple[str, int] | None:
    """The key written on ``line`` and the earlier line on which it was written first."""
    lines = text.splitlines()
    first = _toml_lines("\n".join(lines[: line - 1]))
    upto = _toml_lines(
        "\n".join([*[held if held.lstrip().startswith("[") else "" for held in lines[: line - 1]], lines[line - 1]])
    )
    for key, at in upto.items():
        if at == line and key in first:
            return ".".join(key), first[key]
    return None


def _from_plain(value: Any, lines: dict[tuple[str, ...], int], file: str, path: tuple[str, ...]) -> Node:
    where = f"{file}:{next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), 1)}"
    if len(path) > MAX_DEPTH:
        raise Problem(where, f"nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        items = {key: _from_plain(item, lines, file, (*path, key)) for key, item in value.items()}
        keys_at = {key: node.where for key, node in items.items()}
        return Node("map", where, items, keys_at=keys_at)
    if isinstance(value, list):
        return Node("list", where, [_from_plain(item, lines, file, (*path, str(i))) for i, item in enumerate(value)])
    if not isinstance(value, str | int | float | bool):
        value = str(value)  # dates and times: no field takes them, and the message should show what was written
    return Node("scalar", where, value)


def walk(node: Node, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Node]]:
    """Every node with its path, parents first."""
    yield path, node
    if node.kind == "map":
        for key, item in node.value.items():
            yield from walk(item, (*path, key))
    elif node.kind == "list":
        for index, item in enumerate(node.value):
            yield from walk(item, (*path, str(index)))


def _noun(node: Node) -> str:
    return {"map": "a mapping", "list": "a list"}.get(node.kind, repr(node.value))
