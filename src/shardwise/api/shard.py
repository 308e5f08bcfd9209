"""From a model and its units to the engine, with everything that attaches to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import nn

from shardwise.comm.axes import Comms
from shardwise.comm.base import Comm
from shardwise.engine import build, start
from shardwise.engine.engine import Engine
from shardwise.engine.options import EngineOptions
from shardwise.engine.unit import Unit
from shardwise.features import batch_norm, precision, recompute
from shardwise.features.generate_calls import keep_in_step
from shardwise.features.module_buffers import BufferSync
from shardwise.forms.host import choose_units
from shardwise.init.materialize import Source, fill_parameters
from shardwise.optim import checks
from shardwise.spec.errors import PlanError
from shardwise.spec.granularity import TENSOR
from shardwise.spec.placement import Placements
from shardwise.spec.quantize import Quantization


def shard_model(
    model: nn.Module,
    unit_modules: Mapping[str, nn.Module],
    row: Placements,
    comms: Comms,
    options: EngineOptions,
    *,
    source: Source | None = None,
) -> Engine:
    """Turn ``model`` into units, in place. Every rank must hold the same values already (``init.sync``).

    Args:
        model: The root.
        unit_modules: The other units, by qualified name.
        row: Placements of the strategy.
        comms: For gathers and for reductions, on each axis.
        options: How the engine is to work.
        source: Gives meta parameters their values, unit by unit.

    Raises:
        PlanError: There is nothing to quantize, or nothing to offload.
        StateError: The model holds something that cannot be sharded.
    """
    checks.install_checks()
    owned = build.assign_parameters(model, unit_modules, options.ignored)
    allows_meta = source is not None or comms.gather.device.type == "meta"
    build.check_parameters((entry for entries in owned.values() for entry in entries), allows_meta=allows_meta)
    policies = precision.Policies(model, options.policy, comms.gather.device)
    merged = build.merge_units(
        model,
        unit_modules,
        owned,
        policies=policies,
        quantization=options.quantization,
        comm=comms.gather,
        limit=options.merge_limit,
    )
    content = {names: [entry for name in names for entry in owned[name]] for names in merged}
    on_host = choose_units(content, row, options.offload) if options.offload is not None else set()
    policies.cast_buffers(model, options.ignored.buffers)
    policies.install_casts(model, unit_modules)
    recomputed = recompute.install(model, unit_modules, options.recompute)
    modules = {"": model, **unit_modules}
    ranks = build.assign_ranks(owned.values(), row, comms) if options.granularity == TENSOR else {}
    units: dict[str, Unit] = {}
    for names, entries in content.items():
        if source is not None:
            fill_parameters(source, entries, comms.gather.device)
        units[names[0]] = build.make_unit(
            {name: modules[name] for name in names},
            owned,
            row,
            comms,
            options,
            policies=policies,
            ranks=ranks,
            is_offloaded=names in on_host,
        )
        units[names[0]].recomputed_in = recompute.enclosing(names[0], recomputed)
    _check_quantization(units.values(), options.quantization)
    engine = start.start_engine(model, start.nest(units.values()), row, comms, options)
    engine.recomputed = recomputed
    return engine


def _check_quantization(units: Iterable[Unit], quantization: Quantization) -> None:
    """Refuse a wish that comes to nothing."""
    is_held = any(group.held_as is not None for unit in units for group in unit.groups)
    if quantization.frozen != "none" and not is_held:
        raise PlanError(
            f"quantize_frozen={quantization.frozen!r}, but the model has no frozen weight of a linear layer that would"
            " become smaller.\n  Freeze weights first (requires_grad_(False)), or leave quantize_frozen out."
        )


def finish(model: nn.Module, engine: Engine, open_samples: Callable[[], Comm], *, sync_buffers: str) -> None:
    """Keep buffers equal over the ranks, connect batch norm over all ranks, and keep ``generate()`` in step.

    Args:
        model: The root.
        engine: Its engine.
        open_samples: Opens a Comm over the ranks that have samples of their own, where some batch norm needs one.
        sync_buffers: As ``ParallelPlan.sync_buffers``.

    Collective:
        As ``open_samples``, where it is called.
    """
    engine.buffers = BufferSync(model, sync_buffers, engine.comms.control, engine.ignored.buffers)
    batch_norm.connect(model, open_samples)
    if engine.comms.num_ranks > 1:
        keep_in_step(model)
