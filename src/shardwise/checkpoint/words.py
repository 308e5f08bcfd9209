"""How sizes are put into words."""

from __future__ import annotations


def size(num_bytes: int) -> str:
    """A number of bytes for people: ``512 B``, ``1.5 MB``."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
