"""What ranks compute and when, as text: a row per rank and a column per unit of time."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from shardwise.spec.schedule.action import Action, Schedule
from shardwise.spec.schedule.simulate import Span, Timing

#: A drawing with more columns helps nobody.
_MOST_COLUMNS = 5000


def rows(built: Schedule, timing: Timing) -> list[str]:
    """One line per rank, such as ``rank 0 F0 F1 . B0 B1``; a letter more where a rank has several stages."""
    columns = max(spans[-1].end for spans in timing.spans)
    if columns > _MOST_COLUMNS:
        return [f"(not drawn: {columns} columns of time {shown(timing.unit)})"]
    width = 1 + max(len(_label(built, span.action)) for spans in timing.spans for span in spans)
    return [
        f"rank {rank:<{len(str(built.num_ranks - 1))}} {_row(built, spans, width, columns)}".rstrip()
        for rank, spans in enumerate(timing.spans)
    ]


def _row(built: Schedule, spans: Sequence[Span], width: int, columns: int) -> str:
    cells, place = "", 0
    for start, end, action in spans:
        label = _label(built, action)
        cells += ".".ljust(width) * (start - place)
        cells += (label + "-" * (width * (end - start - 1))).ljust(width * (end - start))
        place = end
    return cells + ".".ljust(width) * (columns - place)


def _label(built: Schedule, action: Action) -> str:
    letter = {"forward": "F", "backward": "B", "backward_input": "B", "backward_weight": "W"}[action.kind]
    which = built.stages(built.ranks[action.stage]).index(action.stage)
    stage = chr(ord("a") + which) if built.num_virtual_stages > 1 else ""
    return f"{letter}{action.microbatch}{stage}"


def shown(value: Fraction) -> str:
    """As a fraction, or, where that is long, in decimals."""
    return str(value) if value.denominator < 1000 else f"{float(value):.6g}"
