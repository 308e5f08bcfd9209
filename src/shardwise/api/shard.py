"""Builds the engine of a model from its units, with everything that attaches to the engine."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.api.preparation import Preparation
from shardwise.comm.axes import Comms
from shardwise.comm.base import Comm
from shardwise.engine import build
from shardwise.engine.engine import Engine
from shardwise.engine.extensions import activation_offload, batch_norm, guard, precision, recompute, safety
from shardwise.engine.extensions.module_buffers import BufferSync
from shardwise.engine.extensions.wrap import (
    assign_parameters,
    assign_ranks,
    check_parameters,
    kind_of,
    merge_units,
    refuse_embeddings,
)
from shardwise.engine.storage import form_of, heap
from shardwise.engine.storage.attachment import attach, mark_shards
from shardwise.engine.storage.host import choose_units
from shardwise.engine.storage.ignored import NOTHING, Ignored, ignored_of
from shardwise.engine.storage.part import Part, RestoresParts, set_shard_class
from shardwise.engine.unit import Unit
from shardwise.optim import checks
from shardwise.spec.granularity import TENSOR
from shardwise.spec.placement import Placements
from shardwise.spec.replacement import Replacement
from shardwise.spec.unit_facts import EngineOptions
from shardwise.weights.init.materialize import Source, fill_parameters


def shard_model(
    model: nn.Module, prepared: Preparation, comms: Comms, options: EngineOptions, *, source: Source | None = None
) -> Engine:
    """Make ``model`` a tree of units, in place. All ranks must already have the same values (``weights.init.sync``).

    ``prepared`` describes this rank's part of the model. ``source`` gives meta parameters their values, unit by unit.

    Raises:
        StateError: The model contains something that cannot be sharded.
    """
    checks.install_checks()
    if comms.gather.device.type == "cpu":
        heap.keep_freed_memory()
    placements, ignored, policies = prepared.plan.placements, prepared.unsharded, prepared.policies
    unit_modules = prepared.units
    owned = assign_parameters(model, unit_modules, ignored)
    allows_meta = source is not None or comms.gather.device.type == "meta"
    every = [entry for entries in owned.values() for entry in entries]
    check_parameters(every, allows_meta=allows_meta)
    if comms.num_ranks > 1:
        refuse_embeddings(every)
    merged = merge_units(
        model,
        unit_modules,
        owned,
        policies=policies,
        quantization=options.quantization,
        comm=comms.gather,
        limit=options.merge_limit,
    )
    content = {names: [entry for name in names for entry in owned[name]] for names in merged}
    on_host = choose_units(content, placements, options.offload) if options.offload is not None else set()
    policies.cast_buffers(model, ignored.buffers)
    policies.install_casts(model, unit_modules)
    recompute.install(prepared.recomputed, options.recompute)
    offloaded = activation_offload.install(prepared.offloaded, options.activation_offload, device=comms.gather.device)
    modules = {"": model, **unit_modules}
    ranks = assign_ranks(owned.values(), placements, comms) if options.granularity == TENSOR else {}
    make_unit = unit_maker(placements, comms, options, policies)
    units: dict[str, Unit] = {}
    for names, entries in content.items():
        if source is not None:
            fill_parameters(source.parameters, entries, comms.gather.device)
        units[names[0]] = make_unit(
            {name: modules[name] for name in names},
            owned,
            ranks=ranks,
            offload=options.offload if names in on_host else None,
            is_divided=bool(ignored.row_sharded),
        )
        units[names[0]].recomputed_in = recompute.enclosing(names[0], prepared.recomputed)
    engine = start(model, nest(units.values()), placements, comms, options, ignored=ignored)
    if offloaded is not None:
        engine.extras.add(offloaded)
    engine.extras.add(Description(recomputed=tuple(prepared.recomputed), offloaded=tuple(prepared.offloaded)))
    return engine


def unit_maker(
    placements: Placements, comms: Comms, options: EngineOptions, policies: precision.Policies
) -> Callable[..., Unit]:
    """Bind :func:`engine.build.make_unit` to a model's dtypes, and to the forms and gradients of ``engine.storage``."""
    return functools.partial(
        build.make_unit,
        placements=placements,
        comms=comms,
        options=options,
        kind_of=lambda entry: kind_of(entry, policies, options.quantization),
        form_of=form_of,
        as_part=Part.of_gradient,
    )


def start(
    root: nn.Module,
    units: Sequence[Unit],
    placements: Placements,
    comms: Comms,
    options: EngineOptions,
    *,
    ignored: Ignored = NOTHING,
) -> Engine:
    """Build the engine of ``units`` with the guards of every model. Extensions attached later run before the guards."""
    mark_shards(units)
    engine = build.start_engine(units, placements, comms, options)
    attach(engine)
    set_shard_class(engine.groups)
    engine.extras.add(ignored)
    guard.install_guards(root, engine)
    guard.refuse_wrappers(root)
    for observer in (
        guard.InsideDDP(),
        checks.RefusesAdded(engine),
        RestoresParts(),
        safety.ForeignBackwards(),
        safety.SavedTensors(),  # must be the last that can refuse a forward
        safety.LostWrites(root),
    ):
        engine.extras.add(observer)
    return engine


def nest(units: Iterable[Unit]) -> list[Unit]:
    """Set every unit's parent from the paths; return the units outermost first, in order of registration."""
    units = list(units)
    for unit in units:
        above = {
            place: other for other in units if other is not unit and (place := _place_above(other, unit)) is not None
        }
        unit.parent = above[max(above, key=len)] if above else None
    return [unit for unit in units if unit.parent is None] + [unit for unit in units if unit.parent is not None]


def _place_above(outer: Unit, unit: Unit) -> str | None:
    """Return the path of the member of ``outer`` that contains ``unit``, or its first member; ``None`` if none does."""
    paths = [member.path for member in outer.members]
    if paths == [""]:
        return ""
    if not all(any(build.is_below(member.path, path) for path in paths) for member in unit.members):
        return None
    return next(path for path in paths if build.is_below(unit.path, path))


@dataclass
class Description:
    """Facts for a model's summary that its engine does not store.

    Attributes:
        recomputed: Names of the modules whose forward is recomputed in backward.
        offloaded: Names of the modules whose saved activations are kept on the host.
        notes: Further lines.
    """

    recomputed: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def finish(model: nn.Module, engine: Engine, open_samples: Callable[[], Comm], *, sync_buffers: str) -> None:
    """Attach the sync of buffers, connect batch norm over all ranks, and keep ``generate()`` in step over the ranks.

    ``open_samples`` opens a Comm over the ranks that read different samples; called only if some batch norm needs it.

    Collective:
        As ``open_samples``, if it is called.
    """
    buffers = BufferSync(model, sync_buffers, engine.comms.control, ignored_of(engine).buffers)
    engine.extras.add(buffers, is_first=True)
    engine.extras.before_state.insert(0, buffers.sync)
    batch_norm.connect(model, open_samples)
    if engine.comms.num_ranks > 1:
        keep_in_step(model)


def keep_in_step(model: nn.Module) -> None:
    """Make ``generate``, of the model or a submodule, call its model equally often on every rank."""
    for module in model.modules():
        generate = getattr(type(module), "generate", None)
        if not callable(generate):
            continue
        module.__dict__["_is_fsdp_managed_module"] = True
        argument = inspect.signature(generate).parameters.get("synced_gpus")
        if argument is not None and argument.default is False:
            _Synced(module, "generate").install()


class _Synced(Replacement):
    """Calls ``model.generate`` with ``synced_gpus=True`` unless the caller sets it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "synced_gpus" not in self.__signature__.bind_partial(*args, **kwargs).arguments:
            kwargs["synced_gpus"] = True
        return self.original(*args, **kwargs)
