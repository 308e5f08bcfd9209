"""Limits for untrusted files: bytes and depth of JSON, memory and time of processing."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

#: The most bytes of a JSON file. Files with large vocabularies have 40 million.
MOST_JSON_BYTES = 1 << 28
_WORK_BYTES, _WORK_S = 1 << 30, 20.0


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not JSON in UTF-8, too large, or nested too deep.
    """
    with path.open("rb") as file:
        raw = file.read(MOST_JSON_BYTES + 1)
    if len(raw) > MOST_JSON_BYTES:
        raise ValueError(f"it has more than {MOST_JSON_BYTES:,} bytes")
    try:
        return json.loads(raw.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Limit a block to 1 GiB of additional memory and 20 s of CPU time; only in the main thread on Linux.

    Raises:
        MemoryError: Raised in the block, when it needs more memory.
        TimeoutError: Raised in the block, when it needs more time.
    """
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        yield
        return
    used_bytes = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    known = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    previous = signal.signal(signal.SIGVTALRM, _end)
    resource.setrlimit(resource.RLIMIT_AS, (min([used_bytes + _WORK_BYTES, *known]), limits[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, _WORK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGVTALRM, previous)


def _end(_number: int, _frame: FrameType | None) -> None:
    raise TimeoutError(f"it takes more than {_WORK_S:.0f} s")
