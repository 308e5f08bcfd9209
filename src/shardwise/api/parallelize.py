"""``sw.parallelize``: the recipe from a plain model and a plan to a model that trains on every rank of the world."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.api import data_parallel
from shardwise.api.preparation import Preparation, prepare
from shardwise.api.shard import Description, finish, shard_model
from shardwise.api.wrapper_methods import add_wrapper_methods, count_parameters
from shardwise.comm.axes import Comms, MeshRanks, join_world
from shardwise.comm.base import Comm
from shardwise.comm.record import RecordComm
from shardwise.engine import build
from shardwise.engine.build import OwnedParameter
from shardwise.engine.engine import Engine
from shardwise.engine.extensions import batch_norm
from shardwise.engine.extensions.compile import compile_units
from shardwise.engine.extensions.precision import warn_of_narrow_masters
from shardwise.engine.extensions.wrap import assign_parameters
from shardwise.engine.storage.attachment import engine_of
from shardwise.launch.log_once import cpu_warning, log_once
from shardwise.launch.world import ranks_per_machine
from shardwise.parallel.context.apply import divide_sequences
from shardwise.parallel.experts.layer import Mixture, apply_experts, own_experts
from shardwise.parallel.pipeline.pipelined import Pipelined
from shardwise.parallel.sharded_embedding.rows import shard_rows
from shardwise.parallel.tensor.agreement import BatchCheck, GradientCheck
from shardwise.parallel.tensor.apply import apply_sharding, part_of
from shardwise.parallel.tensor.sharding_plan import ShardingPlan, plan_sharding
from shardwise.spec.errors import PlanError
from shardwise.spec.mesh import Mesh
from shardwise.spec.placement import canonical_name
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.text import did_you_mean
from shardwise.spec.unit_facts import EngineOptions
from shardwise.weights.init.materialize import (
    InitArgument,
    LoadedLater,
    NoSource,
    Source,
    fill_attributes,
    fill_buffers,
    fill_parameters,
    find_source,
    free_for_swaps,
)
from shardwise.weights.init.sync import synchronise
from shardwise.weights.state.model import Unfilled, load_full_state_dict, load_ranges

#: Parameters from which on a model that is one unit gets a note.
_LARGE_UNIT = 10_000_000


def parallelize(
    model: nn.Module, plan: ParallelPlan | str | None = None, *, init: InitArgument | None = None, **fields: Any
) -> nn.Module:
    """Make ``model`` train as ``plan`` says, on every rank of the world.

    The model is changed in place. It keeps its class, names and ``forward``. Its Parameter objects become this rank's
    shards, so an optimizer that was built before, and has no state yet, keeps working. The world is the one that the
    environment describes (torchrun, Slurm), or the existing process group, or one rank. If an existing group has no
    NCCL, a model on a GPU communicates through host memory (several ranks may then share a GPU).

    Args:
        model: Any ``nn.Module`` whose parameters are on one device.
        plan: A plan; or the name of a strategy, with defaults for the rest. ``None`` means the defaults: zero3 over all
            ranks, units found automatically.
        init: Source of the values of a model on ``meta``, read one unit at a time. ``None``: the model's recorded
            construction (``sw.deferred_init``), else each module's ``reset_parameters()`` in the order of
            ``modules()``. If a module has no ``reset_parameters``, nothing is initialized: parameters have no values,
            and a forward raises, until ``sw.load_full_state_dict`` or ``sw.load`` sets all of them. A function: called
            with every module that owns meta tensors, to initialize them with torch operations, which are recorded and
            run later on the CPU. A mapping: a state dict, used on rank 0 only and read group by group; a value may be
            loaded when it is read.
        **fields: Fields of a ``ParallelPlan``, if ``plan`` is not one: ``sw.parallelize(model, strategy="zero2")``.

    Returns:
        ``model``.

    Collective:
        Compares the models and their values over the ranks as ``plan.sync`` says. All ranks must call.

    Raises:
        PlanError, MeshError: The plan does not fit the model or the world.
        StateError: The model contains something that cannot be sharded.
        RankDisagreement: The ranks have different models.
    """
    plan = _plan_of(plan, fields)
    _log_translations(plan)
    prepared = prepare(model, plan)  # raises before the ranks communicate
    device, counted = prepared.device, count_parameters(model)
    if (warning := cpu_warning(device.type, torch.cuda.device_count())) is not None:
        log_once(warning)
    source = find_source(model, init, is_sent=plan.sync == "rank0")
    free_for_swaps(model)
    if isinstance(source, LoadedLater):
        source.check(name for name, parameter in model.named_parameters() if parameter.is_meta)
    size = join_world(device).size()
    mesh = plan.mesh(size, ranks_per_machine(size))
    _log_mesh(plan, mesh)
    _log_one_unit(model, prepared)
    mesh_ranks = MeshRanks(mesh)
    comms = mesh_ranks.open(device, is_replicated=plan.is_replicated)
    ignored, owned = prepared.ignored, prepared.owned
    names = {
        unit or build.ROOT: [entry.names[0] for entry in entries if entry.parameter not in ignored]
        for unit, entries in owned.items()
    }
    names["buffers"] = [name for name, _ in model.named_buffers()]
    if source is not None:
        source.agree(comms.world, plan.sync)
        fill_attributes(model, lambda tensor: source.attribute(tensor, device))  # may be a graph of parameters
        fill_buffers(model, lambda buffer, name: source.buffer(buffer, name).to(device))
        whole, entries = prepared.unsharded, itertools.chain.from_iterable(owned.values())
        fill_parameters(source.ignored, [entry for entry in entries if entry.parameter in whole], device)
    is_deferred = source is not None
    synchronise(model, None, comms.world, mode=plan.sync, groups=names, is_deferred=is_deferred, ignored=ignored.names)
    batch_norm.check(model, device, size, "sw.parallelize()")
    apply_plan(model, prepared, comms, lambda: mesh_ranks.open_samples(device), source=source)
    engine = engine_of(model, "sw.parallelize")
    if plan.precision.master_dtype is None:
        engine.extras.before_step.append(warn_of_narrow_masters)
    later = source.later if isinstance(source, LoadedLater) else None
    if isinstance(later, NoSource):
        Unfilled(later.reason, later.names).attach(engine)
    elif isinstance(later, Mapping):
        load_full_state_dict(model, later)
    elif later is not None:
        load_ranges(model, later.read, later)
    if plan.placements.is_threaded:
        _describe(engine, [data_parallel.install(model)])
    add_wrapper_methods(model, counted)
    return model


def _plan_of(plan: ParallelPlan | str | None, fields: Mapping[str, Any]) -> ParallelPlan:
    """Return the plan that the arguments of :func:`parallelize` mean."""
    if (isinstance(plan, ParallelPlan) and fields) or (plan is not None and "strategy" in fields):
        raise PlanError(
            f"sw.parallelize() got a plan and {', '.join(fields)} beside it.\n"
            "  Put all into the plan: sw.ParallelPlan(...)."
        )
    if isinstance(plan, ParallelPlan):
        return plan
    given: dict[str, Any] = {**({"strategy": plan} if plan is not None else {}), **fields}
    known = [field.name for field in dataclasses.fields(ParallelPlan)]
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known)
            raise PlanError(f"sw.parallelize() and its plan have no {name!r}.\n {hint} Fields: {', '.join(known)}.")
    made = ParallelPlan(**given)
    if given:
        log_once(f"the plan is sw.{made!r}")
    return made


def apply_plan(
    model: nn.Module,
    prepared: Preparation,
    comms: Comms,
    open_samples: Callable[[], Comm],
    *,
    source: Source | None = None,
) -> None:
    """Run the part of :func:`parallelize` that follows the comparison of the ranks' models.

    Does not communicate, so a dry run can pass ``comms`` without peers.
    """
    plan = prepared.plan
    pipelined = Pipelined(model, plan, comms, prepared.stage_modules) if comms.pp is not None else None
    notes = divide(model, prepared, comms, pipelined=pipelined, source=source)
    if pipelined is not None:
        notes += pipelined.notes
        pipelined.drop_other_stages(model)
        prepared = prepared.restricted_to(model)
    notes += shard_rows(
        prepared.tables,
        comms.world,
        lambda path, table: prepared.policies.group_dtypes(table.weight, [(table, path, "weight")])[:2],
    )
    if plan.compile and comms.control.device.type != "meta":  # a dry run computes nothing
        compile_units(model, prepared.units)  # first, so that the compiled forward is recomputed
    engine = shard_model(model, prepared, comms, engine_options(plan), source=source)
    _describe(engine, notes)
    finish(model, engine, open_samples, sync_buffers=plan.sync_buffers)
    if pipelined is not None:
        pipelined.install(model, comms.control.device)


def _describe(engine: Engine, notes: Iterable[str]) -> None:
    """Add lines to the model's summary."""
    description = engine.extras.find(Description)
    if description is not None:
        description.notes += tuple(notes)


def engine_options(plan: ParallelPlan) -> EngineOptions:
    """Translate the plan into the engine's options."""
    # A pipeline runs a unit once for every microbatch, so by default the unit stays gathered during the step.
    stays = plan.pp > 1 and plan.reshard_after_forward == "auto"
    return EngineOptions(
        policy=plan.precision,
        quantization=plan.quantization,
        reshard_after_forward=False if stays else plan.reshard_after_forward,
        granularity=plan.cut_granularity,
        accumulates_sharded=_accumulates_sharded(plan),
        defers_replicate=plan.accumulation == "defer_replicate",
        prefetch=plan.prefetch,
        num_gradient_buffers=plan.gradient_buffers,
        recompute=plan.recompute,
        activation_offload=plan.activation_offload,
        merge_limit=plan.merge_limit,
        offload=plan.offload,
    )


def _accumulates_sharded(plan: ParallelPlan) -> bool | None:
    """Return whether gradients are accumulated in shards; ``None`` leaves the choice to the strategy."""
    if plan.pp > 1:
        return False
    return plan.accumulation == "sharded" if plan.accumulation in {"sharded", "unsharded"} else None


def _log_translations(plan: ParallelPlan) -> None:
    """Print once the names here for strategies and objects of other libraries."""
    strategy = plan.strategy
    if isinstance(strategy, str) and canonical_name(strategy) != strategy.lower():
        log_once(f"strategy {strategy!r} is {canonical_name(strategy)!r} here")
    for note in plan.notes:
        log_once(note)


def _log_mesh(plan: ParallelPlan, mesh: Mesh) -> None:
    """Print the mesh that was chosen for a hybrid strategy whose plan does not set one."""
    if not plan.placements.is_hybrid or plan.dp_replicate > 1 or mesh.data_parallel_size == 1:
        return
    is_alone = mesh.dp_replicate == 1 and plan.dp_shard == -1
    note = " (one machine: nothing is replicated; set dp_replicate for several groups)" if is_alone else ""
    log_once(f"{plan.strategy}: dp_replicate={mesh.dp_replicate} x dp_shard={mesh.dp_shard}{note}")


def _log_one_unit(model: nn.Module, prepared: Preparation) -> None:
    """Print that a sharded model has no blocks of which to make units, if it is so large that this matters."""
    plan, numel = prepared.plan, sum(parameter.numel() for parameter in model.parameters())
    is_found = bool(prepared.units) or plan.wrap_policy != "auto" or not plan.placements.shards_parameters
    if not is_found and numel >= _LARGE_UNIT:
        log_once(
            f"{type(model).__name__} ({numel / 1e6:.0f}M parameters) has no chain of equal blocks, so that it is one"
            " unit, gathered as a whole. auto_wrap_policy=sw.wrap_by_class(...) or sw.wrap_by_size(...) divides it."
        )


def divide(
    model: nn.Module,
    prepared: Preparation,
    comms: Comms,
    *,
    pipelined: Pipelined | None,
    source: Source | None,
) -> list[str]:
    """Reduce parameters in ``model`` to this rank's parts, in place, and install forwards that communicate.

    Must run before the pipeline drops the stages of other ranks. ``source`` has the values of parameters on meta.

    Returns:
        Lines for the model's summary.
    """
    plan, mixtures = prepared.plan, prepared.mixtures
    notes: list[str] = []
    tp, sharding = comms.tp, None
    if tp is not None:
        sharding = plan_sharding(model, plan.tp_plan, tp.size, tp.rank, divides_sequence=plan.sequence_parallel)
    if source is not None:
        _fill(model, source, comms, sharding, mixtures, pipelined)
    if tp is not None and sharding is not None:
        apply_sharding(model, sharding, tp)
        if tp.device.type != "meta":
            BatchCheck(tp).install(model)
            GradientCheck(tp).install(model, divides_sequence=plan.sequence_parallel)
        notes += sharding.notes
    if comms.cp is not None:
        multiple = plan.tp if plan.sequence_parallel else 1
        notes.append(divide_sequences(model, comms.cp, multiple=multiple))
        if pipelined is not None:
            alone = RecordComm("cp", rank=comms.cp.rank, size=comms.cp.size, device="meta")
            divide_sequences(pipelined.meta_copy, alone, multiple=multiple)
    if mixtures:
        rank_and_size = (0, 1) if tp is None else (tp.rank, tp.size)
        notes.append(apply_experts(mixtures, comms.ep, plan.expert_capacity, tp=rank_and_size))
    return notes


def _fill(  # noqa: PLR0917 - all that divides a parameter
    model: nn.Module,
    source: Source,
    comms: Comms,
    sharding: ShardingPlan | None,
    mixtures: Sequence[Mixture],
    pipelined: Pipelined | None,
) -> None:
    """Fill parameters on meta that are about to be cut with this rank's part of their values.

    The engine fills uncut parameters later, unit by unit. With ``tp`` all parameters are filled here, because ``tp``
    may change how a module would initialize them. Parameters that this rank will drop are not filled.
    """
    own = own_experts(mixtures, comms.ep) if comms.ep is not None else {}
    own_ids = None if pipelined is None else pipelined.own_parameters(model)

    def is_cut(parameter: nn.Parameter) -> bool:
        rows = own.get(id(parameter), slice(None))
        is_here = rows is not None and (own_ids is None or id(parameter) in own_ids)
        return is_here and (sharding is not None or rows != slice(None))

    def part(entry: OwnedParameter) -> Tensor:
        (value,) = source.parameters([entry])
        rows = own.get(id(entry.parameter))
        if rows is not None and rows != slice(None):
            value = value[rows].clone()
        return value if sharding is None else part_of(sharding, entry.parameter, value)

    cut = [entry for entry in assign_parameters(model, ())[""] if is_cut(entry.parameter)]
    fill_parameters(lambda entries: map(part, entries), cut, comms.world.device)  # one full value in memory at a time
