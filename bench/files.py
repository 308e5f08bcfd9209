"""Names of result files."""

from __future__ import annotations

from pathlib import Path


def free_stem(folder: Path, stem: str) -> str:
    """``stem``, or with the first number behind it under which no file of results is there."""
    found, number = stem, 1
    while any(folder.glob(f"{found}.*")):
        number += 1
        found = f"{stem}-{number}"
    return found
