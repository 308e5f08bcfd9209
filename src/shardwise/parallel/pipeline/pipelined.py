"""Division of a model into pipeline stages over ranks, and its training step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.axes import Comms
from shardwise.comm.base import Comm
from shardwise.comm.control import all_gather_int, all_gather_json
from shardwise.comm.dtype import dtype_name, torch_dtype
from shardwise.engine.engine import Engine
from shardwise.engine.extensions.pipeline_step import StageUnits, open_step, sum_over_copies
from shardwise.engine.extensions.precision import resolve
from shardwise.engine.extensions.wrap import find_units
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.unit import Unit
from shardwise.launch.log_once import log_once
from shardwise.measure.meta import cut_alone
from shardwise.parallel.pipeline.batch import UNCHECKED_KEY
from shardwise.parallel.pipeline.runner import DTYPES, Job, ScheduleRunner
from shardwise.parallel.pipeline.stage import Stages, StepCheck, describe_shapes
from shardwise.parallel.pipeline.stage_module import (
    StageModule,
    assign_stages,
    drop_other_stages,
    find_stage_modules,
    make_meta_copy,
    own_parameters,
)
from shardwise.parallel.pipeline.weight_grad_store import WeightGradStore
from shardwise.parallel.tensor.apply import defer_weight_grads
from shardwise.spec.errors import StateError, Uncopyable
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.schedule import PipelinePolicy, Schedule, build, forward_only
from shardwise.spec.schedule.closed import Measured, measured
from shardwise.spec.slice import Slice, set_slice, slice_of

#: ``call(model, part)``.
Call = Callable[[Any, Any], Any]
Scale = Callable[[Tensor], Tensor]

_KEY = "_shardwise_pipelined"


def pipelined_of(model: nn.Module) -> Pipelined | None:
    """The pipeline that :meth:`Pipelined.install` stored in ``model``; ``None`` for a model without stages."""
    return model.__dict__.get(_KEY)


def _identity(loss: Tensor) -> Tensor:
    return loss


@contextlib.contextmanager
def record_pipeline(model: nn.Module) -> Iterator[list[Measured]]:
    """Measure when the ranks of a pipeline compute, in every step inside the context.

    Times are those of the host. On a GPU, which computes later, they are launch times.

    Args:
        model: A model that is parallelized with ``pp`` of 2 or more.

    Yields:
        A list to which every step appends the measurements of all ranks of this pipeline: ``.bubble`` (idle time over
        the longest compute time of a rank), ``.undelayed_bubble``, ``.closed_bubble``, ``.timing``; ``print`` draws
        them.

    Collective:
        Two additional all-gathers along ``pp`` in each step: of an integer before it, of JSON after it. All ranks must
        call.

    Raises:
        StateError: The model has no pipeline stages.
    """
    pipelined = pipelined_of(model)
    if pipelined is None:
        raise StateError(
            f"sw.record_pipeline: {type(model).__name__} is whole on every rank.\n"
            "  Call sw.parallelize with a plan of pp=2 or more first."
        )
    pipelined.measured = found = []
    try:
        yield found
    finally:
        pipelined.measured = None


def find_stages(model: nn.Module, policy: PipelinePolicy, pp: int) -> list[StageModule]:
    """Find the stage modules of a full model, and assign them to stages."""
    modules = find_stage_modules(model, find_units(model, "auto"), policy.first_of_stage)
    assign_stages(modules, pp * policy.virtual_stages, policy.first_of_stage)
    return modules


class Pipelined(Uncopyable):
    """The stages of a model on this rank. Must be made from the full model, before anything else changes the model.

    Attributes:
        notes: Lines for ``sw.summary``.
        meta_copy: A copy of the full model for finding shapes. Code that changes shapes of the model must change the
            copy, too.
        measured: Measurements of steps, inside :func:`record_pipeline`.
        peak_saved: Maximum number of microbatches, counted once per stage, between forward and backward.
    """

    def __init__(
        self, model: nn.Module, plan: ParallelPlan, comms: Comms, stage_modules: Sequence[StageModule]
    ) -> None:
        policy = plan.pipeline_policy
        assert policy is not None
        assert comms.pp is not None
        self._policy = policy
        self._comm = comms.pp
        self._default_schedule = self._schedule(policy.microbatches(comms.pp.size))
        self._modules, self._num_stages = stage_modules, plan.pp * policy.virtual_stages
        self.meta_copy = make_meta_copy(model, self._modules)
        if comms.tp is not None and plan.sequence_parallel:  # activations between stages are divided, too
            cut_alone(self.meta_copy, plan, rank=comms.tp.rank, device=torch.device("meta"))
        self.notes = describe_stages(self._modules, self._default_schedule.ranks, comms.world.size)
        for rank in ranks_without_training(self._modules, self._default_schedule.ranks):
            log_once(
                f"pipeline rank {rank} has no trained parameters: an optimizer over those with requires_grad alone"
                " would be empty there, which torch refuses; give it model.parameters(), of which it skips the others"
            )
        self._copies: dict[nn.Parameter, tuple[int, ...]] = {}
        self._tp = (0, 1) if comms.tp is None else (comms.tp.rank, comms.tp.size)
        self._stages: Stages
        self._store: WeightGradStore
        self._parameters: tuple[nn.Parameter, ...] = ()
        self.measured: list[Measured] | None = None
        self.peak_saved = 0

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank."""
        return self._default_schedule.stages(self._comm.rank)

    @property
    def has_copies(self) -> bool:
        """Whether parameters of this rank are shared with stages of other ranks; their gradients are summed."""
        return bool(self._copies)

    def own_parameters(self, model: nn.Module) -> set[int]:
        """Return the ``id`` of every parameter of the full ``model`` that this rank's stages have."""
        return own_parameters(model, self._modules, self.stages)

    def drop_other_stages(self, model: nn.Module) -> None:
        """Remove other ranks' stages from ``model``."""
        ranks = self._default_schedule.ranks
        shared = drop_other_stages(model, self._modules, self.stages)
        parameters = dict(model.named_parameters())
        for name, stages in shared.items():
            holders = tuple(sorted({ranks[stage] for stage in stages}))
            if len(holders) > 1:
                self._copies[parameters[name]] = holders
                self._count_once(parameters[name], holders)

    def _count_once(self, parameter: nn.Parameter, holders: Sequence[int]) -> None:
        """Make sums over all ranks count a parameter that several stages share only on the first of them."""
        tp_rank, tp_size = self._tp
        part = slice_of(parameter) or Slice(tuple(parameter.shape), copy=tp_rank, copies=tp_size)
        holder = holders.index(self._comm.rank)
        copy, copies = holder * part.copies + part.copy, len(holders) * part.copies
        set_slice(parameter, dataclasses.replace(part, copy=copy, copies=copies))

    def install(self, model: nn.Module, device: torch.device) -> None:
        """Make ``model``, which already has an engine, run stage by stage."""
        comm = None if device.type == "meta" else self._comm  # a dry run has no peers
        self._store = self._make_store(model)
        self._stages = Stages(model, self.meta_copy, self._modules, self._num_stages, device=device, comm=comm)
        computed = resolve(engine_of(model, "sw.parallelize").options.policy, device).param_dtype
        self._stages.compute_dtype = None if computed is None else torch_dtype(computed)
        model.__dict__[_KEY] = self
        self._parameters = tuple(model.parameters())
        own = {name for name, p in model.named_parameters() if p not in self._copies}
        model.__dict__[UNCHECKED_KEY] = own  # other ranks have no values of these
        engine = engine_of(model, "sw.parallelize")
        engine.extras.add(StageUnits((stage, tuple(self._own_units(engine, stage))) for stage in self.stages))

    def _own_units(self, engine: Engine, stage: int) -> Iterator[Unit]:
        """Yield the units whose parameters only ``stage`` uses, on any rank."""
        inside = {id(part) for each in self._modules if each.stage == stage for part in each.module.modules()}
        for unit in engine.units:
            shards = {shard for group in unit.groups for shard in group.shards}
            if all(id(member.module()) in inside for member in unit.members) and shards.isdisjoint(self._copies):
                yield unit

    def _make_store(self, model: nn.Module) -> WeightGradStore:
        """Make the store of weight gradients, which is used where the schedule splits backward.

        The head's gradients are not stored. Storing them would keep the gradients of logits of several microbatches,
        and save only one wait per step of the previous stages.
        """
        head = next((each.module for each in reversed(self._modules) if each.has_parameters), None)
        layers = [module for module in model.modules() if module is not head] if self._default_schedule.is_split else []
        store = WeightGradStore(layers)
        defer_weight_grads(layers, store)
        return store

    def layout(self) -> tuple[Stages, Comm, tuple[int, ...]]:
        """Return the stages of this rank, the Comm of ``pp``, and the rank of each stage."""
        return self._stages, self._comm, self._default_schedule.ranks

    @property
    def num_microbatches(self) -> int:
        """Default number of microbatches in a step."""
        return self._policy.microbatches(self._comm.size)

    def losses(
        self,
        model: nn.Module,
        parts: Sequence[Any],
        call: Call,
        loss: Call,
        *,
        backward: Callable[..., None] = torch.autograd.backward,
        scale: Scale = _identity,
    ) -> list[Tensor]:
        """Run one step on microbatches: forwards and, if grad is enabled, backwards and the reduction of gradients.

        Returns:
            The losses of the microbatches on ranks of the last stage; an empty list on other ranks.

        Collective:
            As :class:`StepCheck`, :meth:`ScheduleRunner.run` and
            :func:`~shardwise.engine.extensions.pipeline_step.open_step`. All ranks must call.
        """
        engine = engine_of(model, "sw.train_step")
        stages, _, ranks = self.layout()
        shapes = [describe_shapes(part) for part in parts]
        if odd := next((index for index, each in enumerate(shapes) if each != shapes[0]), 0):
            raise StateError(
                f"microbatch {odd} of a step has tensors of shapes {shapes[odd]}, and microbatch 0 has {shapes[0]}.\n"
                "  A pipeline needs equal ones in a step: pad all samples to the same length (collate), or set pp=1."
            )
        scale(torch.zeros((), device=engine.comms.control.device))
        count = len(parts)
        schedule = self._schedule(count) if torch.is_grad_enabled() else forward_only(ranks, count)
        bound = functools.partial(call, model), functools.partial(loss, model)
        last = None if schedule.is_split else count - 1  # a split backward completes units in its second half
        with open_step(engine, lambda: sum_over_copies(engine, self._copies, self._comm), last) as opened:
            step_check = self._check_step(stages, parts) if stages.device.type != "meta" else None
            flow = stages.flow(parts[0], call, step_check)
            return self._run(Job(schedule, parts, *bound, flow, step_check, opened, scale, backward))

    def _check_step(self, stages: Stages, parts: Sequence[Any]) -> StepCheck:
        key, count, trains = stages.key(parts[0]), len(parts), torch.is_grad_enabled()
        mode = "training" if stages.trains else "evaluation"
        shown = f"{count} microbatches of {describe_shapes(parts[0])} {'with' if trains else 'without'} gradients"
        trained = bytes(parameter.requires_grad for parameter in self._parameters)
        return StepCheck(self._comm, f"{key!r} {count}", f"{shown} in {mode} mode", trained)

    def _run(self, job: Job) -> list[Tensor]:
        runner = ScheduleRunner(job, self._stages, self._comm, self._store)
        if self.measured is not None:
            all_gather_int(self._comm, 0)  # a barrier: all ranks begin together
        start = time.perf_counter()
        losses = runner.run()
        self.peak_saved = max(self.peak_saved, runner.peak_saved)
        if self.measured is not None:
            own_spans = [[round((moment - start) * 1e6) for moment in span] for span in runner.spans]
            self.measured.append(measured(job.schedule, all_gather_json(self._comm, own_spans)))
        return losses

    def _schedule(self, count: int) -> Schedule:
        return _cached_schedule(self._policy.schedule, self._comm.size, count, self._policy.virtual_stages)

    def mean_loss(self, engine: Engine, losses: Sequence[Tensor]) -> Tensor:
        """Return the mean over microbatches and data-parallel ranks, on every rank of every stage.

        Collective:
            All-reduce of one float64 over all data-parallel ranks, and two along ``pp``. All ranks must call.
        """
        device = engine.comms.control.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for loss in losses:
            total += loss.double()
        mean = (total / max(len(losses), 1)).reshape(1)
        engine.comms.control.all_reduce(mean, unit="loss", divisor=engine.num_ranks_with_data).wait()
        code = float(DTYPES.index(dtype_name(losses[0].dtype))) if losses else 0.0
        dtype_code = torch.full((1,), code, dtype=torch.float64, device=self._comm.host.device)
        self._comm.all_reduce(mean, unit="loss").wait()
        self._comm.host.all_reduce(dtype_code, unit="loss").wait()  # so that the host does not wait for the device
        return mean[0].to(torch_dtype(DTYPES[int(dtype_code[0])]))


@functools.lru_cache(maxsize=32)
def _cached_schedule(schedule: str, pp: int, count: int, virtual: int) -> Schedule:
    return build(schedule, pp, count, virtual)


def describe_stages(modules: Sequence[StageModule], ranks: Sequence[int], num_world_ranks: int) -> list[str]:
    """Return lines for ``sw.summary``: the ranks, modules and parameters of each stage."""
    width = num_world_ranks // (max(ranks) + 1)
    lines = ["pipeline stages:"]
    for stage, rank in enumerate(ranks):
        parts = [each for each in modules if each.stage == stage]
        names = parts[0].name if len(parts) == 1 else f"{parts[0].name} to {parts[-1].name}, {len(parts)} modules"
        first, last = rank * width, (rank + 1) * width - 1
        where = f"rank {first}" if width == 1 else f"ranks {first} to {last}"
        numel = sum(parameter.numel() for parameter in _parameters(parts))
        trained = "" if _trains(parts) else ", none of them trained"
        lines.append(f"  stage {stage + 1} of {len(ranks)} on {where}: {names}; {numel:,} parameters{trained}")
    return lines


def ranks_without_training(modules: Sequence[StageModule], ranks: Sequence[int]) -> list[int]:
    """The ranks along ``pp`` without trained parameters; none if no rank has any."""
    found = [
        rank
        for rank in sorted(set(ranks))
        if not _trains([each for each in modules if each.stage is not None and ranks[each.stage] == rank])
    ]
    return found if len(found) < len(set(ranks)) else []


def _parameters(modules: Sequence[StageModule]) -> list[nn.Parameter]:
    return list({id(p): p for each in modules for p in each.module.parameters()}.values())


def _trains(modules: Sequence[StageModule]) -> bool:
    return any(parameter.requires_grad for parameter in _parameters(modules))
