"""``sw.parity``: comparison of every plan with one plain process, on the user's model."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.api.parallelize import parallelize
from shardwise.api.train_step import train_step
from shardwise.comm.axes import join_world, open_comms
from shardwise.comm.base import Comm
from shardwise.comm.control import all_gather_json
from shardwise.comm.dtype import as_real, dtype_name
from shardwise.engine.storage.attachment import engine_of
from shardwise.launch.world import ranks_per_machine
from shardwise.optim.clip import clip_grad_norm
from shardwise.optim.scaler import GradScaler
from shardwise.parallel.pipeline.batch import Forward, LossFn, split_batch
from shardwise.parallel.pipeline.pipelined import pipelined_of
from shardwise.spec.errors import RankDisagreement, StateError
from shardwise.spec.mesh import Mesh
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shown import Page, Shown, vars_of
from shardwise.spec.tolerances import check_exact, splits_sums, tolerance
from shardwise.testing.locate import Location, NoDifference, locate_difference
from shardwise.testing.one_process import Job, OptimizerFactory, Run, largest_rate, run_one_process
from shardwise.testing.record import Parallelize
from shardwise.weights.state.model import full_state_dict

#: Note in the report if plans differ from a process that draws random numbers.
_DRAWS = (
    "The model or the loss draws random numbers (dropout, noise), and every rank draws different ones: a difference"
    " says nothing about the plans. Compare a model without dropout (p=0)."
)


@dataclass(frozen=True)
class ParityRow:
    """The comparison of one plan with one process.

    Attributes:
        plan: Name of the plan.
        world_size: Number of ranks.
        steps: Optimizer steps.
        losses: Whether all losses were bitwise equal.
        norms: Whether all gradient norms were bitwise equal.
        parameters: Whether all parameters were bitwise equal.
        largest_difference: The largest absolute difference of any loss, norm or parameter.
        where: The value with the largest difference; empty if nothing differs.
        relative: The largest relative difference of losses and norms.
        absolute: The largest absolute difference of parameters.
        allowed: The permitted ``relative`` and ``absolute``; ``None``: everything must be bitwise equal.
        stopped: The error that ended the plan's training before the comparison; empty if there was none.
        location: The first module that differs, if it was searched for.
        draws: Whether a step of one process draws random numbers, as dropout does.
    """

    plan: str
    world_size: int
    steps: int
    losses: bool
    norms: bool
    parameters: bool
    largest_difference: float
    where: str
    relative: float = 0.0
    absolute: float = 0.0
    allowed: tuple[float, float] | None = None
    stopped: str = ""
    location: Location | NoDifference | None = None
    draws: bool = False

    @property
    def is_bitwise(self) -> bool:
        """Whether everything was bitwise equal."""
        return self.losses and self.norms and self.parameters and not self.stopped

    @property
    def holds(self) -> bool:
        """Whether everything was bitwise equal or, if sums are split, within the tolerance."""
        if self.is_bitwise or self.stopped or self.allowed is None:
            return self.is_bitwise
        return self.relative <= self.allowed[0] and self.absolute <= self.allowed[1]

    @property
    def verdict(self) -> str:
        """The largest difference, and the tolerance if there is one, as text."""
        if self.stopped:
            return f"stopped: {self.stopped.splitlines()[0]}"
        if self.is_bitwise:
            return "0 (bitwise)"
        worst = f"{self.largest_difference:.3g} ({self.where})"
        if self.allowed is None:
            return worst
        return (
            f"{worst}; losses and norms {self.relative:.1e} of {self.allowed[0]:.1g} allowed, parameters"
            f" {self.absolute:.1e} of {self.allowed[1]:.1g}"
        )

    @property
    def shown_location(self) -> str:
        """The location of the first difference, or advice if no module differs, as text."""
        if self.holds or not isinstance(self.location, NoDifference):
            return str(self.location)
        return (
            f"{self.location}\n  What differs at the end comes from the last optimizer step or from clipping, or"
            " build_model() gives other weights at each call."
        )


@dataclass(frozen=True, repr=False)
class ParityReport(Shown):
    """The rows of :func:`parity`; ``str()`` gives the table."""

    rows: tuple[ParityRow, ...]

    @property
    def is_bitwise(self) -> bool:
        """Whether every plan was bitwise equal to one process."""
        return all(row.is_bitwise for row in self.rows)

    @property
    def holds(self) -> bool:
        """Whether every plan was bitwise equal or, if it splits sums, within the tolerance."""
        return all(row.holds for row in self.rows)

    def to_records(self) -> list[dict[str, Any]]:
        """A row for each plan."""
        return [
            vars_of(row) | {"holds": row.holds, "verdict": row.verdict, "location": row.location and row.shown_location}
            for row in self.rows
        ]

    def page(self) -> Page:
        """The table, and the locations of differences."""
        rows = [("plan", "ranks", "steps", "losses", "norms", "parameters", "largest difference")]
        for row in self.rows:
            other = "near" if row.holds else "DIFFER"
            losses, norms, parameters = ("equal" if s else other for s in (row.losses, row.norms, row.parameters))
            rows.append((row.plan, str(row.world_size), str(row.steps), losses, norms, parameters, row.verdict))
        found = [f"{row.plan}: {row.shown_location}" for row in self.rows if row.location is not None]
        if any(row.draws and not row.holds for row in self.rows):
            found.insert(0, _DRAWS)
        return Page([], rows, found, words=(0, 3, 4, 5, 6))


def parity(
    build_model: Callable[[], nn.Module],
    batches: Sequence[Any],
    loss_fn: LossFn | None,
    plans: Sequence[ParallelPlan] | Mapping[str, ParallelPlan],
    *,
    optimizer: OptimizerFactory | None = None,
    parameters: Callable[[nn.Module], Iterable[Any]] = nn.Module.parameters,
    max_norm: float = 1.0,
    microbatches: int = 1,
    scaler: Callable[[], GradScaler] | None = None,
    locate: bool | None = None,
    parallelize: Parallelize = parallelize,
    forward: Forward | None = None,
) -> ParityReport:
    """Train under every plan and in one plain process, and compare losses, gradient norms and parameters.

    The plain process adds up the ranks' gradients in rank order (for a plan with ``dp_replicate`` inside each group
    first, then over the groups), divides by their number, clips and steps. Buffers that forward changes get the values
    that rank 0's part produces. With ``pp`` the process adds up the microbatches of each rank first.

    Under data-parallel plans and ``pp``, on CPU in fp32, all results are bitwise equal, for models without dropout
    (whose results depend on the rank). ``data_parallel``, which cuts the batch, differs by rounding. If a sum is split,
    over ``tp``, ``cp`` or ``ep``, or over stages that share a parameter, a row holds if it is within
    ``spec.tolerances.tolerance``.

    Args:
        build_model: Builds the model; must give the same weights at every call (seed inside).
        batches: One global batch per step; tensors are cut on dim 0, one part per rank (ranks of ``tp``, ``cp``
            and ``pp`` read the same), and with ``pp`` into microbatches.
        loss_fn: See ``sw.train_step``.
        plans: The plans to compare; a mapping gives names.
        optimizer: Makes an element-wise optimizer from parameters; AdamW with lr 1e-3 by default.
        parameters: Returns the parameters of a model, plain or parallelized, for its optimizer.
        max_norm: Norm to which gradients are clipped, so that clipping is compared too.
        microbatches: Microbatches of a rank's step, which are accumulated. A plan with ``pp`` has those of its
            schedule. If each of them is reduced separately (sharded accumulation), sums are split.
        scaler: Makes a gradient scaler, used under the plans and not in the one process. Scales are powers of two, so
            that in fp32 nothing may differ.
        locate: Find the first module, in the order of a step, whose output, input's gradient or parameter's gradient
            differs from one process, and the kind of difference: ``ParityRow.location``. ``None``: for the plans that
            differ. ``True``: for every plan. Never for ``data_parallel``, whose replicas have parts of each batch. A
            plan that the comparison of copies under ``tp`` stops is located too; with ``False`` its error is raised.
        parallelize: Makes a plain model train under a plan. Pass another function if your model needs more than
            ``sw.parallelize``, such as process groups for your layers. It is not called for one process.
        forward: See ``sw.train_step``.

    Returns:
        The report, the same on every rank.

    Collective:
        Those of the training runs. All ranks must call. A location needs two to four more runs of a step, and three
            all-gathers of JSON.

    Raises:
        StateError: There is no batch, or a batch cannot be cut into one part per rank.
        PlanError: A plan casts, quantizes or drops tokens, which the plain process does not; or it splits sums of a
            model that is in neither fp32 nor fp64.
    """
    if not batches:
        raise StateError("sw.parity() got no batches.\n  Pass at least one global batch.")
    named = plans if isinstance(plans, Mapping) else _named(plans)
    for name, plan in named.items():
        check_exact(plan, name)
    if microbatches < 1:
        raise StateError(f"sw.parity(microbatches={microbatches}): expected at least 1.\n  Leave it out for one.")
    make = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    probe = build_model()
    device = next((p.device for p in probe.parameters()), torch.device("cpu"))
    dtypes = sorted({dtype_name(p.dtype) for p in probe.parameters() if p.requires_grad})
    del probe
    size = join_world(device).size()
    local_size = ranks_per_machine(size)
    meshes = {name: plan.mesh(size, local_size) for name, plan in named.items()}

    @functools.cache
    def job(num_readers: int, num_microbatches: int) -> Job:
        parts = [[split_batch(p, num_microbatches) for p in split_batch(batch, num_readers)] for batch in batches]
        return Job(build_model, parts, loss_fn, lambda model: make(parameters(model)), max_norm, forward)

    @functools.cache
    def one_process(num_readers: int, num_microbatches: int, group_size: int) -> Run:
        return run_one_process(job(num_readers, num_microbatches), group_size)

    control = open_comms(device)[0]
    rows = []
    for name, plan in named.items():
        mesh = meshes[name]
        count = microbatches if plan.pipeline_policy is None else plan.pipeline_policy.microbatches(plan.pp)
        its_job = job(mesh.data_parallel_size, count)
        expected = one_process(mesh.data_parallel_size, count, mesh.dp_shard)
        train = functools.partial(_one_plan, its_job, plan, parallelize=parallelize, scaler=scaler)
        row, splits = _row(name, plan, mesh, expected, control, train, may_stop=locate is False)
        row = dataclasses.replace(row, draws=expected.draws)
        if splits:
            limits = [tolerance(dtype, expected.lr) for dtype in dtypes]
            allowed = max(limit.relative for limit in limits), max(limit.absolute for limit in limits)
            row = dataclasses.replace(row, allowed=allowed)
        is_wanted = not (row.holds or row.draws) if locate is None else locate
        if is_wanted and not plan.placements.is_threaded:
            is_exact = not (splits or row.holds)  # bits of intermediate tensors do not matter if the result is right
            where = locate_difference(its_job, plan, mesh, control, parallelize=parallelize, is_exact=is_exact)
            row = dataclasses.replace(row, location=where)
        rows.append(row)
    return ParityReport(tuple(rows))


def _row(  # noqa: PLR0917 - all that a run is compared by
    name: str,
    plan: ParallelPlan,
    mesh: Mesh,
    expected: Run,
    control: Comm,
    train: Callable[[int], Run],
    *,
    may_stop: bool,
) -> tuple[ParityRow, bool]:
    """The row of a plan, the same on every rank, and whether the plan splits sums."""
    reader = mesh.data_parallel_rank(control.rank)
    try:
        got = train(reader)
    except RankDisagreement as error:
        if may_stop:
            raise
        row, splits = _stopped(name, control.size, str(error)), True
    else:
        row = _compare(name, control.size, expected, got, reader=reader, rank=control.rank)
        splits = splits_sums(plan) or got.splits_sums
    found = all_gather_json(control, {"row": vars(row), "splits": splits})
    merged = _merge([ParityRow(**values["row"]) for values in found])
    return merged, any(values["splits"] for values in found)


def _one_plan(
    job: Job, plan: ParallelPlan, reader: int, *, parallelize: Parallelize, scaler: Callable[[], GradScaler] | None
) -> Run:
    model = parallelize(job.build_model(), plan)
    optimizer = job.make_optimizer(model)
    scales = None if scaler is None else scaler()
    pipelined = pipelined_of(model)
    shares = pipelined is not None and pipelined.has_copies
    is_reduced_each = pipelined is None and len(job.parts[0][0]) > 1 and not _adds_up_first(model)
    splits = shares or is_reduced_each
    run = Run([], [], {}, largest_rate(optimizer), splits_sums=splits, has_mean=pipelined is not None)
    for readers in job.parts:
        own = None if pipelined is not None else []  # in a pipeline a rank knows only the mean of all losses
        parts = iter(readers[reader])
        loss = train_step(
            model, parts, job.loss_fn, len(readers[reader]), scaler=scales, losses=own, forward=job.forward
        )
        if scales is not None:
            scales.unscale_(optimizer)
        norm = clip_grad_norm(model, job.max_norm)
        if scales is None:
            optimizer.step()
        else:
            scales.step(optimizer)
            scales.update()
        optimizer.zero_grad()
        run.losses.append(loss.item())
        run.norms.append(norm.item())
    run.parameters = {name: v for name, v in full_state_dict(model).items() if isinstance(v, Tensor)}
    return run


def _adds_up_first(model: nn.Module) -> bool:
    """Whether each rank adds up microbatches before the reduction, as one process does."""
    return engine_of(model, "sw.parity").window.mode == "unsharded"


def _compare(name: str, size: int, expected: Run, got: Run, *, reader: int, rank: int) -> ParityRow:
    differences: dict[str, float] = {"": 0.0}
    known = expected.means if got.has_mean else [losses[reader] for losses in expected.by_reader]
    losses, norms = (list(zip(*pair, strict=True)) for pair in ((known, got.losses), (expected.norms, got.norms)))
    for kind, pairs in (("loss", losses), ("norm", norms)):
        for step, (a, b) in enumerate(pairs):
            if a != b:
                differences[f"{kind} of step {step}"] = abs(a - b)
    same_parameters, absolute = True, 0.0
    if rank == 0:
        same_parameters = expected.parameters.keys() == got.parameters.keys()
        absolute = 0.0 if same_parameters else math.inf
        for key, value in expected.parameters.items():
            other = got.parameters.get(key)
            if other is None or not torch.equal(value, other):
                same_parameters = False
                gap = (
                    math.inf
                    if other is None
                    else (as_real(value).double() - as_real(other).double()).abs().max().item()
                )
                differences[key] = gap
                absolute = max(absolute, _or_inf(gap))
    where = max(differences, key=lambda key: _or_inf(differences[key]))
    return ParityRow(
        plan=name,
        world_size=size,
        steps=len(got.losses),
        losses=all(a == b for a, b in losses),
        norms=all(a == b for a, b in norms),
        parameters=same_parameters,
        largest_difference=differences[where],
        where=where,
        relative=max(_or_inf(abs(a - b) / abs(a)) if a != b and a else float(a != b) for a, b in losses + norms),
        absolute=absolute,
    )


def _stopped(name: str, size: int, why: str) -> ParityRow:
    return ParityRow(name, size, 0, False, False, False, math.inf, "", math.inf, math.inf, stopped=why)  # noqa: FBT003


def _or_inf(value: float) -> float:
    """Replace NaN by infinity, the worst difference."""
    return math.inf if math.isnan(value) else value


def _merge(rows: Sequence[ParityRow]) -> ParityRow:
    """Combine the rows of all ranks: each compared its own losses, and rank 0 the parameters."""
    worst = max(rows, key=lambda row: row.largest_difference)
    return ParityRow(
        plan=worst.plan,
        world_size=worst.world_size,
        steps=worst.steps,
        losses=all(row.losses for row in rows),
        norms=all(row.norms for row in rows),
        parameters=all(row.parameters for row in rows),
        largest_difference=worst.largest_difference,
        where=worst.where,
        relative=max(row.relative for row in rows),
        absolute=max(row.absolute for row in rows),
        stopped=next((row.stopped for row in rows if row.stopped), ""),
    )


def _named(plans: Sequence[ParallelPlan]) -> dict[str, ParallelPlan]:
    """Plans by name: their strategy, with a number if several plans have the same strategy."""
    named: dict[str, ParallelPlan] = {}
    for plan in plans:
        base = plan.strategy if isinstance(plan.strategy, str) else plan.placements.describe()
        name, number = base, 1
        while name in named:
            number += 1
            name = f"{base} ({number})"
        named[name] = plan
    return named
