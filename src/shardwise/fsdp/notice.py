"""Words to the user, once per process, from rank 0 alone."""

from __future__ import annotations

import os
import sys

_told: set[str] = set()


def tell_once(text: str) -> None:
    """Print ``text`` on rank 0, unless that has been done before."""
    if text in _told:
        return
    _told.add(text)
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"shardwise: {text}\n")
