"""What was predicted beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwise.report.run import Run, finite
from shardwise.report.scale import num_bytes, seconds


def rows(run: Run) -> list[tuple[str, str, str, str]]:
    """Quantity, predicted, measured, and measured over predicted; of all that has both, or one of them."""
    found = []
    for name, predicted, measured, shown in _pairs(run):
        if predicted is None and measured is None:
            continue
        ratio = f"{measured / predicted:.2f}" if predicted and measured is not None else "n/a"
        found.append((name, _text(predicted, shown), _text(measured, shown), ratio))
    return found


def _pairs(run: Run) -> list[tuple[str, float | None, float | None, Callable[[float], str]]]:
    def predicted(key: str) -> float | None:
        return first(key, run.summary, run.plan)

    return [
        ("peak memory of tensors", predicted("predicted_peak_memory_bytes"), peak_bytes(run), num_bytes),
        ("time of a step", predicted("predicted_step_time_s"), step_time(run), seconds),
        ("bytes that rank 0 sends in a step", finite(run.predicted.get("sent_bytes")),
         run.median("collective_bytes"), num_bytes),
    ]  # fmt: skip


def peak_bytes(run: Run) -> float | None:
    """Measured bytes of tensors at the peak, of the fullest rank."""
    return first("peak_memory_bytes", run.summary) or run.last("peak_memory_bytes")


def step_time(run: Run) -> float | None:
    """Measured seconds of a step: the mean after the first ones."""
    return first("step_time_s", run.summary) or run.mean("step_time_s")


def first(key: str, *places: Mapping[str, Any]) -> float | None:
    """The first number of that name."""
    return next((value for place in places if (value := finite(place.get(key))) is not None), None)


def _text(value: float | None, shown: Callable[[float], str]) -> str:
    return "n/a" if value is None else shown(value)
