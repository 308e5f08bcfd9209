"""Rows of data sets, read one after the other by ``datasets``: JSON lines, parquet, CSV, saved data sets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.spec.errors import ConfigError
from shardwise.spec.text import printable
from shardwise.train.data.source import Source, ending
from shardwise.train.data.token_files import DataError

#: The builder of ``datasets`` that reads files with such an ending.
_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}


def read_records(source: Source) -> Iterator[dict[str, Any]]:
    """The rows of a source, in the order of its files; nothing is kept in memory or copied to a cache.

    Raises:
        ConfigError: The ``datasets`` package is not installed.
        DataError: A file cannot be read.
    """
    try:
        import datasets  # pyrefly: ignore[missing-import]
    except ImportError:
        raise ConfigError(
            f"data.source={printable(source.name)} holds rows of a data set.\n"
            "  Install shardwise[data], which reads them."
        ) from None
    files, builder = [str(file) for file in source.files], _BUILDERS[ending(source.files[0])]
    try:
        yield from datasets.load_dataset(builder, data_files=files, split="train", streaming=True)
    except Exception as error:  # its errors, pyarrow's and pandas' have no common base
        if isinstance(error, (DataError, ConfigError)):
            raise
        reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        raise DataError(
            f"{printable(source.name)} cannot be read as {builder}: {printable(reason[0])}.\n"
            f"  Look at its files, of which there are {len(files):,}; the first is {printable(files[0])}."
        ) from None


def first_row(source: Source) -> dict[str, Any]:
    """A source's first row; its keys are the columns.

    Raises:
        DataError: There are no rows.
    """
    for row in read_records(source):
        return row
    raise DataError(f"{printable(source.name)}: no rows.\n  Name another source.")
