"""The first difference of a step, and its kind, from the sketches of all ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.spec.mesh import AXES, Mesh
from shardwise.testing import kind as kinds
from shardwise.testing.compare import Finding, distance, summed
from shardwise.testing.kind import Kind
from shardwise.testing.record import Record
from shardwise.testing.tap import GRADIENT, GRADIENTS, INPUT_GRADIENT, OUTPUT, OUTPUT_GRADIENT, VALUE, Point

#: The findings of the ranks that have a tensor.
Findings = Mapping[int, Finding]


@dataclass(frozen=True)
class Difference:
    """A tensor that differs on some ranks.

    Attributes:
        point: The tensor.
        ranks: The ranks on which it differs.
        axis: The axis that causes the difference; empty if it is not known.
        kind: The kind, if it follows from sketches.
        is_term: The tensors are terms of a sum, which may be computed later.
    """

    point: Point
    ranks: tuple[int, ...]
    axis: str = ""
    kind: Kind | None = None
    is_term: bool = False


class Judge:
    """Judges the differences of a step."""

    def __init__(self, mesh: Mesh, num_microbatches: int) -> None:
        self.mesh = mesh
        self.axes = [axis for axis in reversed(AXES) if mesh.size(axis) > 1]
        self._sizes = {axis: mesh.size(axis) for axis in self.axes}
        self._sizes["the list of microbatches"] = num_microbatches
        if mesh.world_size not in self._sizes.values():
            self._sizes["the world"] = mesh.world_size

    def first(
        self,
        table: Mapping[Point, Findings],
        seen: Mapping[Point, Sequence[int]],
        baseline: Record,
        *,
        scalars: Collection[Point],
        is_exact: bool,
    ) -> Difference | None:
        """The first tensor that is wrong.

        Tensors inside a module whose output (in backward: its input's gradient) is right are not wrong. A scalar output
        does not count, because a loss may hardly depend on the inside. A term of a sum is not wrong if its caller
        continues with right tensors, or if nothing after the term is wrong.

        Args:
            table: The tensors that differ on some rank.
            seen: The times of all compared tensors.
            baseline: The record of one process.
            scalars: The points of ``seen`` whose tensors have one element.
            is_exact: The first difference of bits counts, even if it vanishes in later additions.
        """
        left: list[Difference] = []
        for point in sorted(seen, key=lambda point: (min(seen[point]), point)):
            judged = self.judged(point, table[point]) if point in table else None
            if judged is None and not is_exact and point not in scalars:
                left = [each for each in left if not _is_settled(each, point, baseline)]
            elif judged is not None:
                left.append(judged)
        is_harmless = all(each.is_term and each.point != Point("", OUTPUT) for each in left)
        return None if is_harmless else left[0]

    def judged(self, point: Point, found: Findings) -> Difference | None:
        """The difference of a tensor; ``None`` if it is right on every rank."""
        ranks = tuple(rank for rank, finding in found.items() if not finding.is_right)
        if not ranks:
            return None
        if not any(any(found[rank].got) for rank in ranks):
            return Difference(point, ranks, self._axis(ranks, found), Kind(kinds.MISSING, "zero, or no gradient"))
        factor = _factor(found[ranks[0]])
        if all(_is_multiple(found[rank], factor) for rank in ranks):
            kind, names = kinds.scaled(factor, self._sizes)
            axis = next((name for name in names if name in AXES), "") or self._axis(ranks, found)
            return Difference(point, ranks, axis, kind)
        for axis in self.axes:
            how = self._is_term(ranks, found, axis)
            if how:
                kind = Kind(kinds.MISSING_SUM, f"each rank has its own {how} of one process")
                return Difference(point, ranks, axis, kind, is_term=point.kind not in {VALUE, GRADIENT})
        return self._of_others(point, ranks, found) or Difference(point, ranks, self._axis(ranks, found))

    def _is_term(self, ranks: Sequence[int], found: Findings, axis: str) -> str:
        """A text if the tensors of the ranks of an axis have that of one process as their sum or mean; else empty."""
        hows = {self._how(found, self.mesh.group(axis, rank)) for rank in ranks}
        return hows.pop() if len(hows) == 1 else ""

    def _how(self, found: Findings, group: Sequence[int]) -> str:
        members = [found[each] for each in group if each in found]
        expected, allowed = members[0].expected, 2 * sum(each.allowed for each in members)
        if len(members) < len(group) or any(distance(each.expected, expected) > allowed for each in members):
            return ""
        total = summed([each.got for each in members])
        if distance(total, expected) <= allowed:
            return "term; their sum is that"
        for bias in members[0].biases:
            for times, text in ((len(members) - 1, "with"), (-1, "without")):
                if distance(total, summed([expected, [times * number for number in bias]])) <= allowed:
                    return f"term, {text} the bias; the sum of the terms is that"
        is_mean = distance([number / len(members) for number in total], expected) <= allowed
        return "tensor; their mean is that" if is_mean else ""

    def _of_others(self, point: Point, ranks: tuple[int, ...], found: Findings) -> Difference | None:
        """The difference if a tensor is another rank's, or a sum over an axis whose ranks have different samples."""
        for axis in self.axes:
            if not all(each in found for rank in ranks for each in self.mesh.group(axis, rank)):
                continue
            if all(self._is_of_other(rank, found, axis) for rank in ranks):
                kind = Kind(kinds.SHIFTED, f"each rank has what another rank of {axis} should have")
                return Difference(point, ranks, axis, kind)
            text = f"summed over {axis}, whose ranks have other samples"
            if all(self._is_sum_over(rank, found, None, axis) for rank in ranks):
                return Difference(point, ranks, axis, Kind(kinds.DOUBLED_SUM, text))
            for missing in self.axes:
                if missing != axis and all(self._is_sum_over(rank, found, missing, axis) for rank in ranks):
                    kind = Kind(kinds.MISSING_SUM, f"{text}, and not over {missing}")
                    return Difference(point, ranks, missing, kind)
        return None

    def _is_of_other(self, rank: int, found: Findings, axis: str) -> bool:
        own = found[rank]
        others = (each for each in self.mesh.group(axis, rank) if each != rank)
        return any(distance(own.got, found[each].expected) <= 3 * own.allowed for each in others)

    def _is_sum_over(self, rank: int, found: Findings, missing: str | None, axis: str) -> bool:
        """Whether a tensor (or its sum over ``missing``) is the sum of the right tensors of the ranks of ``axis``."""
        terms = [rank] if missing is None else self.mesh.group(missing, rank)
        if not all(each in found for each in terms):
            return False
        members = [found[each] for each in self.mesh.group(axis, rank)]
        left, right = summed([found[each].got for each in terms]), summed([each.expected for each in members])
        return distance(left, right) <= 3 * sum(each.allowed for each in members)

    def _axis(self, ranks: Sequence[int], found: Findings) -> str:
        """The axis along which some ranks are right and others wrong, or that divides the tensor, or the only one."""
        right = found.keys() - set(ranks)
        for axis in self.axes if right else ():
            if all(any(each in right for each in self.mesh.group(axis, rank)) for rank in ranks):
                return axis
        return found[ranks[0]].axis or (self.axes[0] if len(self.axes) == 1 else "")


def _factor(finding: Finding) -> float:
    square = sum(number * number for number in finding.expected)
    return sum(a * b for a, b in zip(finding.got, finding.expected, strict=True)) / square if square else math.nan


def _is_multiple(finding: Finding, factor: float) -> bool:
    if not math.isfinite(factor) or factor == 0:
        return False
    right = [factor * number for number in finding.expected]
    return distance(finding.got, right) <= 3 * max(1.0, abs(factor)) * finding.allowed


def _is_settled(difference: Difference, right: Point, baseline: Record) -> bool:
    """Whether a right tensor shows that an earlier difference does not affect the result."""
    point = difference.point
    is_alike = (point.kind in GRADIENTS) == (right.kind in GRADIENTS)
    if not is_alike or VALUE in {point.kind, right.kind} or GRADIENT in {point.kind, right.kind}:
        return False
    if right.kind in {OUTPUT, INPUT_GRADIENT}:
        return (right.path, right.call) in set(_callers(point, baseline))
    is_computed = right.kind == OUTPUT_GRADIENT or right in baseline.fresh
    caller = _callers(right, baseline)
    return difference.is_term and is_computed and next(caller, None) in set(_callers(point, baseline))


def _callers(point: Point, baseline: Record) -> Iterator[tuple[str, int]]:
    """The calls that enclose a call, from the innermost to the outermost."""
    at = point.path, point.call
    while (around := baseline.callers.get(at)) is not None:
        yield around
        at = around
