"""When the computations of a step really ran; and drawings: a row per rank and a column per unit of time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from shardwise.spec.schedule import closed
from shardwise.spec.schedule.actions import Action, Kind, Schedule
from shardwise.spec.schedule.builders import SCHEDULES
from shardwise.spec.schedule.simulate import Durations, Span, Timing, without_delays

#: The columns of a drawing.
_COLUMNS = 60


@dataclass(frozen=True)
class Measured:
    """One step of a pipeline, as it ran.

    Attributes:
        schedule: The schedule.
        timing: When each rank computed: from the arrival of what a computation takes to its end.
    """

    schedule: Schedule
    timing: Timing

    @property
    def bubble(self) -> float:
        """Idle time over ideal time, the longest compute time of a rank."""
        return float(self.timing.bubble)

    @property
    def undelayed_bubble(self) -> float:
        """The bubble of these durations without any delay between computations."""
        return float(without_delays(self.schedule, self.timing).bubble)

    @property
    def durations(self) -> Durations:
        """Median durations of one stage and microbatch; each part of a whole backward gets half of it."""
        kinds = [Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT]
        if self.schedule.is_split:
            return Durations(*(self._median(kind) for kind in kinds))
        half = self._median(Kind.BACKWARD) / 2
        return Durations(self._median(Kind.FORWARD), half, half)

    @property
    def closed_bubble(self) -> float | None:
        """The closed form of the bubble for these durations; ``None`` where there is none, as for evaluation."""
        s = self.schedule
        if s.name not in SCHEDULES:
            return None
        times = self.durations if s.name == "zb-h1" else Durations()
        found = closed.bubble(s.name, s.num_ranks, s.num_microbatches, s.num_virtual_stages, times)
        return None if found is None else float(found)

    def _median(self, kind: Kind) -> Fraction:
        found = [end - start for spans in self.timing.spans for start, end, action in spans if action.kind is kind]
        return max(Fraction(statistics.median(found)), Fraction(1)) * self.timing.unit

    def __str__(self) -> str:
        expected = "" if self.closed_bubble is None else f" (closed form {self.closed_bubble:.1%})"
        whole, ideal = (f"{float(time) * 1e3:.1f} ms" for time in (self.timing.makespan, self.timing.ideal))
        share = float(self.timing.bubble_share)
        below = (
            f"time {whole}, of which a rank computes {ideal} at most: bubble {share:.1%} of the step,"
            f" {self.bubble:.1%} of ideal time{expected}"
        )
        return "\n".join([*rows(self.schedule, _coarse(self.timing, _COLUMNS)), below])


def measured(schedule: Schedule, spans: Sequence[Sequence[tuple[int, int]]]) -> Measured:
    """From the begin and end of every computation of each rank, in order, in microseconds."""
    timing = tuple(
        tuple(Span(start, end, action) for (start, end), action in zip(found, schedule.computations(rank), strict=True))
        for rank, found in enumerate(spans)
    )
    return Measured(schedule, Timing(timing, Fraction(1, 1_000_000)))


def _coarse(timing: Timing, columns: int) -> Timing:
    """The same with as many units of time: every computation has one at least."""
    last = max(spans[-1].end for spans in timing.spans)
    width = max(-(-last // columns), 1)
    drawn = []
    for spans in timing.spans:
        place, row = 0, []
        for start, end, action in spans:
            begin = max(place, round(start / width))
            place = max(begin + 1, round(end / width))
            row.append(Span(begin, place, action))
        drawn.append(tuple(row))
    return Timing(tuple(drawn), timing.unit * width)


#: The most columns of a drawing.
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
