"""metrics.jsonl: one record for each step."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from shardwise.launch.file import replace
from shardwise.spec.errors import StorageError
from shardwise.spec.text import printable
from shardwise.train.record import Record


class MetricsFile:
    """``metrics.jsonl``: one JSON object per line, each line written whole."""

    def __init__(self, path: Path, *, keep_steps: int = 0) -> None:
        """Open the file; of an earlier run, records after step ``keep_steps`` are dropped: they are made again."""
        self.path = path
        with self._refusals():
            kept = [line for line in _lines(path) if _step(line) <= keep_steps]
            replace(path, "".join(f"{line}\n" for line in kept))
            self._file: TextIO = path.open("a", buffering=1)

    def write(self, record: Record) -> None:
        """Append one record."""
        with self._refusals():
            self._file.write(to_line(record))

    def close(self) -> None:
        """Close the file. What could not be written is refused a second time, which is no news."""
        with contextlib.suppress(OSError):
            self._file.close()

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"{printable(self.path)} cannot be written: {error.strerror}.\n  Free space on the disk."
            ) from None


def to_line(record: Record) -> str:
    """A record as its line of the file."""
    values: dict[str, Any] = asdict(record)
    values |= values.pop("values")
    if record.eval_loss is None:
        del values["eval_loss"]
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            values[key] = None  # JSON has no infinity
    return json.dumps(values) + "\n"


def _lines(path: Path) -> list[str]:
    return path.read_text("utf-8", "replace").splitlines() if path.exists() else []


def _step(line: str) -> float:
    """The step of a line; lines cut short by a crash count as after everything."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
