"""The recipe: from a plain model and a plan to a model that trains on every rank of the world."""

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
from shardwise.comm.axes import Comms, Place, join_world
from shardwise.comm.base import Comm
from shardwise.comm.record import RecordComm
from shardwise.engine import build
from shardwise.engine.build import OwnedParameter
from shardwise.engine.engine import Engine
from shardwise.engine.extensions import batch_norm
from shardwise.engine.extensions.compile import compile_units
from shardwise.engine.extensions.precision import tell_of_narrow_masters
from shardwise.engine.extensions.wrap import assign_parameters
from shardwise.engine.storage.attachment import engine_of
from shardwise.launch.notice import cpu_notice, tell_once
from shardwise.launch.world import ranks_per_machine
from shardwise.parallel.context.apply import divide_sequences
from shardwise.parallel.experts.layer import Mixture, apply_experts, own_experts
from shardwise.parallel.pipeline.pipelined import Pipelined
from shardwise.parallel.sharded_embedding.rows import spread_rows
from shardwise.parallel.tensor.agreement import Agreement, Copies
from shardwise.parallel.tensor.apply import apply_cuts, part_of
from shardwise.parallel.tensor.cut import ShardingPlan, find_cuts
from shardwise.spec.errors import PlanError
from shardwise.spec.facts import EngineOptions
from shardwise.spec.mesh import Mesh
from shardwise.spec.placement import canonical_name
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.text import did_you_mean
from shardwise.weights.init.materialize import (
    FromLater,
    Given,
    Missing,
    Source,
    fill_attributes,
    fill_buffers,
    fill_parameters,
    find_source,
)
from shardwise.weights.init.sync import synchronise
from shardwise.weights.state.model import Unfilled, load_full_state_dict, load_ranges


def parallelize(
    model: nn.Module, plan: ParallelPlan | str | None = None, *, init: Given | None = None, **fields: Any
) -> nn.Module:
    """Make ``model`` train as ``plan`` says, on every rank of the world.

    The model is changed in place: its class, names and ``forward`` stay; its Parameter objects stay too and become this
    rank's shards, so an optimizer built before (without state) keeps working. Joins the world that the environment
    describes (torchrun, Slurm), or uses the process group that exists, or is a world of one. Over an existing
    group without NCCL a model on a GPU communicates by way of host memory (ranks may then share the GPU).

    Args:
        model: Any ``nn.Module`` whose parameters are on one device.
        plan: ``None`` means the defaults: zero3 over all ranks, units found automatically. The name of a
            strategy: that one, and the defaults.
        init: Where a model on ``meta`` gets its values, one unit at a time. ``None``: from its recorded construction
            (``sw.deferred_init``), else each module's ``reset_parameters()`` in the order of ``modules()``; where a
            module has none, nothing is initialised: parameters have no values until ``sw.load_full_state_dict`` or
            ``sw.load`` brings all of them, and a forward before that raises. A function: called with every module that
            owns meta tensors, to initialise those with operations of torch, which are recorded and run later on the
            CPU. A mapping: a state dict, used on rank 0 only and read group by group; it may load each value when it is
            asked for it.
        **fields: Those of a ``ParallelPlan``, where none is given: ``sw.parallelize(model, strategy="zero2")``.

    Returns:
        ``model``.

    Collective:
        Compares the models and their values over the ranks (``plan.sync``). All ranks must call.

    Raises:
        PlanError, MeshError: The plan does not fit the model or the world.
        StateError: The model holds something that cannot be sharded.
        RankDisagreement: The ranks hold different models.
    """
    plan = _plan_of(plan, fields)
    _tell_translations(plan)
    prepared = prepare(model, plan)  # refuses before the ranks communicate
    device, counted = prepared.device, count_parameters(model)
    if (notice := cpu_notice(device.type, torch.cuda.device_count())) is not None:
        tell_once(notice)
    source = find_source(model, init, is_sent=plan.sync == "rank0")
    if isinstance(source, FromLater):
        source.check(name for name, parameter in model.named_parameters() if parameter.is_meta)
    size = join_world(device).size()
    mesh = plan.mesh(size, ranks_per_machine(size))
    _tell_mesh(plan, mesh)
    place = Place(mesh)
    comms = place.open(device, is_replicated=plan.is_replicated)
    ignored, owned = prepared.ignored, prepared.owned
    names = {
        unit or build.ROOT: [entry.names[0] for entry in entries if entry.parameter not in ignored]
        for unit, entries in owned.items()
    }
    names["buffers"] = [name for name, _ in model.named_buffers()]
    if source is not None:
        source.agree(comms.world, plan.sync)
        fill_attributes(model, lambda tensor: source.attribute(tensor, device))  # one may hold a graph of parameters
        fill_buffers(model, lambda buffer, name: source.buffer(buffer, name).to(device))
        whole, entries = prepared.left_alone, itertools.chain.from_iterable(owned.values())
        fill_parameters(source.alone, [entry for entry in entries if entry.parameter in whole], device)
    is_deferred = source is not None
    synchronise(model, None, comms.world, mode=plan.sync, groups=names, is_deferred=is_deferred, ignored=ignored.names)
    batch_norm.check(model, device, size, "sw.parallelize()")
    apply_plan(model, prepared, comms, lambda: place.open_samples(device), source=source)
    engine = engine_of(model, "sw.parallelize")
    if plan.precision.master_dtype is None:
        engine.extras.before_step.append(tell_of_narrow_masters)
    given = source.given if isinstance(source, FromLater) else None
    if isinstance(given, Missing):
        Unfilled(given.reason, given.names).attach(engine)
    elif isinstance(given, Mapping):
        load_full_state_dict(model, given)
    elif given is not None:
        load_ranges(model, given.read, given)
    if plan.placements.is_threaded:
        _describe(engine, [data_parallel.install(model)])
    add_wrapper_methods(model, counted)
    return model


def _plan_of(plan: ParallelPlan | str | None, fields: Mapping[str, Any]) -> ParallelPlan:
    """The plan that the arguments of :func:`parallelize` mean."""
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
        tell_once(f"the plan is sw.{made!r}")
    return made


def apply_plan(
    model: nn.Module,
    prepared: Preparation,
    comms: Comms,
    open_samples: Callable[[], Comm],
    *,
    source: Source | None = None,
) -> None:
    """Everything in :func:`parallelize` that follows once the ranks have compared their models.

    Does not communicate, so a dry run can pass ``comms`` without peers.
    """
    plan = prepared.plan
    pipelined = Pipelined(model, plan, comms, prepared.stage_modules) if comms.pp is not None else None
    notes = divide(model, prepared, comms, pipelined=pipelined, source=source)
    if pipelined is not None:
        notes += pipelined.notes
        pipelined.drop_foreign(model)
        prepared = prepared.kept_in(model)
    notes += spread_rows(
        prepared.tables,
        comms.world,
        lambda path, table: prepared.policies.group_dtypes(table.weight, [(table, path, "weight")])[:2],
    )
    if plan.compile and comms.control.device.type != "meta":  # a dry run computes nothing
        compile_units(model, prepared.units)  # first, so that what is recomputed is the compiled forward
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
    # A pipeline runs a unit once for every microbatch: it stays gathered over the step unless told otherwise.
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
    """``None``: as the strategy does by itself."""
    if plan.pp > 1:
        return False
    return plan.accumulation == "sharded" if plan.accumulation in {"sharded", "unsharded"} else None


def _tell_translations(plan: ParallelPlan) -> None:
    """Print once what another library's names and objects are called here."""
    strategy = plan.strategy
    if isinstance(strategy, str) and canonical_name(strategy) != strategy.lower():
        tell_once(f"strategy {strategy!r} is {canonical_name(strategy)!r} here")
    for note in plan.notes:
        tell_once(note)


def _tell_mesh(plan: ParallelPlan, mesh: Mesh) -> None:
    """Print the mesh that a hybrid strategy got without being told one."""
    if not plan.placements.is_hybrid or plan.dp_replicate > 1 or mesh.data_parallel_size == 1:
        return
    is_alone = mesh.dp_replicate == 1 and plan.dp_shard == -1
    note = " (one machine: nothing is replicated; set dp_replicate for several groups)" if is_alone else ""
    tell_once(f"{plan.strategy}: dp_replicate={mesh.dp_replicate} x dp_shard={mesh.dp_shard}{note}")


def divide(
    model: nn.Module,
    prepared: Preparation,
    comms: Comms,
    *,
    pipelined: Pipelined | None,
    source: Source | None,
) -> list[str]:
    """Leave this rank's parts of parameters in ``model``, in place, with forwards that communicate.

    Of the stages of ``pipelined`` none has been dropped yet. ``source`` has values for parameters on meta.

    Returns:
        Lines for a summary.
    """
    plan, mixtures = prepared.plan, prepared.mixtures
    notes: list[str] = []
    tp, cuts = comms.tp, None
    if tp is not None:
        cuts = find_cuts(model, plan.tp_plan, tp.size, tp.rank, divides_sequence=plan.sequence_parallel)
    if source is not None:
        _fill(model, source, comms, cuts, mixtures, pipelined)
    if tp is not None and cuts is not None:
        apply_cuts(model, cuts, tp)
        if tp.device.type != "meta":
            Agreement(tp).install(model)
            Copies(tp).install(model, divides_sequence=plan.sequence_parallel)
        notes += cuts.notes
    if comms.cp is not None:
        multiple = plan.tp if plan.sequence_parallel else 1
        notes.append(divide_sequences(model, comms.cp, multiple=multiple))
        if pipelined is not None:
            alone = RecordComm("cp", rank=comms.cp.rank, size=comms.cp.size, device="meta")
            divide_sequences(pipelined.meta_copy, alone, multiple=multiple)
    if mixtures:
        place = (0, 1) if tp is None else (tp.rank, tp.size)
        notes.append(apply_experts(mixtures, comms.ep, plan.expert_capacity, tp=place))
    return notes


def _fill(  # noqa: PLR0917 - all that divides a parameter
    model: nn.Module,
    source: Source,
    comms: Comms,
    cuts: ShardingPlan | None,
    mixtures: Sequence[Mixture],
    pipelined: Pipelined | None,
) -> None:
    """Fill parameters on meta that are about to be cut with this rank's part of their values.

    The engine fills uncut parameters, unit by unit, except under ``tp``, which may change how a module would initialise
    them. Parameters that this rank is going to drop are not filled.
    """
    own = own_experts(mixtures, comms.ep) if comms.ep is not None else {}
    held = None if pipelined is None else pipelined.held_parameters(model)

    def is_cut(parameter: nn.Parameter) -> bool:
        rows = own.get(id(parameter), slice(None))
        is_here = rows is not None and (held is None or id(parameter) in held)
        return is_here and (cuts is not None or rows != slice(None))

    def part(entry: OwnedParameter) -> Tensor:
        (value,) = source.parameters([entry])
        rows = own.get(id(entry.parameter))
        if rows is not None and rows != slice(None):
            value = value[rows].clone()
        return value if cuts is None else part_of(cuts, entry.parameter, value)

    cut = [entry for entry in assign_parameters(model, ())[""] if is_cut(entry.parameter)]
    fill_parameters(lambda entries: map(part, entries), cut, comms.world.device)  # one value is whole at a time
