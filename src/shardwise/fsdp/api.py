"""What users call on a parallelized module, and the per-unit building block under ``parallelize``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.comm.axes import Comms
from shardwise.comm.base import CollectiveEvent
from shardwise.comm.open import Place
from shardwise.fsdp import attach, batch_norm, build, optimizer, precision, recompute
from shardwise.fsdp.ignore import NOTHING, Ignored, find_ignored
from shardwise.fsdp.in_backward import refuse
from shardwise.fsdp.materialize import Source, fill_parameters
from shardwise.fsdp.offload import choose_units
from shardwise.fsdp.runtime import Runtime
from shardwise.fsdp.sync import synchronise
from shardwise.fsdp.unit import Unit
from shardwise.spec.errors import MeshError, PlanError, StateError
from shardwise.spec.granularity import ELEMENT, TENSOR, Granularity
from shardwise.spec.offload import OffloadPolicy
from shardwise.spec.offload import offload_policy as parse_offload
from shardwise.spec.placement import PRESETS, Placements
from shardwise.spec.plan import check_inner_size
from shardwise.spec.precision import FULL_PRECISION, PrecisionPolicy
from shardwise.spec.quantize import NO_QUANTIZATION, Quantization
from shardwise.spec.recompute import RecomputePolicy

#: Full-size gradient buffers per size class: two let a reduction run while the next unit's gradients are collected.
NUM_GRADIENT_BUFFERS = 2


def shard_model(
    model: nn.Module,
    unit_modules: Mapping[str, nn.Module],
    row: Placements,
    comms: Comms,
    *,
    policy: PrecisionPolicy = FULL_PRECISION,
    quantization: Quantization = NO_QUANTIZATION,
    reshard_after_forward: str | bool | int = "auto",
    granularity: Granularity = ELEMENT,
    accumulates_sharded: bool | None = None,
    defers_replicate: bool = False,
    num_gradient_buffers: int = NUM_GRADIENT_BUFFERS,
    recompute_policy: RecomputePolicy | None = None,
    source: Source | None = None,
    merge_limit: int | None = 0,
    ignored: Ignored = NOTHING,
    offload: OffloadPolicy | None = None,
) -> Runtime:
    """Turn ``model`` into units, in place. Every rank must hold the same values already (``fsdp.sync``).

    Args:
        model: The root.
        unit_modules: The other units, by qualified name.
        row: Placements of the strategy.
        comms: For gathers and for reductions, on each axis.
        policy: In which dtypes to compute and reduce.
        quantization: What is held or sent in fewer bytes.
        reshard_after_forward: ``"auto"``: as the row says, and the root stays gathered from forward to backward. A
            number: kept sharded over so many ranks, for which ``comms`` has an inner Comm.
        granularity: What a cut never divides.
        accumulates_sharded: ``None``: as the row says (ddp and zero1 keep local sums, the others reduce every time).
        defers_replicate: Reduce every time, but over ``dp_replicate`` only with the last microbatch.
        num_gradient_buffers: Full-size gradient buffers per size class.
        recompute_policy: What is computed again in backward; ``None``: nothing.
        source: Gives meta parameters their values, unit by unit.
        merge_limit: Small units are merged up to this many bytes of parameters; ``None``: as ``spec.merge`` says.
        ignored: What is left alone.
        offload: What is kept on the host; ``None``: nothing.

    Raises:
        PlanError: There is nothing to quantize, or nothing to offload.
        StateError: The model holds something that cannot be sharded.
    """
    optimizer.install_checks()
    owned = build.assign_parameters(model, unit_modules, ignored)
    allows_meta = source is not None or comms.gather.device.type == "meta"
    build.check_parameters((entry for entries in owned.values() for entry in entries), allows_meta=allows_meta)
    policies = precision.Policies(model, policy, comms.gather.device)
    merged = build.merge_units(
        model, unit_modules, owned, policies=policies, quantization=quantization, limit=merge_limit
    )
    content = {names: [entry for name in names for entry in owned[name]] for names in merged}
    on_host = choose_units(content, row, offload) if offload is not None else set()
    policies.cast_buffers(model, ignored.buffers)
    policies.install_casts(model, unit_modules)
    recomputed = recompute.install(model, unit_modules, recompute_policy)
    modules = {"": model, **unit_modules}
    ranks = build.assign_ranks(owned.values(), row, comms.gather.size) if granularity == TENSOR else {}
    units: dict[str, Unit] = {}
    for names, entries in content.items():
        reshards, inner_size = _reshards(reshard_after_forward, default=not row.keeps_gathered and names != ("",))
        if source is not None:
            fill_parameters(source, entries, comms.gather.device)
        units[names[0]] = build.make_unit(
            {name: modules[name] for name in names},
            owned,
            row,
            comms,
            reshards=reshards,
            inner_size=inner_size,
            policies=policies,
            quantization=quantization,
            granularity=granularity,
            ranks=ranks,
            offload=offload if names in on_host else None,
        )
        units[names[0]].recomputed_in = recompute.enclosing(names[0], recomputed)
    _check_quantization(units.values(), quantization)
    if accumulates_sharded is None:
        accumulates_sharded = row.pools_gradients and not defers_replicate
    runtime = build.start_runtime(
        model,
        build.nest(units),
        row,
        comms,
        accumulates_sharded=accumulates_sharded,
        defers_replicate=defers_replicate,
        num_gradient_buffers=num_gradient_buffers,
    )
    runtime.ignored = ignored
    runtime.recomputed = recomputed
    runtime.keeps = tuple(recompute_policy.save) if recompute_policy is not None else ()
    return runtime


def _reshards(value: str | bool | int, *, default: bool) -> tuple[bool, int | None]:  # noqa: FBT001 - as users write it
    """Whether a unit is released after its forward, and over how many ranks it then stays sharded."""
    if isinstance(value, str):
        return default, None
    return (value, None) if isinstance(value, bool) else (True, value)


def _check_quantization(units: Iterable[Unit], quantization: Quantization) -> None:
    """Refuse a wish that comes to nothing."""
    is_held = any(group.held_as is not None for unit in units for group in unit.groups)
    if quantization.frozen != "none" and not is_held:
        raise PlanError(
            f"quantize_frozen={quantization.frozen!r}, but the model has no frozen weight of a linear layer that would"
            " become smaller.\n  Freeze weights first (requires_grad_(False)), or leave quantize_frozen out."
        )


def fully_shard(
    module: nn.Module,
    *,
    mesh: dist.ProcessGroup | dist.DeviceMesh | None = None,
    reshard_after_forward: str | bool | int = "auto",
    mp_policy: PrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | str = "none",
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> nn.Module:
    """Make ``module`` a unit of its own, as FSDP2's function of this name: children first, the root last.

    Parameters below ``module`` that earlier calls have made units stay with those; the rest is this unit's. The module
    keeps its class and gains ``unshard()``, ``reshard()`` and ``set_requires_gradient_sync(bool)``.

    Args:
        module: Any module with plain dense parameters on one device.
        mesh: The ranks to shard over: a process group, a ``DeviceMesh``, or ``None`` for the world. A mesh of two
            dimensions is (replicate, shard): hybrid sharding. The outermost call takes the mesh of those inside.
        reshard_after_forward: Release the parameters between forward and backward. ``"auto"``: yes, but not for the
            outermost unit. A number: keep them sharded over so many neighbouring ranks.
        mp_policy: In which dtypes this unit computes and reduces; ``None``: its own. Units below keep theirs.
        offload_policy: What of this unit is kept on the host: ``"none"``, ``"cpu"`` or an ``OffloadPolicy``.
        ignored_params: Parameters that are left alone (``ParallelPlan.ignored``), of other modules too. As with FSDP2,
            a call for an enclosing module takes them unless they are ignored there as well.

    Returns:
        ``module`` itself.

    Collective:
        Compares the values over the ranks and sends rank 0's where they differ. All ranks must call, in one order.

    Raises:
        MeshError: The mesh cannot be sharded over.
        PlanError: An argument is not possible here.
        StateError: A parameter is used both inside a unit made earlier and outside of it (tied weights).
    """
    if mp_policy is not None and mp_policy.overrides:
        raise PlanError(
            "fully_shard(mp_policy=...) takes the policy of one unit, without overrides.\n"
            "  Call fully_shard on the modules that differ first, each with its policy; or use sw.parallelize."
        )
    children = _units_below(module)
    inside = {id(parameter) for parameter in module.parameters()}
    ignored = find_ignored(module, [p for p in ignored_params or () if id(p) in inside])
    fresh = build.assign_parameters(module, [], ignored)[""]
    held = {
        id(shard): (build.name_below(path, unit.name), unit)
        for path, runtime in children.items()
        for unit in runtime.units
        for group in unit.groups
        for shard in group.shards
    }
    own = [entry for entry in fresh if id(entry.parameter) not in held]
    for entry in fresh:
        if id(entry.parameter) not in held:
            continue
        name, unit = held[id(entry.parameter)]
        inside = {id(owner.module()) for owner in unit.owners}
        outside = [use for (user, _, _), use in zip(entry.uses, entry.names, strict=True) if id(user) not in inside]
        if outside:
            raise StateError(
                f"parameter {outside[0]!r} is tied to one of unit {name!r}, which does not cover all its uses.\n"
                "  Use sw.parallelize(model, plan), which finds the lowest unit that covers them, or do not make that"
                " module a unit."
            )
    build.check_parameters(own)
    offload = _unit_offload(offload_policy, own)
    device = next((e.parameter.device for e in fresh), torch.device("cpu"))
    reshards, inner_size = _reshards(reshard_after_forward, default=False)
    comms = _comms_for(mesh, device, children.values())
    if inner_size is not None:
        check_inner_size(inner_size, comms.gather.size)
    synchronise(module, {id(entry.parameter) for entry in own}, comms.control, mode="warn")
    row = PRESETS["hsdp" if comms.replicate is not None else "zero3"]
    explicit = None if isinstance(reshard_after_forward, str) else reshards
    optimizer.install_checks()
    policies = precision.Policies(module, mp_policy or FULL_PRECISION, comms.gather.device)
    policies.cast_buffers(module)
    policies.install_casts(module, [])
    unit = build.make_unit(
        {"": module},
        {"": own},
        row,
        comms,
        reshards=reshards,
        inner_size=inner_size,
        policies=policies,
        offload=offload,
    )
    units: dict[str, Unit] = {"": unit}
    for path, runtime in children.items():
        runtime.remove()
        for child in runtime.units:
            build.rename(child, path)
            if child is runtime.units[0] and child.reshards_if_nested is not False:
                child.reshards_after_forward = True
            units[child.name] = child
    unit.reshards_if_nested = explicit
    runtime = build.start_runtime(
        module,
        build.nest(units),
        row,
        comms,
        accumulates_sharded=True,
        num_gradient_buffers=NUM_GRADIENT_BUFFERS,
    )
    runtime.ignored = ignored
    _add_methods(module)
    return module


def _comms_for(
    mesh: dist.ProcessGroup | dist.DeviceMesh | None, device: torch.device, children: Iterable[Runtime]
) -> Comms:
    """The Comms of units below, or new ones over ``mesh``."""
    place = Place.of(mesh, device)
    below = next((runtime.comms for runtime in children), None)
    if below is None:
        return place.open(device, is_replicated=isinstance(mesh, dist.DeviceMesh) and mesh.ndim == 2)
    if mesh is not None and (place.mesh.dp_replicate, place.mesh.dp_shard) != tuple(below.sizes.values()):
        raise MeshError(
            f"the mesh is {place.mesh}, but units below lie on {' x '.join(f'{k}={n}' for k, n in below.sizes.items())}"
            ".\n  Give every call of sw.fully_shard on a model the same mesh."
        )
    return below


def _unit_offload(given: OffloadPolicy | str, owned: Sequence[build.OwnedParameter]) -> OffloadPolicy | None:
    """What ``fully_shard(offload_policy=...)`` means for one unit."""
    policy = parse_offload(given)
    if policy is None:
        return None
    if policy.ratio != 1:
        raise PlanError(
            f"fully_shard(offload_policy=...) with ratio={policy.ratio}: a ratio chooses among the units of a model.\n"
            "  Give the policy to the units that are to be offloaded, or use sw.parallelize."
        )
    choose_units({build.ROOT: owned}, PRESETS["zero3"], policy)
    return policy


def _units_below(module: nn.Module) -> dict[str, Runtime]:
    """The outermost runtimes below ``module``, by path."""
    if attach.attachment_of(module) is not None:
        raise StateError(
            f"{type(module).__name__} is a unit already.\n  Call sw.fully_shard once per module, children first."
        )
    found: dict[str, Runtime] = {}
    for path, child in module.named_modules():
        attachment = attach.attachment_of(child)
        if attachment is None or any(path.startswith(f"{other}.") for other in found):
            continue
        refuse(attachment.runtime, "sw.fully_shard() of what encloses a trained model")
        found[path] = attachment.runtime
    return found


def _add_methods(module: nn.Module) -> None:
    methods = module.__dict__
    attachment = attach.attachment_of(module)
    assert attachment is not None
    methods["unshard"] = _UnitMethod(module, "unshard")
    methods["reshard"] = _UnitMethod(module, "reshard")
    methods["set_requires_gradient_sync"] = _UnitMethod(module, "set_requires_gradient_sync")


class _UnitMethod(attach.Uncopyable):
    """A method that ``fully_shard`` adds to a module; it holds the module's attachment by weak reference."""

    def __init__(self, module: nn.Module, name: str) -> None:
        import weakref

        self._module = weakref.ref(module)
        self._name = name

    def __call__(self, *args: bool) -> None:
        module = self._module()
        attachment = attach.attachment_of(module) if module is not None else None
        if attachment is None:
            return
        runtime, unit = attachment.runtime, attachment.unit
        if self._name == "unshard":
            runtime.unshard_now(unit)
        elif self._name == "reshard":
            runtime.reshard_now(unit)
        else:
            if not args[0]:
                refuse(runtime, "set_requires_gradient_sync(False)")
            runtime.syncs_gradients = bool(args[0])


@contextlib.contextmanager
def gradient_sync(model: nn.Module, is_enabled: bool) -> Iterator[None]:  # noqa: FBT001 - the public contract
    """Accumulate gradients: put all backwards but the last of a step into ``with sw.gradient_sync(model, False)``.

    * accumulation ``sharded`` (zero2, shard_grad_op, zero3): each backward is reduced into the shard as always:
      the sum over ranks of each microbatch is divided by the number of ranks, then added.
    * accumulation ``unsharded`` (ddp, zero1): inside, no gradient is sent; each rank adds up its microbatches in
      full-size buffers, and the backward outside reduces the sums and divides them by the number of ranks.
    * accumulation ``defer_replicate``: inside, each backward is summed over ``dp_shard`` and added to the sum of the
      microbatches before; the backward outside also sums over ``dp_replicate`` and divides by the number of ranks.

    Between the first backward inside and the one outside, parameters must not change: gathered copies are reused. Sums
    that wait for their reduction are not in ``.grad``: ``zero_grad()`` does not drop them, and ``optimizer.step()`` is
    refused while there are any.

    Collective:
        None by itself. All ranks must use it alike.
    """
    runtime = attach.runtime_of(model, "sw.gradient_sync", on_shards=False)
    if not is_enabled:
        refuse(runtime, "sw.gradient_sync(model, False)")
    before, runtime.syncs_gradients = runtime.syncs_gradients, is_enabled
    try:
        yield
    finally:
        runtime.syncs_gradients = before


def logical_shape(parameter: Tensor) -> torch.Size:
    """The shape that a parameter has in the plain model, for a shard and for any other tensor."""
    mark = attach.mark_of(parameter)
    group = mark.group if mark is not None else None
    if mark is None or group is None:
        return parameter.shape
    return torch.Size(group.layout.params[mark.index].shape)


@contextlib.contextmanager
def record_collectives(model: nn.Module) -> Iterator[list[CollectiveEvent]]:
    """Collect an event for every collective of this model, in the order of issue on this rank.

    ``sent_bytes`` of an event is complete once the collective has finished; after ``backward()`` all of its are.
    """
    runtime = attach.runtime_of(model, "sw.record_collectives", on_shards=False)
    events: list[CollectiveEvent] = []
    with contextlib.ExitStack() as stack:
        for comm in [*runtime.comms, *batch_norm.comms_of(model)]:
            stack.enter_context(comm.record(events))
        yield events
