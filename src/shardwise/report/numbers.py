"""Formats losses, times and bytes, chooses the unit of an axis, and thins long curves."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from itertools import groupby

#: Units of times and numbers of bytes.
UNITS = {
    "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0,
    "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2.0**20, "GiB": 2.0**30,
}  # fmt: skip


def finite(value: object) -> float | None:
    """Return a finite number unchanged, and ``None`` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return None
    return value


def numbers_of(mapping: object) -> dict[str, float]:
    """Return the entries of a mapping that are finite numbers other than 0."""
    entries = mapping.items() if isinstance(mapping, dict) else ()
    return {str(name): number for name, value in entries if (number := finite(value))}


def loss(value: float) -> str:
    """Format a loss with four decimals, unless it is huge."""
    return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.4g}"


def percent(value: float) -> str:
    """Format a fraction: ``41.2%``."""
    return f"{100 * value:.1f}%"


def seconds(value: float) -> str:
    """Format a time: ``251 ms``, ``1.2 s``, ``3.5 min``."""
    if value == 0:
        return "0 s"
    limits = {"µs": 1e-3, "ms": 1.0, "s": 120.0, "min": 7200.0, "h": math.inf}
    unit = next((unit for unit, limit in limits.items() if abs(value) < limit), "h")
    return f"{value / UNITS[unit]:.3g} {unit}"


def unit_of(greatest: float, format_value: Callable[[float], str]) -> tuple[float, str]:
    """Return size and name of the unit of an axis that ends at ``greatest``: the unit in which half of it is shown."""
    name = format_value(greatest / 2).rpartition(" ")[2]
    return UNITS.get(name, 1.0), name if name in UNITS else ""


def thin(xs: Sequence[float], ys: Sequence[float | None], *, columns: int) -> list[tuple[float, float] | None]:
    """Thin a line to points that look the same in ``columns`` pixels: the first, smallest, largest and last of each.

    ``None`` marks an interruption by values that are missing or not finite.
    """
    low = min(xs, default=0.0)
    width = (max(xs, default=0.0) - low) / columns or 1.0
    found: list[tuple[float, float] | None] = []
    for (_, is_number), group in groupby(
        zip(xs, map(finite, ys), strict=True), key=lambda point: (int((point[0] - low) / width), point[1] is not None)
    ):
        points = [(x, y) for x, y in group if y is not None]
        if is_number:
            order = sorted(range(len(points)), key=lambda index: points[index][1])
            found += [points[index] for index in sorted({0, len(points) - 1, order[0], order[-1]})]
        elif found and found[-1] is not None:
            found.append(None)
    return found[:-1] if found and found[-1] is None else found
