"""Reports of the ranks about their part in a save, and the common error if a part failed. Plain values, for JSON."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.checkpoint.folder import RefusedError
from shardwise.spec.errors import CheckpointError, StorageError
from shardwise.spec.text import size

AFTERWARDS = "\n  Nothing was published; earlier checkpoints are as they were. Remove the cause, then save again."


def report_name(rank: int) -> str:
    """Return the name of the file with the report of a rank's process about its part of a save."""
    return f"report-r{rank:05d}.json"


def name_space(error: OSError, folder: str | Path, needed_bytes: int) -> None:
    """Add to the error of a full disk how many bytes the file needs and how many are free."""
    if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
        return
    with contextlib.suppress(OSError):
        error.strerror = f"{error.strerror} ({size(needed_bytes)} needed, {size(shutil.disk_usage(folder).free)} free)"


def problem_of(error: BaseException) -> dict[str, Any]:
    """Return the report of a rank whose part failed: ``problem`` and ``is_storage``."""
    if isinstance(error, OSError) and error.strerror:
        problem = f"{error.strerror}" + (f": {error.filename}" if error.filename else "")
    elif isinstance(error, CheckpointError | StorageError | ValueError | RefusedError):
        problem = str(error)
    else:
        problem = f"{type(error).__name__}: {error}"
    return {"problem": problem, "is_storage": isinstance(error, OSError)}


def failure_of(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the error for all ranks if some failed, with the name of its class; else ``None``."""
    failed = [(rank, report) for rank, report in enumerate(reports) if "problem" in report]
    if not failed:
        return None
    causes: dict[str, list[str]] = {}
    for rank, report in failed:
        causes.setdefault(str(report["problem"]), []).append(str(rank))
    text = "; ".join(f"rank {', '.join(ranks)}: {cause}" for cause, ranks in causes.items())
    is_storage = all(report["is_storage"] for _, report in failed)
    return {"failed": text + "." + AFTERWARDS, "kind": "StorageError" if is_storage else "CheckpointError"}
