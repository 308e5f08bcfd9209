"""The program that this process runs, to be compared over ranks: versions that differ compute other numbers."""

from __future__ import annotations

import functools
import hashlib
import platform
from pathlib import Path

import torch


@functools.cache
def program() -> dict[str, str]:
    """Versions of Python and torch, and a hash of shardwise's source files, which hold its version."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "code of shardwise": _source_hash(Path(__file__).parents[1]),
    }


def _source_hash(package: Path) -> str:
    found = hashlib.blake2b(digest_size=8)
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package)}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()
