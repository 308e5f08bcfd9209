"""Search for the first module, in the order of a step, whose tensors under a plan differ from one process.

A step is run under the plan and in one process (``record``). Every rank compares its tensors, as sketches, with the
corresponding parts in one process (``compare``). Ranks then exchange the sketches that differ, and each computes the
same verdict (``judge``). The permitted distance is measured: a multiple of the distance between the step in one process
and the same step in fp64, plus 100 units in the last place.

A tensor that differs need not be wrong. For example, a layer that is cut by its inputs returns a term of a sum, which
its caller completes. So differences inside a module whose output is right are ignored, and likewise in backward. The
first remaining difference is examined in a second run of the step, which keeps the full tensors (``kind``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm.base import Comm
from shardwise.comm.control import all_gather_json
from shardwise.comm.dtype import as_real
from shardwise.spec.mesh import AXES, Mesh
from shardwise.spec.plan import ParallelPlan
from shardwise.testing import kind as kinds
from shardwise.testing.compare import Comparison, Finding, distance, summed
from shardwise.testing.judge import Difference, Findings, Judge
from shardwise.testing.kind import Kind
from shardwise.testing.one_process import Job
from shardwise.testing.record import Parallelize, Record, record_one_process, record_plan
from shardwise.testing.sketch import parts
from shardwise.testing.tap import GRADIENT, INPUT, LOSS, OUTPUT_GRADIENT, VALUE, Point

#: Most tensors that a rank reports to the others.
_MAX_NAMED = 300


@dataclass(frozen=True)
class Location:
    """The first difference between a plan and one process.

    Attributes:
        module: Path of the module that computes the tensor; empty for the model, ``(loss)`` for the code that computes
            the loss.
        tensor: Description of the tensor of this module that differs.
        kind: ``scaled``, ``missing sum``, ``doubled sum``, ``permuted``, ``shifted``, ``rounding``, ``missing``,
            ``not finite`` or ``other``.
        text: A sentence about the kind.
        ranks: The ranks on which the tensor differs.
        axis: The mesh axis that causes the difference; empty if it is not known.
        difference: The largest absolute difference of an element, on any rank.
        largest: The largest absolute value of an element in one process.
        step: The step, from 0.
        microbatch: The microbatch, from 0; ``None`` for parameters.
        num_right: Number of earlier tensors that were compared and are right, over all ranks.
        unseen: Modules whose tensors were not compared, because the plan runs them differently.
    """

    module: str
    tensor: str
    kind: str
    text: str
    ranks: tuple[int, ...]
    axis: str
    difference: float
    largest: float
    step: int
    microbatch: int | None
    num_right: int
    unseen: tuple[str, ...] = ()

    def __str__(self) -> str:
        """A report of four lines."""
        at = f"step {self.step}" + (f", microbatch {self.microbatch}" if self.microbatch is not None else "")
        axis = f" over {self.axis}" if self.axis else ""
        return (
            f"first difference: {_shown(self.module)}, {self.tensor} ({at})\n"
            f"  {self.kind}{axis}: {self.text}\n"
            f"  on rank{'s' if len(self.ranks) > 1 else ''} {_listed(self.ranks)}: {self.difference:.3g} at the most,"
            f" where one process has up to {self.largest:.3g}\n"
            f"  {self.num_right} tensors before it are right{_unseen_text(self.unseen)}"
        )


@dataclass(frozen=True)
class NoDifference:
    """The result if every compared tensor equals that of one process, up to rounding.

    Attributes:
        num_right: Number of compared tensors, over all ranks and steps.
        steps: Number of steps.
        unseen: See :class:`Location`.
    """

    num_right: int
    steps: int
    unseen: tuple[str, ...] = ()

    def __str__(self) -> str:
        """A report of one line."""
        steps = f"{self.steps} step{'s' if self.steps > 1 else ''}"
        return f"no module differs: {self.num_right} tensors of {steps} are right{_unseen_text(self.unseen)}"


def _shown(module: str) -> str:
    return {"": "the model", LOSS: "the loss"}.get(module, repr(module))


def _unseen_text(unseen: Sequence[str]) -> str:
    return f"; not compared: {_listed(unseen)}" if unseen else ""


def _listed(values: Sequence[object]) -> str:
    more = f" and {len(values) - 8} more" if len(values) > 8 else ""
    return ", ".join(str(value) or "the model" for value in values[:8]) + more


def locate_difference(
    job: Job, plan: ParallelPlan, mesh: Mesh, control: Comm, *, parallelize: Parallelize, is_exact: bool
) -> Location | NoDifference:
    """Find the first difference of a plan from one process, step by step.

    Args:
        job: The training.
        plan: The plan.
        mesh: The plan's mesh.
        control: A Comm over all ranks.
        parallelize: See ``sw.parity``.
        is_exact: If no difference exceeds rounding, find the first difference of a bit.

    Collective:
        Those of training, up to each step, and again for a step that differs. An all-gather of JSON for each step, and
        two more for a step that differs. All ranks must call.
    """
    plan = dataclasses.replace(plan, compile=False)  # torch.compile would trace the hooks on modules
    search = _Search(job, plan, mesh, control, parallelize)
    num_right, unseen = 0, ()
    for step in range(len(job.parts)):
        found = search.step(step, is_exact=is_exact)
        num_right, unseen = num_right + found.num_right, found.unseen
        if isinstance(found, Location):
            return dataclasses.replace(found, num_right=num_right)
    return NoDifference(num_right, len(job.parts), unseen)


class _Search:
    """The search for a difference, on one rank."""

    def __init__(self, job: Job, plan: ParallelPlan, mesh: Mesh, control: Comm, parallelize: Parallelize) -> None:
        self._job, self._plan, self._mesh, self._control, self._parallelize = job, plan, mesh, control, parallelize
        self._rank = control.rank
        self._reader = mesh.data_parallel_rank(self._rank)
        coordinate = mesh.coordinate(self._rank)
        self._at = {axis: (mesh.size(axis), coordinate[axis]) for axis in AXES}
        self._count = len(job.parts[0][0])
        self._judge = Judge(mesh, self._count)

    def step(self, step: int, *, is_exact: bool) -> Location | NoDifference:
        """The first difference of a step."""
        planned = self._under_plan(step)
        baseline = self._in_one_process(step, planned)
        other = self._in_other_precision(step, planned, baseline.eps)
        compared = Comparison(planned, baseline, other, context=self._mesh.cp, num_microbatches=self._count)
        findings = compared.findings
        order = sorted((found.tick, point, math.prod(found.shape) == 1) for point, found in findings.items())
        wrong = [point for _, point, _ in order if not findings[point].is_right][:_MAX_NAMED]
        inexact = [point for _, point, _ in order if findings[point].gap > 0][:1] if is_exact else []
        named = {"wrong": wrong, "inexact": inexact, "count": len(order), "unseen": compared.unseen}
        everyone = all_gather_json(self._control, named)
        unseen = tuple(sorted({path for each in everyone for path in each["unseen"]}))
        nothing = NoDifference(sum(each["count"] for each in everyone), step + 1, unseen)
        points = _union(each["wrong"] for each in everyone)
        is_above_rounding = bool(points)
        if not is_above_rounding:
            points = _union(each["inexact"] for each in everyone)
            findings = {point: dataclasses.replace(found, allowed=0.0) for point, found in findings.items()}
        if not points:
            return nothing
        table, seen, scalars = self._exchange(points, order, findings)
        first = self._judge.first(table, seen, baseline, scalars=scalars, is_exact=not is_above_rounding)
        if first is None:
            return nothing
        located = self._examined(first, table[first.point], step, compared, baseline)
        time = min(seen[first.point])
        before = sum(tick < time for ticks in seen.values() for tick in ticks)
        return dataclasses.replace(located, num_right=before, unseen=unseen)

    # -- the records of a step

    def _under_plan(self, step: int, capture: Sequence[Point] = ()) -> Record:
        return record_plan(self._job, self._plan, step, self._reader, parallelize=self._parallelize, capture=capture)

    def _in_one_process(
        self, step: int, planned: Record, capture: Sequence[Point] = (), dtype: torch.dtype | None = None
    ) -> Record:
        return record_one_process(
            self._job,
            planned,
            step,
            self._reader,
            group_size=self._mesh.dp_shard,
            at=self._at,
            capture=capture,
            dtype=dtype,
        )

    def _in_other_precision(self, step: int, planned: Record, eps: float) -> Record | None:
        """The record in fp64 (of an fp64 model: in fp32); ``None`` if the model does not run in another dtype."""
        dtype = torch.float32 if eps < torch.finfo(torch.float32).eps else torch.float64
        try:
            return self._in_one_process(step, planned, dtype=dtype)
        except (RuntimeError, TypeError, ValueError):
            return None

    # -- all ranks

    def _exchange(
        self, points: Sequence[Point], order: Sequence[tuple[int, Point, bool]], findings: Mapping[Point, Finding]
    ) -> tuple[dict[Point, Findings], dict[Point, list[int]], set[Point]]:
        """All ranks' findings at the points of ``points``, the times of all compared tensors, and points of scalars."""
        own = [dataclasses.astuple(findings[point]) if point in findings else None for point in points]
        by_rank = all_gather_json(self._control, [order, own])
        table: dict[Point, Findings] = {
            point: {rank: Finding(*rows[index]) for rank, (_, rows) in enumerate(by_rank) if rows[index] is not None}
            for index, point in enumerate(points)
        }
        seen: dict[Point, list[int]] = {}
        scalars = set()
        for times, _ in by_rank:
            for tick, point, is_scalar in times:
                seen.setdefault(Point(*point), []).append(tick)
                scalars |= {Point(*point)} if is_scalar else set()
        return table, seen, scalars

    # -- the second run of a step, with full tensors

    def _examined(
        self, first: Difference, findings: Findings, step: int, compared: Comparison, baseline: Record
    ) -> Location:
        point = first.point
        members = compared.members(point)
        planned = self._under_plan(step, members)
        whole = self._in_one_process(step, planned, members)
        own = findings.get(self._rank)
        report: dict[str, Any] = {"kind": None, "gap": 0.0, "largest": 0.0, "paths": []}
        if own is not None and not own.is_right:
            report |= _from_tensors(own, members, planned, whole, compared.factor(point))
            report["paths"] = [each.path for each in members]
        everyone = all_gather_json(self._control, report)
        kind = first.kind or Kind(*next(each["kind"] for each in everyone if each["kind"] is not None))
        paths = dict.fromkeys(path for each in everyone for path in each["paths"])
        module, tensor = _module_of(point, [*paths] or [point.path], baseline)
        calls = baseline.calls.get(point.path, 0)
        return Location(
            module=module,
            tensor=tensor,
            kind=kind.name,
            text=kind.text,
            ranks=first.ranks,
            axis=first.axis,
            difference=max(each["gap"] for each in everyone),
            largest=max(each["largest"] for each in everyone),
            step=step,
            microbatch=point.call * self._count // calls if calls and point.kind not in {VALUE, GRADIENT} else None,
            num_right=0,
        )


def _union(lists: Iterable[list[Any]]) -> list[Point]:
    return list(dict.fromkeys(Point(*point) for each in lists for point in each))


def _from_tensors(
    own: Finding, members: Sequence[Point], planned: Record, whole: Record, factor: int
) -> dict[str, Any]:
    """The kind and size of this rank's difference, from full tensors."""
    captured = [planned.captured[each] for each in members if each in planned.captured]
    right = [whole.captured[each] for each in members if each in whole.captured]
    if not right:
        return {"kind": Kind(kinds.OTHER, "not there in a second run"), "gap": math.nan, "largest": math.nan}
    total = factor * torch.stack(right).sum(0)
    # Parameters are compared as flat tensors. The kind needs their rows.
    known = planned.ranges.get(members[0]._replace(kind=GRADIENT))
    shape = tuple(own.shape) if known is None or math.prod(known.shape) != math.prod(own.shape) else known.shape
    total = total.reshape(shape) if total.numel() == math.prod(shape) else total
    part = next((each for each in parts(total.shape, shape, whole.at) if each.label == own.label), None)
    expected = total if part is None else part.take(total)
    got = torch.stack(captured).sum(0).reshape(expected.shape) if captured else torch.zeros_like(expected)
    kind = _of_terms(members[0], own, whole) or kinds.of_tensors(got, expected, total, whole.tables[members[0]])
    gap = (as_real(got).double() - as_real(expected).double()).abs().max().item()
    return {"kind": kind, "gap": gap, "largest": expected.abs().max().item()}


def _of_terms(point: Point, own: Finding, whole: Record) -> Kind | None:
    """The kind of a parameter's gradient in which one microbatch is missing or counted twice; else ``None``."""
    terms = whole.terms.get(point, {})
    for (reader, microbatch), term in terms.items() if len(terms) > 1 else ():
        for sign, what, name in ((-1, "is left out", kinds.MISSING_SUM), (1, "is in it twice", kinds.DOUBLED_SUM)):
            if distance(own.got, summed([own.expected, (sign * term).tolist()])) <= 3 * own.allowed:
                return Kind(name, f"microbatch {microbatch} of reader {reader} {what}")
    return None


def _module_of(point: Point, paths: Sequence[str], baseline: Record) -> tuple[str, str]:
    """The module that computed a tensor, and a description of the tensor."""
    caller, _ = baseline.callers.get((point.path, point.call), (LOSS, 0))
    if point.kind == INPUT:
        return caller, f"input that it gives to {_shown(point.path)}"
    if point.kind == OUTPUT_GRADIENT:
        return caller, f"gradient that it gives to the output of {_shown(point.path)}"
    if point.kind == VALUE:
        return point.path, f"{point.name!r} before the step"
    if point.kind == GRADIENT:
        return point.path, f"gradient of parameter {point.name!r}"
    return ", ".join(paths), point.kind
