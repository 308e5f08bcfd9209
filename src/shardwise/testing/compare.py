"""Comparison of a rank's tensors of a step with the corresponding parts in one process, as sketches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.testing.record import Record, shape_point
from shardwise.testing.sketch import SIZE
from shardwise.testing.tap import GRADIENTS, INPUT, INPUT_GRADIENT, LOSS, OUTPUT, OUTPUT_GRADIENT, VALUE, Point

#: The permitted distance: multiples of the distance between one process and fp64, and units in the last place of the
#: norm.
_NOISE, _ULPS = 30.0, 100.0


@dataclass(frozen=True)
class Finding:
    """The comparison of a rank's tensor with that of one process.

    Attributes:
        tick: Time at which one process computes the tensor, as a count of tensors.
        label: The part of the tensor that this rank has.
        axis: The axes that divide the tensor.
        got: Sketch of this rank's tensor.
        expected: Sketch of the part in one process.
        allowed: The distance that rounding may cause.
        shape: Shape of this rank's tensor.
        biases: Sketches of the biases that an output may have in every row.
    """

    tick: int
    label: str
    axis: str
    got: list[float]
    expected: list[float]
    allowed: float
    shape: tuple[int, ...]
    biases: list[list[float]]

    @property
    def gap(self) -> float:
        """The distance between ``got`` and ``expected``."""
        return distance(self.got, self.expected)

    @property
    def is_right(self) -> bool:
        """Whether the tensor differs by no more than rounding."""
        return self.gap <= self.allowed


def distance(left: Sequence[float], right: Sequence[float]) -> float:
    """The distance of two tensors, from their sketches; infinite if one is not finite."""
    return _norm([a - b for a, b in zip(left, right, strict=True)])


def summed(sketches: Sequence[Sequence[float]]) -> list[float]:
    """The sketch of a sum."""
    return [sum(numbers) for numbers in zip(*sketches, strict=True)]


def _norm(numbers: Sequence[float]) -> float:
    value = math.sqrt(sum(number * number for number in numbers) / len(numbers))
    return math.inf if math.isnan(value) else value


class Comparison:
    """The comparison of a step on one rank.

    If ``context`` ranks divide sequences, gradients of activations inside the model are ``context`` times those of one
    process: each rank's loss has this factor, because gradients of parameters are then averaged over these ranks.

    Args:
        planned: The record under the plan.
        baseline: The record of one process.
        other: The record of one process in another precision, if the model can be converted.
        context: Ranks along ``cp``.
        num_microbatches: Microbatches of a step.

    Attributes:
        findings: Findings by point. If several modules read the same tensor, the first one's finding is about the sum
            of their gradients, because a plan may add these up before any of the modules returns.
        unseen: Paths of modules whose inputs and outputs could not be compared.
    """

    def __init__(
        self, planned: Record, baseline: Record, other: Record | None, *, context: int, num_microbatches: int
    ) -> None:
        self._planned, self._baseline, self._other, self._context = planned, baseline, other, context
        self.findings: dict[Point, Finding] = {}
        self._members: dict[Point, list[Point]] = {}
        groups: dict[Point, list[Point]] = {}
        for point in baseline.sketches:
            groups.setdefault(planned.siblings.get(point, point), []).append(point)
        skipped = self._not_alike(num_microbatches)
        for first, points in groups.items():
            found = None if first.path in skipped else self._compared(first, points)
            if found is not None:
                self.findings[first] = found
        compared = {point.path for point in self.findings if point.kind in {INPUT, OUTPUT}}
        watched = {point.path for point in planned.shapes if point.kind in {INPUT, OUTPUT}}
        self.unseen = sorted((watched - compared) | {path for path in planned.routed if path in baseline.calls})

    def _not_alike(self, num_microbatches: int) -> set[str]:
        """Modules that the plan calls a different number of times, or from several stages and so in another order."""
        planned, baseline = self._planned.calls, self._baseline.calls
        spread = {path for path in self._planned.spread if baseline.get(path, 0) > num_microbatches}
        return spread | {path for path, count in planned.items() if count != baseline.get(path)}

    def factor(self, point: Point) -> int:
        """The ratio of a gradient to that of one process."""
        is_inside = point.path not in {"", LOSS} and point.kind in {INPUT_GRADIENT, OUTPUT_GRADIENT}
        return self._context if is_inside else 1

    def _compared(self, first: Point, points: Sequence[Point]) -> Finding | None:
        shape = self._planned.shapes.get(shape_point(first))
        got = added(self._planned, points, "")
        if shape is None or (got is None and first.kind not in GRADIENTS):
            return None
        if self._context > 1 and not shape and first.path and first.kind != VALUE:
            return None  # with divided sequences, a scalar inside the model depends on some positions only
        if got is None and first.kind == OUTPUT_GRADIENT and first not in self._planned.hooked:
            return None  # the output needs no gradient here; a missing gradient shows at the module's input
        if first.kind == INPUT and first.path in self._planned.spread and got is not None and not got.any():
            return None  # every stage calls this module, and stages except the first pass zeros
        found = self._nearest(points, shape)
        if found is not None and not found.is_right and len(points) > 1:
            wrong = [point for point in points if (baseline := self._nearest([point], shape)) and not baseline.is_right]
            if 0 < len(wrong) < len(points):
                self._members[first], found = wrong, self._nearest(wrong, shape)
        return found

    def _nearest(self, points: Sequence[Point], shape: Sequence[int]) -> Finding | None:
        """Compare this rank's value with the nearest part of one process's."""
        got = added(self._planned, points, "")
        numbers = [0.0] * SIZE if got is None else got.tolist()
        found = [
            finding
            for label in self._baseline.sketches[points[0]]
            if (finding := self._beside(numbers, tuple(shape), points, label)) is not None
        ]
        # If a tensor is wrong, another part must be clearly nearer than the usual one to count as an explanation.
        nearest = min(found, key=lambda finding: finding.gap, default=None)
        return nearest if nearest is None or nearest.is_right or nearest.gap < found[0].gap / 2 else found[0]

    def _beside(self, got: list[float], shape: tuple[int, ...], points: Sequence[Point], label: str) -> Finding | None:
        baseline, other = self._baseline, self._other
        expected = added(baseline, points, label)
        if expected is None:
            return None
        factor = self.factor(points[0])
        numbers = (factor * expected).tolist()
        allowed = _ULPS * baseline.eps * _norm(numbers)
        in_other = None if other is None else added(other, points, label)
        if in_other is not None and other is not None:
            noise = distance((factor * in_other).tolist(), numbers)
            allowed += _NOISE * noise * min(1.0, baseline.eps / other.eps)
        tick = max(baseline.ticks[point] for point in points)
        biases = baseline.biases.get(points[0], [])
        return Finding(tick, label, baseline.axes.get(label, ""), got, numbers, allowed, shape, biases)

    def members(self, first: Point) -> list[Point]:
        """The points whose sum the finding at ``first`` compares; if only some of them are wrong, these."""
        everyone = [each for each, leader in self._planned.siblings.items() if leader == first]
        return self._members.get(first) or everyone or [first]


def added(record: Record, points: Sequence[Point], label: str) -> Tensor | None:
    """The sketch of the sum of those of several tensors that exist; ``None`` if none exists."""
    sketches = [record.sketches[point][label] for point in points if label in record.sketches.get(point, {})]
    return torch.stack(sketches).sum(0).cpu() if sketches else None
