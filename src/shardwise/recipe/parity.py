"""Proof on the user's own model: every plan against one plain process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.control import all_gather_json
from shardwise.comm.launch import ranks_per_machine
from shardwise.comm.open import join_world, open_comms
from shardwise.fsdp.clip import clip_grad_norm
from shardwise.fsdp.state import full_state_dict
from shardwise.recipe.parallelize import parallelize
from shardwise.recipe.step import LossFn, forward_loss, split_batch
from shardwise.spec.errors import StateError
from shardwise.spec.exact import check_exact
from shardwise.spec.plan import ParallelPlan

OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]


@dataclass(frozen=True)
class ParityRow:
    """One plan beside one process.

    Attributes:
        plan: Name of the plan.
        world_size: Ranks.
        steps: Optimizer steps.
        losses, norms, parameters: Whether all were bitwise equal.
        largest_difference: Of all losses, norms and parameters, the largest absolute difference.
        where: What differs most; empty where nothing does.
    """

    plan: str
    world_size: int
    steps: int
    losses: bool
    norms: bool
    parameters: bool
    largest_difference: float
    where: str

    @property
    def is_bitwise(self) -> bool:
        """Everything was equal to the last bit."""
        return self.losses and self.norms and self.parameters


@dataclass(frozen=True)
class ParityReport:
    """The rows of :func:`parity`; ``str()`` gives the table."""

    rows: tuple[ParityRow, ...]

    @property
    def is_bitwise(self) -> bool:
        """Every plan was equal to one process to the last bit."""
        return all(row.is_bitwise for row in self.rows)

    def __str__(self) -> str:
        lines = [f"{'plan':<22}{'ranks':>6}{'steps':>6}  {'losses':<8}{'norms':<8}{'parameters':<12}largest difference"]
        for row in self.rows:
            marks = ["equal" if same else "DIFFER" for same in (row.losses, row.norms, row.parameters)]
            worst = f"{row.largest_difference:.3g} ({row.where})" if row.where else "0 (bitwise)"
            lines.append(
                f"{row.plan:<22}{row.world_size:>6}{row.steps:>6}  {marks[0]:<8}{marks[1]:<8}{marks[2]:<12}{worst}"
            )
        return "\n".join(lines)


def parity(
    build_model: Callable[[], nn.Module],
    batches: Sequence[Any],
    loss_fn: LossFn | None,
    plans: Sequence[ParallelPlan] | Mapping[str, ParallelPlan],
    *,
    optimizer: OptimizerFactory | None = None,
    parameters: Callable[[nn.Module], Iterable[Any]] = nn.Module.parameters,
    max_norm: float = 1.0,
) -> ParityReport:
    """Train under every plan and in one plain process, and compare losses, gradient norms and parameters.

    The plain process adds up the ranks' gradients in rank order (for a plan with ``dp_replicate`` inside each group
    first, then over the groups), divides by their number, clips and steps; buffers that forward changes become what
    rank 0's part makes of them. Under data-parallel plans on CPU in fp32 all of it is equal to the last bit, for models
    without dropout, whose results depend on the rank; ``data_parallel``, which cuts the batch, comes near to rounding.

    Args:
        build_model: Builds the model; must give the same weights each time it is called (seed inside).
        batches: One global batch per step; tensors are cut on dim 0, one part per rank (ranks of ``tp`` read the same).
        loss_fn: As for ``sw.train_step``.
        plans: What to compare; a mapping gives names.
        optimizer: From parameters to an element-wise optimizer; AdamW with lr 1e-3 by default.
        parameters: From a model, plain or parallelized, to what its optimizer gets.
        max_norm: Gradients are clipped to this norm, so that clipping is compared too.

    Returns:
        The report, the same on every rank.

    Collective:
        Those of the training runs. All ranks must call.

    Raises:
        StateError: There is no batch, or one cannot be cut into as many parts as there are ranks.
        PlanError: A plan casts or quantizes, which the plain process does not.
    """
    if not batches:
        raise StateError("sw.parity() got no batches.\n  Pass at least one global batch.")
    named = plans if isinstance(plans, Mapping) else _named(plans)
    for name, plan in named.items():
        check_exact(plan, name)
    make = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    probe = build_model()
    device = next((p.device for p in probe.parameters()), torch.device("cpu"))
    del probe
    group = join_world(device)
    rank, size = group.rank(), group.size()
    local_size = ranks_per_machine(size)
    meshes = {name: plan.mesh(size, local_size) for name, plan in named.items()}

    def make_job(num_readers: int) -> _Job:
        parts = [split_batch(batch, num_readers) for batch in batches]
        return _Job(build_model, parts, loss_fn, lambda model: make(parameters(model)), max_norm)

    jobs = {mesh.data_parallel_size: make_job(mesh.data_parallel_size) for mesh in meshes.values()}
    groups = dict.fromkeys((mesh.data_parallel_size, mesh.dp_shard) for mesh in meshes.values())
    expected = {key: _one_process(jobs[key[0]], key[1]) for key in groups}
    control = open_comms(device)[0]
    rows = []
    for name, plan in named.items():
        mesh = meshes[name]
        reader = mesh.data_parallel_rank(rank)
        got = _one_plan(jobs[mesh.data_parallel_size], plan, reader)
        row = _compare(name, size, expected[mesh.data_parallel_size, mesh.dp_shard], got, reader=reader, rank=rank)
        rows.append(_merge([ParityRow(**values) for values in all_gather_json(control, vars(row))]))
    return ParityReport(tuple(rows))


@dataclass
class _Run:
    losses: list[list[float]]  # by step, by reader; of other ranks nan where only this rank's are known
    norms: list[float]
    parameters: dict[str, Tensor]


@dataclass(frozen=True)
class _Job:
    build_model: Callable[[], nn.Module]
    parts: Sequence[Sequence[Any]]  # by step, by reader: ranks that differ on a data-parallel axis
    loss_fn: LossFn | None
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    max_norm: float


def _one_process(job: _Job, group_size: int) -> _Run:
    """Gradients are added up inside each group of ``group_size`` ranks, then over the groups."""
    model = job.build_model()
    optimizer = job.make_optimizer(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    run = _Run([], [], {})
    for microbatches in job.parts:
        losses = []
        before = [buffer.clone() for buffer in model.buffers()]
        kept: list[Tensor] = []
        total: dict[nn.Parameter, Tensor] = {}
        size = len(microbatches)
        for rank, microbatch in enumerate(microbatches):
            _put_buffers(model, before)
            loss = forward_loss(model, microbatch, job.loss_fn)
            loss.backward()
            losses.append(loss.item())
            kept = kept or [buffer.clone() for buffer in model.buffers()]
            if (rank + 1) % group_size == 0:
                for parameter in parameters:
                    grad, parameter.grad = parameter.grad, None
                    if grad is not None:
                        total[parameter] = total[parameter].add_(grad) if parameter in total else grad
        _put_buffers(model, kept)
        for parameter, grad in total.items():
            parameter.grad = grad
        grads = [p.grad for p in parameters if p.grad is not None]
        for grad in grads:
            grad.div_(torch.tensor(size, dtype=grad.dtype, device=grad.device))
        wide = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt() if grads else torch.zeros(())
        norm = wide.to(torch.float64 if any(g.dtype is torch.float64 for g in grads) else torch.float32)
        coefficient = torch.clamp(job.max_norm / (norm + 1e-6), max=1.0)
        for grad in grads:
            grad.mul_(coefficient)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(losses)
        run.norms.append(norm.item())
    run.parameters = {name: value.cpu() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    return run


def _put_buffers(model: nn.Module, values: Sequence[Tensor]) -> None:
    for buffer, value in zip(model.buffers(), values, strict=True):
        buffer.data.copy_(value)


def _one_plan(job: _Job, plan: ParallelPlan, reader: int) -> _Run:
    model = parallelize(job.build_model(), plan)
    optimizer = job.make_optimizer(model)
    run = _Run([], [], {})
    for microbatches in job.parts:
        loss = forward_loss(model, microbatches[reader], job.loss_fn)
        loss.backward()
        norm = clip_grad_norm(model, job.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append([loss.item()])
        run.norms.append(norm.item())
    run.parameters = {name: v for name, v in full_state_dict(model).items() if isinstance(v, Tensor)}
    return run


def _compare(name: str, size: int, expected: _Run, got: _Run, *, reader: int, rank: int) -> ParityRow:
    differences: dict[str, float] = {"": 0.0}
    losses = [(step[reader], mine[0]) for step, mine in zip(expected.losses, got.losses, strict=True)]
    norms = list(zip(expected.norms, got.norms, strict=True))
    for kind, pairs in (("loss", losses), ("norm", norms)):
        for step, (a, b) in enumerate(pairs):
            if a != b:
                differences[f"{kind} of step {step}"] = abs(a - b)
    same_parameters = True
    if rank == 0:
        same_parameters = list(expected.parameters) == list(got.parameters)
        for key, value in expected.parameters.items():
            other = got.parameters.get(key)
            if other is None or not torch.equal(value, other):
                same_parameters = False
                gap = float("inf") if other is None else (value.double() - other.double()).abs().max().item()
                differences[key] = gap
    where = max(differences, key=lambda key: differences[key] if differences[key] == differences[key] else float("inf"))
    return ParityRow(
        plan=name,
        world_size=size,
        steps=len(got.losses),
        losses=all(a == b for a, b in losses),
        norms=all(a == b for a, b in norms),
        parameters=same_parameters,
        largest_difference=differences[where],
        where=where,
    )


def _merge(rows: Sequence[ParityRow]) -> ParityRow:
    """The verdict over all ranks: each compared its own losses, rank 0 the parameters."""
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
    )


def _named(plans: Sequence[ParallelPlan]) -> dict[str, ParallelPlan]:
    """Plans by strategy; several of one strategy are numbered."""
    named: dict[str, ParallelPlan] = {}
    for plan in plans:
        base = plan.strategy if isinstance(plan.strategy, str) else plan.placements.describe()
        name, number = base, 1
        while name in named:
            number += 1
            name = f"{base} ({number})"
        named[name] = plan
    return named
