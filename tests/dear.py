"""The dear tests, of which `make test` runs a third: ``python -m tests.dear build/durations.json`` writes ``dear.txt``.

A test is dear that took more than ``LEAST_S`` on two busy cores. Of the dear tests of a file, those that come first by
the hash of their names stay in `make test`, one at the least. The others are marked long: `make test-all` runs them.
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path

LEAST_S, SHARE = 3.0, 3
LIST = Path(__file__).with_name("dear.txt")


def read() -> dict[str, float]:
    """Seconds of each dear test, by its name."""
    lines = (line.split(" ", 1) for line in LIST.read_text("utf-8").splitlines())
    return {name: float(seconds) for seconds, name in lines}


def left_out(names: Iterable[str]) -> set[str]:
    """The dear ones of these tests that `make test` leaves out."""
    files: dict[str, list[str]] = {}
    dear = read()
    for name in names:
        if name in dear:
            files.setdefault(name.partition("::")[0], []).append(name)
    return {
        name
        for found in files.values()
        for name in sorted(found, key=lambda name: zlib.crc32(name.encode()))[math.ceil(len(found) / SHARE) :]
    }


def write(durations: Path) -> None:
    """Bring the list up to date: tests that did not run keep their seconds, those that are gone leave it."""
    found = read() | json.loads(durations.read_text("utf-8"))
    there = {name: Path(name.partition("::")[0]) for name in found}
    kept = {
        name: seconds
        for name, seconds in found.items()
        if seconds > LEAST_S and there[name].exists() and _function(name) in there[name].read_text("utf-8")
    }
    lines = [f"{seconds:.1f} {name}\n" for name, seconds in sorted(kept.items())]
    LIST.write_text("".join(lines), "utf-8")


def _function(name: str) -> str:
    return f"def {name.partition('::')[2].partition('[')[0]}("


if __name__ == "__main__":
    write(Path(sys.argv[1]))
