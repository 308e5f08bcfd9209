"""Reads rows of data sets and blocks of text one after the other, and defines the examples that forms make of them.

Nothing is stored in memory or copied. JSON and CSV are parsed here, with size limits and line numbers, because the
parsers of ``datasets`` use unlimited memory, crash at deep nesting, and refuse a column that only later rows have.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from shardwise.spec.errors import ConfigError
from shardwise.spec.text import first_line, printable
from shardwise.train.data.source import Source, check_text, ending
from shardwise.train.data.token_files import DataError


class Example(NamedTuple):
    """An example, made from a row."""

    ids: Any  # token ids
    #: Start and end (exclusive) of the learned ids, in order; empty for texts, in which all ids are learned
    spans: Sequence[tuple[int, int]] = ()


#: A row with its place, such as ``chats.jsonl:3``, for messages.
Placed = tuple[str, Mapping[str, Any]]


class Form(Protocol):
    """The conversion of rows to examples."""

    def encode(self, rows: Sequence[Placed]) -> Sequence[Example]:
        """Convert rows to examples; a DataError names the place of an unusable row."""


def text_of(location: str, row: Mapping[str, Any], column: str) -> str:
    """Return the text in a column of a row."""
    text = row.get(column)
    if not isinstance(text, str):
        raise DataError(
            f"{location} has no text in column {printable(column)}: {printable(type(text).__name__)}.\n"
            "  Correct the row, or name another column: data.column=..., --column of `shardwise data tokenize`."
        )
    return text


#: Maximum bytes of a JSON row, of a JSON file that is one list, and of a CSV row.
_ROW_BYTES, _LIST_BYTES, _CSV_BYTES = 1 << 26, 1 << 30, 1 << 23
#: Minimum bytes of a block of text.
_BLOCK_BYTES = 1 << 20
#: Bytes that are searched at a time for the end of a block.
_NEAR_BYTES = 1 << 14
#: Ends of blocks: a line feed before a line that does not begin with a space, so that tokens do not cross blocks.
_CUT = re.compile(rb"\n(?=[!-~\xc3-\xe0\xe4-\xf4]|\xe3[^\x80])")

#: Rows with their places, such as ``chats.jsonl:3``.
Rows = Iterator[tuple[str, Mapping[str, Any]]]


def read_rows(source: Source) -> Rows:
    """Yield the rows of a source, in the order of its files. A row of text is a block, which ``block_text`` reads."""
    readers = {".jsonl": _json, ".json": _json, ".csv": _csv}
    for file, length in zip(source.files, source.lengths, strict=True):
        if source.kind == "text":
            yield from _blocks(file, length)
        else:
            for location, row in readers.get(ending(file), _table)(file):
                if not isinstance(row, dict):
                    raise _unreadable(location, "it is not a JSON object, which a row is")
                yield location, row


def first_row(source: Source) -> Mapping[str, Any]:
    """Return a source's first row, whose keys are the columns."""
    for _, row in read_rows(source):
        return row
    raise DataError(f"{printable(source.name)}: no rows.\n  Name another source.")


def _lines(file: Path, most: int) -> Iterator[tuple[str, bytes]]:
    """Yield the lines of a file with their places; a line of more than ``most`` bytes is split."""
    import fsspec  # pyrefly: ignore[missing-import]

    location = str(file)
    if location.endswith(".zst") and fsspec.utils.infer_compression(location) is None:
        raise DataError(
            f"{printable(location)} is compressed by zstd, which is read by the package zstandard.\n"
            "  Install it: pip install zstandard"
        )
    with _reading_errors(lambda: location):
        opener: Any = fsspec.open(location, "rb", compression="infer")
        with opener as raw:  # readline of fsspec's own files has no size limit
            handle = raw if isinstance(raw, io.BufferedIOBase) else io.BufferedReader(raw)
            for number in itertools.count(1):
                location = f"{file}:{number}"
                if not (line := handle.readline(most + 1)):
                    return
                yield location, line


@contextlib.contextmanager
def _reading_errors(location: Callable[[], object]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001  stores and compressions raise errors of their own classes
        raise _unreadable(str(location()), first_line(error)) from None


def _json(file: Path) -> Rows:
    lines = _lines(file, _ROW_BYTES)
    for location, line in lines:
        if line.lstrip().startswith(b"["):  # the file is one list
            text = bytearray(line)
            while len(text) <= _LIST_BYTES and (more := next(lines, None)):
                text += more[1]
            items = _parse(text, str(file), _LIST_BYTES)
            yield from ((f"{file}: row {number}", item) for number, item in enumerate(items))
            return
        if line.strip():
            yield location, _parse(line, location, _ROW_BYTES)


def _parse(text: bytes | bytearray, location: str, most: int) -> Any:
    if len(text) > most:
        raise _unreadable(location, f"it is longer than {most:,} bytes")
    try:
        value = json.loads(text)
        if b"\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise _unreadable(location, "it is nested too deep") from None
    except UnicodeEncodeError:
        raise _unreadable(location, "it has half a character (\\ud800 to \\udfff without its other half)") from None
    except ValueError as error:
        raise _unreadable(location, f"it is not JSON ({first_line(error)})") from None
    return value


def _csv(file: Path) -> Rows:
    location, num_bytes = str(file), 0

    def texts() -> Iterator[str]:
        nonlocal location, num_bytes
        for at, line in _lines(file, _CSV_BYTES):
            location, num_bytes = at, num_bytes + len(line)
            if num_bytes > _CSV_BYTES:
                raise _unreadable(location, f"its row is longer than {_CSV_BYTES:,} bytes")
            yield line.decode("utf-8-sig")

    csv.field_size_limit(_CSV_BYTES)
    try:
        for row in csv.DictReader(texts()):
            yield location, row
            num_bytes = 0
    except (csv.Error, UnicodeDecodeError) as error:
        raise _unreadable(location, f"it is not CSV ({error})") from None


def _table(file: Path) -> Rows:
    """Yield rows of Parquet and Arrow files. ``datasets.load_dataset`` is avoided because it contacts a server."""
    try:
        import pyarrow as pa  # pyrefly: ignore[missing-import]
        from pyarrow.parquet import ParquetFile  # pyrefly: ignore[missing-import]
    except ImportError:
        raise ConfigError(f"{printable(file)} is read by the pyarrow package.\n  Install shardwise[hf].") from None
    try:
        with file.open("rb") as handle:
            if ending(file) == ".parquet":
                batches = ParquetFile(handle).iter_batches(1000)
            elif handle.read(6) == b"ARROW1":
                found = pa.ipc.open_file(handle)
                batches = map(found.get_batch, range(found.num_record_batches))
            else:
                handle.seek(0)
                batches = pa.ipc.open_stream(handle)
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
            yield from ((f"{file}: row {number}", row) for number, row in enumerate(rows))
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file, f"it is not {ending(file)[1:]} ({first_line(error)})") from None


def _unreadable(location: str | Path, why: str) -> DataError:
    return DataError(f"{printable(location)} cannot be read: {why}.\n  Correct it, or leave it out.")


def _blocks(file: Path, length: int) -> Rows:
    with _reading_errors(lambda: file), file.open("rb") as handle:
        begin = 0
        while begin < length:
            end = begin + _BLOCK_BYTES
            while end < length:
                handle.seek(end)
                if found := _CUT.search(handle.read(_NEAR_BYTES)):
                    end += found.start() + 1
                    break
                end += _NEAR_BYTES - 2  # in case a match crosses the boundary
            end = min(end, length)
            yield str(file), {"file": file, "begin": begin, "end": end, "is_last": end == length}
            begin = end


def block_text(block: Mapping[str, Any]) -> str:
    """Return the text of a block, without a character that is cut at the end of the source."""
    file = block["file"]
    with _reading_errors(lambda: file), file.open("rb") as handle:
        handle.seek(block["begin"])
        raw = handle.read(block["end"] - block["begin"])
    try:
        return codecs.utf_8_decode(raw, "strict", False)[0]  # noqa: FBT003
    except UnicodeDecodeError:
        check_text(file, block["end"])  # raises an error with the line
        raise
