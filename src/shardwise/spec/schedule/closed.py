"""Bubbles in closed form, counted peaks of stored microbatches, measured steps and drawings of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from shardwise.spec.schedule.actions import Action, Kind, Schedule
from shardwise.spec.schedule.builders import SCHEDULES
from shardwise.spec.schedule.simulate import Durations, Span, Timing, without_delays


def bubble(schedule: str, pp: int, num_microbatches: int, num_virtual_stages: int, times: Durations) -> Fraction | None:
    """Idle time over ideal time of a step (``Timing.bubble``); ``None`` where there is no closed form.

    With ``p`` ranks, ``m`` microbatches, ``v`` stages per rank, and times F, I and W of a forward, an input gradient
    and the weights' gradients of one stage:

    ====================  =====================================================  ================================
    schedule              bubble                                                 holds for
    ====================  =====================================================  ================================
    ``gpipe``             (p-1) (F+I+W + 2c) / (m (F+I+W))                       c: time of communication
    ``1f1b``              (p-1) / m                                              c = 0, as all that follow
    ``interleaved-1f1b``  (p-1) / (v m)
    ``zb-h1``             ((p-1)(F+I) - (min(m,p)-1) min(F,I,W)) / (m (F+I+W))   in the paper m >= p, W <= F, I:
                                                                                 (p-1) (F+I-W) / (m (F+I+W))
    ``zb-v``              max(p-1, 2 (2p-1-m)) / (6m)                            F = I = W
    ====================  =====================================================  ================================

    GPipe, 1F1B: rank 0 waits while a microbatch passes through the p-1 later stages and its gradient comes back: a
    forward and a backward of each of these stages. Interleaved stages are shorter by the factor v.

    ZB-H1: the gradient comes back without waiting for weights' gradients, in (p-1)(F+I). At the end rank 0 has no
    delayed work, and receives the last gradients one by one. Each of the min(m,p)-1 gradients before the last lets rank
    0 compute something while it waits, for the shortest of F, I and W. (Found by simulation; tests compare it.)

    ZB-V: rank p-1 begins p-1 units late, and no rank is idle afterwards (:func:`inner_bubble`). No schedule in which
    the ranks start together can be better.
    """
    p, m = pp, num_microbatches
    forward, backward_input, weight = (
        Fraction(t) for t in (times.forward, times.backward_input, times.backward_weight)
    )
    whole = forward + backward_input + weight
    if schedule == "gpipe":
        return Fraction(p - 1, m) * (1 + 2 * Fraction(times.communication) / whole)
    if times.communication:
        return None
    if schedule == "zb-v":
        is_even = forward == backward_input == weight
        return Fraction(max(p - 1, 2 * (2 * p - 1 - m)), 6 * m) if is_even else None
    if schedule == "zb-h1":
        caught_up = (min(m, p) - 1) * min(forward, backward_input, weight)
        return ((p - 1) * (forward + backward_input) - caught_up) / (m * whole)
    return Fraction(p - 1, num_virtual_stages * m)


def inner_bubble(
    schedule: str, pp: int, num_microbatches: int, num_virtual_stages: int, times: Durations
) -> Fraction | None:
    """Idle time between a rank's first and last computation (``Timing.inner_bubble``), over ideal time.

    ZB-V: max(0, 2p-1-m) / (3m) for F = I = W. With 2p-1 microbatches or more, which fill both sides of the V, no unit
    of time is idle; each missing microbatch leaves a gap of one unit on each side. Other schedules: the same as
    :func:`bubble`, because rank 0 is the first to begin and the last to end; for ZB-H1 only if W <= F, I.
    """
    if schedule == "zb-v":
        is_even = not times.communication and times.backward_weight == times.forward == times.backward_input
        return Fraction(max(0, 2 * pp - 1 - num_microbatches), 3 * num_microbatches) if is_even else None
    if schedule == "zb-h1" and times.backward_weight > min(times.forward, times.backward_input):
        return None
    return bubble(schedule, pp, num_microbatches, num_virtual_stages, times)


class StoredPairs(NamedTuple):
    """Peak number of stored (microbatch, stage) pairs.

    Attributes:
        activations: Pairs between the forward and the input's gradient, with everything that autograd saved.
        in_flight: Pairs between the forward and the weights' gradients. After the input's gradient only the inputs of
            the layers and the gradients of their outputs are stored.
    """

    activations: int
    in_flight: int


def stored_pairs(actions: Sequence[Action], stage: int | None = None) -> StoredPairs:
    """Count the stored pairs of a rank with these actions, of all its stages or of one, for any schedule."""
    activations = in_flight = 0
    most = StoredPairs(0, 0)
    is_split = any(action.kind is Kind.BACKWARD_WEIGHT for action in actions)
    for action in actions:
        if stage is not None and action.stage != stage:
            continue
        is_forward = action.kind is Kind.FORWARD
        activations += is_forward - action.kind.gives_input_gradient
        in_flight += is_forward - (action.kind is (Kind.BACKWARD_WEIGHT if is_split else Kind.BACKWARD))
        most = StoredPairs(max(most.activations, activations), max(most.in_flight, in_flight))
    return most


# -- measured steps, and drawings with a row per rank and a column per unit of time

#: Number of columns of a measured step's drawing.
_COLUMNS = 60


@dataclass(frozen=True)
class Measured:
    """A measured step of a pipeline.

    Attributes:
        schedule: The schedule.
        timing: Computations of each rank, from the arrival of their inputs to their ends.
    """

    schedule: Schedule
    timing: Timing

    @property
    def bubble(self) -> float:
        """Idle time over ideal time, the longest compute time of a rank."""
        return float(self.timing.bubble)

    @property
    def undelayed_bubble(self) -> float:
        """The bubble of a simulated step with the measured durations, without delays between computations."""
        return float(without_delays(self.schedule, self.timing).bubble)

    @property
    def durations(self) -> Durations:
        """Median durations of one stage and microbatch; each part of a full backward gets half of it."""
        kinds = [Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT]
        if self.schedule.is_split:
            return Durations(*(self._median(kind) for kind in kinds))
        half = self._median(Kind.BACKWARD) / 2
        return Durations(self._median(Kind.FORWARD), half, half)

    @property
    def closed_bubble(self) -> float | None:
        """The closed form of the bubble for these durations; ``None`` if there is none, as for evaluation."""
        s = self.schedule
        if s.name not in SCHEDULES:
            return None
        times = self.durations if s.name == "zb-h1" else Durations()
        found = bubble(s.name, s.num_ranks, s.num_microbatches, s.num_virtual_stages, times)
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
    """Make a ``Measured`` from the start and end of every computation of each rank, in order, in microseconds."""
    timing = tuple(
        tuple(Span(start, end, action) for (start, end), action in zip(found, schedule.computations(rank), strict=True))
        for rank, found in enumerate(spans)
    )
    return Measured(schedule, Timing(timing, Fraction(1, 1_000_000)))


def _coarse(timing: Timing, columns: int) -> Timing:
    """The timing rounded to about ``columns`` units of time, with at least one unit for every computation."""
    last = max(spans[-1].end for spans in timing.spans)
    width = max(-(-last // columns), 1)
    drawn = []
    for spans in timing.spans:
        column, row = 0, []
        for start, end, action in spans:
            begin = max(column, round(start / width))
            column = max(begin + 1, round(end / width))
            row.append(Span(begin, column, action))
        drawn.append(tuple(row))
    return Timing(tuple(drawn), timing.unit * width)


#: The most columns of a drawing.
_MOST_COLUMNS = 5000


def rows(built: Schedule, timing: Timing) -> list[str]:
    """One line per rank, such as ``rank 0 F0 F1 . B0 B1``; a letter for the stage follows if a rank has several."""
    columns = max(spans[-1].end for spans in timing.spans)
    if columns > _MOST_COLUMNS:
        return [f"(not drawn: {columns} columns of time {fraction_text(timing.unit)})"]
    width = 1 + max(len(_label(built, span.action)) for spans in timing.spans for span in spans)
    return [
        f"rank {rank:<{len(str(built.num_ranks - 1))}} {_row(built, spans, width, columns)}".rstrip()
        for rank, spans in enumerate(timing.spans)
    ]


def _row(built: Schedule, spans: Sequence[Span], width: int, columns: int) -> str:
    cells, column = "", 0
    for start, end, action in spans:
        label = _label(built, action)
        cells += ".".ljust(width) * (start - column)
        cells += (label + "-" * (width * (end - start - 1))).ljust(width * (end - start))
        column = end
    return cells + ".".ljust(width) * (columns - column)


def _label(built: Schedule, action: Action) -> str:
    letter = {"forward": "F", "backward": "B", "backward_input": "B", "backward_weight": "W"}[action.kind]
    which = built.stages(built.ranks[action.stage]).index(action.stage)
    stage = chr(ord("a") + which) if built.num_virtual_stages > 1 else ""
    return f"{letter}{action.microbatch}{stage}"


def fraction_text(value: Fraction) -> str:
    """The value as a fraction or, if that is long, as a decimal number."""
    return str(value) if value.denominator < 1000 else f"{float(value):.6g}"
