"""YAML and TOML files as plain values that remember where each was written.

An unquoted YAML scalar keeps its text beside its value, so that the declared type of a field decides what ``no``,
``010`` or ``1:30`` mean: for a text field they are that text, for a number or a switch they are errors. Scalars follow
the core schema: ``true`` and ``false`` are switches, ``1e-5`` is a number, ``010`` and ``1:30`` are text. Tags, several
documents, duplicate keys, deep nesting and floods of aliases are refused.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shardwise.spec.errors import ConfigError

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


class Problem(Exception):  # noqa: N818  collected into one ConfigError, never seen by a caller
    """One mistake at one place of a file."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}")
        self.where, self.message = where, message


@dataclass(slots=True)
class Document:
    """The values of a file.

    Attributes:
        values: The plain value; a mapping where the file has any keys.
        where: ``file:line`` of every key, and of every item of a list, by path.
        texts: How unquoted scalars were written, by path.
    """

    values: Any
    where: dict[Key, str] = field(default_factory=dict)
    texts: dict[Key, str] = field(default_factory=dict)

    def lay(self, over: Document) -> None:
        """Lay ``over`` on these values: mappings key by key, everything else is replaced."""
        self.values = _merged(self.values, over.values)
        self.where |= over.where
        self.texts |= over.texts


def _merged(base: Any, over: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return base | {key: _merged(base[key], value) if key in base else value for key, value in over.items()}


def read_document(path: Path) -> Document:
    """Read one YAML or TOML file, whose values are a mapping.

    Raises:
        ConfigError: The file cannot be read, is too large, or is not a mapping of the format that its name says.
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
        document = parse_toml(text, str(path)) if path.suffix == ".toml" else parse_yaml(text, str(path))
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text.\n  Save the file as UTF-8.") from None
    except Problem as problem:
        raise ConfigError(f"{problem}\n  Correct the file.") from None
    if document.values is None:
        document.values = {}
    if not isinstance(document.values, dict):
        raise ConfigError(f"{path}: expected sections (a mapping), got {document.values!r}.\n  Correct the file.")
    return document


def parse_yaml(text: str, file: str) -> Document:
    """The values of a YAML text.

    Raises:
        Problem: The text is not one plain YAML document.
    """
    builder = _YamlBuilder(file)
    try:
        return builder.build(yaml.parse(text, Loader=yaml.BaseLoader))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        reason = " ".join(part for part in (error.context, error.problem) if part)
        raise Problem(f"{file}:{line}", f"not valid YAML: {reason}") from None
    except yaml.YAMLError as error:
        raise Problem(f"{file}:1", f"not valid YAML: {str(error).splitlines()[0]}") from None


class _YamlBuilder:
    """Builds values from the parser's events in one pass, and counts them, so that aliases cannot explode."""

    def __init__(self, file: str) -> None:
        self.file, self.count, self.num_aliases = file, 0, 0
        self.anchors: dict[str, tuple[Any, int]] = {}  # value, and how many values it is made of
        self.document = Document(None)

    def build(self, events: Iterator[yaml.Event]) -> Document:
        self.events = events
        num_documents = 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                num_documents += 1
                if num_documents > 1:
                    raise self.problem(event, "a second document begins here; a configuration is one document")
                self.document.values = self.value(next(events), ())
        return self.document

    def problem(self, event: yaml.Event, message: str) -> Problem:
        return Problem(self.place(event), message)

    def place(self, event: Any) -> str:
        return f"{self.file}:{event.start_mark.line + 1}"

    def value(self, event: Any, path: Key) -> Any:
        before, self.count = self.count, self.count + 1
        if len(path) > MAX_DEPTH:
            raise self.problem(event, f"nested more than {MAX_DEPTH} levels deep")
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event)
        if event.tag is not None:
            raise self.problem(event, f"tags such as {event.tag!r} are not allowed in a configuration")
        if isinstance(event, yaml.ScalarEvent):
            value = event.value if event.style else plain_scalar(event.value)
            if not event.style:
                self.document.texts[path] = event.value
        elif isinstance(event, yaml.SequenceStartEvent):
            value = self.sequence(path)
        else:
            value = self.mapping(path)
        if event.anchor is not None:
            self.anchors[event.anchor] = value, self.count - before
        return value

    def alias(self, event: yaml.AliasEvent) -> Any:
        self.num_aliases += 1
        if self.num_aliases > 100:
            raise self.problem(event, "more than 100 aliases")
        if event.anchor not in self.anchors:
            raise self.problem(event, f"alias *{event.anchor} stands for nothing that ends before it")
        value, count = self.anchors[event.anchor]
        self.count += count
        if self.count > MAX_VALUES:
            raise self.problem(event, f"more than {MAX_VALUES:,} values once aliases are expanded")
        return copy.deepcopy(value)

    def sequence(self, path: Key) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            here = (*path, str(len(items)))
            self.document.where[here] = self.place(event)
            items.append(self.value(event, here))
        return items

    def mapping(self, path: Key) -> dict[str, Any]:
        held: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                raise self.problem(event, "a key must be plain text")
            here = (*path, event.value)
            if event.value in held:
                first = self.document.where[here]
                raise self.problem(event, f"duplicate key {event.value!r}, first given at {first}")
            if event.value == "<<":
                raise self.problem(event, "merge keys (<<) are not supported; use extends: to build on another file")
            self.document.where[here] = self.place(event)
            held[event.value] = self.value(next(self.events), here)
        return held


def plain_scalar(text: str) -> Any:
    """The value of an unquoted YAML scalar."""
    if text in _SPECIAL:
        return _SPECIAL[text]
    if len(text) <= 64 and _INT.match(text):
        return int(text.replace("_", ""))
    return float(text) if len(text) <= 64 and _FLOAT.match(text) else text


def parse_toml(text: str, file: str) -> Document:
    """The values of a TOML text. A key's place is the line on which it was first written.

    Raises:
        Problem: The text is not TOML.
    """
    keys = list(_toml_keys(text))
    first: dict[Key, int] = {}
    for line, path in keys:
        first.setdefault(path, line)
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        found = re.search(r"\(at line (\d+), column \d+\)", str(error))
        line = int(found.group(1)) if found else max(1, len(text.splitlines()))
        reason = re.sub(r"\s*\(at [^)]*\)", "", str(error)) or "nested too deeply"
        twice = [path for at, path in keys if at == line and first[path] < line]
        if twice and "overwrite" in reason:
            reason = f"duplicate key {'.'.join(twice[0])!r}, first given at {file}:{first[twice[0]]}"
        raise Problem(f"{file}:{line}", f"not valid TOML: {reason}") from None
    return Document(_plain(values), {path: f"{file}:{line}" for path, line in first.items()})


def _toml_keys(text: str) -> Iterator[tuple[int, Key]]:
    """Line and path of every key and table in the ordinary forms ``[table]`` and ``key = value``."""
    table: Key = ()
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[\s*([A-Za-z0-9_.\"' -]+?)\s*\]", line)
        entry = re.match(r"\s*([A-Za-z0-9_.\"'-]+)\s*=", line)
        if found := header or entry:
            path = tuple(part.strip().strip("\"'") for part in found.group(1).split("."))
            table = path if header else table
            yield number, path if header else table + path


def _plain(value: Any) -> Any:
    """Dates and times as text: no field takes them, and an error should show what was written."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool) else str(value)
