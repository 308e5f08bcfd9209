"""Axes and lines: round ticks, numbers for people, and fewer points that look the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.spec.text import size


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis: from ``low`` to ``high``, with ticks at round values.

    Attributes:
        low, high: Its ends.
        ticks: Where it is labelled.
        is_log: Equal distances are equal ratios.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies, from 0 at the low end to 1 at the high one."""
        if self.is_log:
            return (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        return (value - self.low) / (self.high - self.low)


def linear(low: float, high: float, *, num_ticks: int = 5, is_tight: bool = False) -> Scale:
    """A linear axis that holds ``low`` to ``high``.

    Args:
        low: The least value.
        high: The greatest.
        num_ticks: About how many ticks.
        is_tight: The axis ends at the values; otherwise at ticks.
    """
    if not high > low:
        margin = abs(low) / 2 or 0.5
        low, high = (low - margin, high + margin) if not is_tight else (low, low + 1)
    step = _round_step((high - low) / max(1, num_ticks - 1))
    if not is_tight:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Scale(low, high, tuple(round(index * step, 12) for index in range(first, last + 1)))


def logarithmic(low: float, high: float) -> Scale:
    """A logarithmic axis that holds ``low`` to ``high``, both above 0."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    step = max(1, (last - first) // 4)
    return Scale(10.0**first, 10.0**last, tuple(10.0**power for power in range(first, last + 1, step)), is_log=True)


def whole(low: int, high: int, *, num_ticks: int = 5) -> Scale:
    """An axis of whole numbers, such as steps, that ends at its values."""
    if high <= low:
        return Scale(low - 0.5, low + 0.5, (float(low),))
    step = max(1, int(_round_step((high - low) / max(1, num_ticks - 1))))
    near = 0.14 * (high - low)
    inner = [float(tick) for tick in range(-(-low // step) * step, high + 1, step)]
    inner = [tick for tick in inner if tick - low > near and high - tick > near]
    return Scale(low, high, (float(low), *inner, float(high)))


def _round_step(raw: float) -> float:
    if not raw > 0 or math.isinf(raw):
        return 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * (1 - 1e-9))


def thin(xs: Sequence[float], ys: Sequence[float | None], *, columns: int) -> list[tuple[float, float] | None]:
    """Points of a line that looks the same ``columns`` pixels wide: the first, least, greatest and last of each.

    ``None`` stands where the line is broken: values that are missing or no finite numbers.
    """
    if not xs:
        return []
    low, high = min(xs), max(xs)
    width = (high - low) / columns or 1.0
    found: list[tuple[float, float] | None] = []
    held: list[tuple[float, float]] = []
    at = -1

    def flush() -> None:
        if len(held) <= 4:
            found.extend(held)
        else:
            keep = {0, len(held) - 1}
            for choose in (min, max):
                keep.add(choose(range(len(held)), key=lambda index: held[index][1]))
            found.extend(held[index] for index in sorted(keep))
        held.clear()

    for x, y in zip(xs, ys, strict=True):
        column = int((x - low) / width)
        if column != at:
            flush()
            at = column
        if y is None or not math.isfinite(y):
            flush()
            if found and found[-1] is not None:
                found.append(None)
        else:
            held.append((x, y))
    flush()
    return found[:-1] if found and found[-1] is None else found


def short(value: float) -> str:
    """A number for an axis: ``0``, ``0.25``, ``1.5k``, ``20M``, ``1e-05``."""
    if value == 0:
        return "0"
    if abs(value) >= 1e15:
        return f"{value:.3g}"
    for factor, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor * 0.9999999:
            return f"{value / factor:.4g}{suffix}"
    return f"{value:.4g}" if abs(value) >= 0.001 else f"{value:.2g}"


def loss(value: float) -> str:
    """A loss: four decimals, unless it has exploded."""
    return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.4g}"


def seconds(value: float) -> str:
    """A time for people: ``251 ms``, ``1.2 s``, ``3.5 min``."""
    if value == 0:
        return "0 s"
    for factor, unit in ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"), (60.0, "min"), (3600.0, "h")):
        limit = {"µs": 1e-3, "ms": 1.0, "s": 120.0, "min": 7200.0}.get(unit, math.inf)
        if abs(value) < limit:
            return f"{value / factor:.3g} {unit}"
    return f"{value:g} s"


#: Units that :func:`tick_texts` knows; several ticks of one axis are written in the same one.
UNITS = {
    "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0,
    "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "GiB": 2.0**30,
}  # fmt: skip


def tick_texts(scale: Scale, shown: Callable[[float], str]) -> list[str]:
    """Texts of an axis' ticks: ``0``, ``500 MB``, ``1000 MB``; all in the unit that the middle of the axis has."""
    _, _, unit = shown(scale.high / 2).rpartition(" ")
    if scale.is_log or unit not in UNITS:
        return [shown(tick) for tick in scale.ticks]
    return [f"{tick / UNITS[unit]:.6g} {unit}" if tick else "0" for tick in scale.ticks]


def time_unit(value: float) -> tuple[float, str]:
    """The unit of an axis of times up to ``value``: its seconds and its name."""
    units = ((12_000.0, "h"), (200.0, "min"), (1.0, "s"), (1e-3, "ms"))
    name = next((name for least, name in units if value >= least), "µs")
    return UNITS[name], name


def num_bytes(value: float) -> str:
    """Bytes for people."""
    return size(value)
