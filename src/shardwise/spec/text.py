"""How quantities are put into words."""

from __future__ import annotations


def size(num_bytes: float) -> str:
    """A number of bytes for people: ``512 B``, ``1.5 MB``; powers of 1000, one decimal."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
