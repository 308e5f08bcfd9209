"""Rows of data sets, read one after the other by ``datasets``: JSON lines, parquet, CSV, saved data sets."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from shardwise.spec.errors import ConfigError
from shardwise.spec.text import first_line, printable
from shardwise.train.data.source import Source, ending
from shardwise.train.data.token_files import DataError

#: The builder of ``datasets`` that reads files with such an ending.
_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
#: The most bytes of a row, by ending; of a JSON file that is one list or object, of all of it.
_MOST_BYTES = {".jsonl": 1 << 26, ".json": 1 << 30, ".csv": 1 << 23}
_MOST_DEPTH = 500
#: What ``datasets`` reads at a time: bytes of JSON, rows of CSV.
_READ_AT_ONCE, _ROWS = 10 << 20, 256
_TEXTS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
#: A field of CSV in quotes, and the quote that ends it, where one does; quotes inside other fields are letters.
_QUOTED = re.compile(rb'(?:^|[,\r])"[^"]*("?)')
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def read_records(source: Source, *, first_only: bool = False) -> Iterator[dict[str, Any]]:
    """The rows of a source, in the order of its files; nothing is kept in memory or copied to a cache.

    Args:
        source: Its files.
        first_only: The caller takes the first row alone; only what is read for that row is checked.

    Raises:
        ConfigError: The ``datasets`` package is not installed.
        DataError: A file cannot be read, or a row is too long or nested too deep.
    """
    try:
        import datasets  # pyrefly: ignore[missing-import]
    except ImportError:
        raise ConfigError(
            f"data.source={printable(source.name)} holds rows of a data set.\n"
            "  Install shardwise[data], which reads them."
        ) from None
    files, kind = [str(file) for file in source.files], ending(source.files[0])
    builder = _BUILDERS[kind]
    options: dict[str, Any] = {"chunksize": _ROWS} if kind == ".csv" else {}
    try:
        for file in files[: 1 if first_only else None] if kind in _MOST_BYTES else []:
            _check_rows(file, kind, _READ_AT_ONCE if first_only else math.inf)
        yield from datasets.load_dataset(builder, data_files=files, split="train", streaming=True, **options)
    except Exception as error:  # its errors, pyarrow's and pandas' have no common base
        if isinstance(error, (DataError, ConfigError)):
            raise
        raise DataError(
            f"{printable(source.name)} cannot be read as {builder}: {first_line(error.__cause__ or error)}.\n"
            f"  Look at its files, of which there are {len(files):,}; the first is {printable(files[0])}."
        ) from None


def _check_rows(file: str, kind: str, most_bytes: float) -> None:
    """Refuse rows at which the reader would crash, or for which it would take memory without bound.

    Args:
        file: May be compressed.
        kind: How its name ends.
        most_bytes: Stop at the end of a row behind so many.

    Raises:
        DataError: A row is too long or nested too deep.
    """
    import fsspec  # pyrefly: ignore[missing-import]

    longest, number, total = _MOST_BYTES[kind], 0, 0
    row_bytes, depth, is_quoted, is_whole = 0, 0, False, None
    held: Any = fsspec.open(file, "rb", compression="infer")
    with held as handle:
        while total <= most_bytes and (line := handle.readline(longest + 1)):
            if is_whole is None and line.strip():  # a list, or an object on several lines, is read at once
                is_whole = kind == ".json" and not line.rstrip().endswith(b"}")
            row_bytes += len(line)
            if kind == ".csv":
                text = (b'"' if is_quoted else b"") + line
                is_quoted = b"" in _QUOTED.findall(text.replace(b'""', b""))
            elif row_bytes <= longest and (is_whole or line.count(b"[") + line.count(b"{") > _MOST_DEPTH):
                for character in _TEXTS.sub(b"", line).translate(None, _NO_BRACKETS):
                    depth += 1 if character in b"[{" else -1
                    if depth > _MOST_DEPTH:
                        break
            if row_bytes > longest or depth > _MOST_DEPTH:
                what = f"longer than {longest:,} bytes" if row_bytes > longest else f"nested over {_MOST_DEPTH} deep"
                advice = "Write the file as JSON lines (.jsonl), a row on each" if is_whole else "Leave the row out"
                raise DataError(f"{printable(file)}: row {number:,} is {what}.\n  {advice}.")
            if not (is_quoted or is_whole):
                total, number, row_bytes, depth = total + row_bytes, number + 1, 0, 0


def first_row(source: Source) -> dict[str, Any]:
    """A source's first row; its keys are the columns.

    Raises:
        DataError: There are no rows.
    """
    for row in read_records(source, first_only=True):
        return row
    raise DataError(f"{printable(source.name)}: no rows.\n  Name another source.")
