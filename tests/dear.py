"""The dear tests, of which `make test` runs a tenth: ``python -m tests.dear build/durations.json`` writes ``dear.txt``.

A test is dear that took more than ``LEAST_S`` on two busy cores. Of the dear tests of a folder `make test` runs every
tenth, at least one, and each week others: in ten weeks all of them. The others are marked long: `make test-all` runs
them. ``SHARDWISE_TEST_WEEK=2969`` repeats the choice of a week, which the head of a run names.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Iterable
from pathlib import Path

LEAST_S, SHARE = 3.0, 10
_WEEK_S = 7 * 24 * 3600
LIST = Path(__file__).with_name("dear.txt")


def read() -> dict[str, float]:
    """Seconds of each dear test, by its name."""
    lines = (line.split(" ", 1) for line in LIST.read_text("utf-8").splitlines())
    return {name: float(seconds) for seconds, name in lines}


def week() -> int:
    """Number of the week, which chooses."""
    return int(os.environ.get("SHARDWISE_TEST_WEEK") or time.time() // _WEEK_S)


def left_out(names: Iterable[str], turn: int) -> set[str]:
    """The dear ones of these tests that `make test` leaves out in a week."""
    folders: dict[str, list[str]] = {}
    dear = read()
    for name in names:
        if name in dear:
            folders.setdefault(name.partition("::")[0].rpartition("/")[0], []).append(name)
    kept: set[str] = set()
    for found in folders.values():
        step = min(SHARE, len(found))
        kept.update(sorted(found, key=lambda name: zlib.crc32(name.encode()))[turn % step :: step])
    return {name for found in folders.values() for name in found} - kept


def write(durations: Path) -> None:
    """Bring the list up to date: tests that did not run keep their seconds, those that are gone leave it."""
    found = read() | json.loads(durations.read_text("utf-8"))
    kept = {name: seconds for name, seconds in found.items() if seconds > LEAST_S and exists(name)}
    lines = [f"{seconds:.1f} {name}\n" for name, seconds in sorted(kept.items())]
    LIST.write_text("".join(lines), "utf-8")


def exists(name: str) -> bool:
    """Whether a file of the tests has a test of this name."""
    path, _, test = name.partition("::")
    return Path(path).exists() and f"def {test.partition('[')[0]}(" in Path(path).read_text("utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
