"""From a model and its units to the engine, and what users call on a parallelized module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from shardwise.comm.axes import Comms
from shardwise.comm.base import CollectiveEvent
from shardwise.engine import attach, build, start
from shardwise.engine.engine import Engine
from shardwise.engine.options import EngineOptions
from shardwise.engine.unit import Unit
from shardwise.features import batch_norm, precision, recompute
from shardwise.features.in_backward import refuse
from shardwise.forms.host import choose_units
from shardwise.init.materialize import Source, fill_parameters
from shardwise.optim import checks
from shardwise.spec.errors import PlanError
from shardwise.spec.granularity import TENSOR
from shardwise.spec.placement import Placements
from shardwise.spec.quantize import Quantization
from shardwise.spec.slice import slice_of


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


def data_parallel_rank(model: nn.Module) -> int:
    """Which share of the samples this rank reads, from 0 to :func:`data_parallel_size` - 1.

    A sampler of one's own divides the samples by these two, and a program seeds dropout by it: ranks that differ on
    ``tp``, ``cp`` or ``pp`` alone compute one model together, from the same samples. Talks to nobody.

    Raises:
        StateError: The model is not parallelized.
    """
    return attach.engine_of(model, "sw.data_parallel_rank").comms.reader[0]


def data_parallel_size(model: nn.Module) -> int:
    """Shares of the samples: ``dp_replicate * dp_shard``. Talks to nobody.

    Raises:
        StateError: The model is not parallelized.
    """
    return attach.engine_of(model, "sw.data_parallel_size").comms.reader[1]


@contextlib.contextmanager
def gradient_sync(model: nn.Module, is_enabled: bool) -> Iterator[None]:  # noqa: FBT001 - the public contract
    """Accumulate gradients: put all backwards but the last of a step into ``with sw.gradient_sync(model, False)``.

    * accumulation ``sharded`` (zero2, shard_grad_op, zero3): each backward is reduced into the shard as always:
      the sum over ranks of each microbatch is divided by the number of ranks, then added.
    * accumulation ``unsharded`` (ddp, zero1, ``sw.fully_shard``): inside, no gradient is sent; each rank adds up its
      microbatches in full-size buffers, and the backward outside reduces the sums and divides them by the number of
      ranks.
    * accumulation ``defer_replicate``: inside, each backward is summed over ``dp_shard`` and added to the sum of the
      microbatches before; the backward outside also sums over ``dp_replicate`` and divides by the number of ranks.

    Between the first backward inside and the one outside, parameters must not change: gathered copies are reused. Sums
    that wait for their reduction are not in ``.grad``: reading it raises, and so do ``checks.step()`` and
    ``sw.clip_grad_norm`` while there are any. ``zero_grad()`` of the model, or of an optimizer over a part of it, drops
    them as on one process: the microbatches so far are given up. All ranks must call it. With accumulation
    ``unsharded`` a rank that alone calls it drops what it has added up itself.

    Collective:
        None by itself. All ranks must use it alike.
    """
    engine = attach.engine_of(model, "sw.gradient_sync", on_shards=False)
    if not is_enabled:
        refuse(engine, "sw.gradient_sync(model, False)")
    before, engine.syncs_gradients = engine.syncs_gradients, is_enabled
    try:
        yield
    finally:
        engine.syncs_gradients = before


def logical_shape(parameter: Tensor) -> torch.Size:
    """The shape that a parameter has in the plain model, for a shard or a slice and for any other tensor."""
    mark = attach.mark_of(parameter)
    group = mark.group if mark is not None else None
    if mark is None or group is None:
        held = slice_of(parameter)
        return parameter.shape if held is None else torch.Size(held.shape)
    return torch.Size(group.layout.params[mark.index].logical_shape)


@contextlib.contextmanager
def record_collectives(model: nn.Module) -> Iterator[list[CollectiveEvent]]:
    """Collect an event for every collective of this model, in the order of issue on this rank.

    ``sent_bytes`` of an event is complete once the collective has finished; after ``backward()`` all of its are.
    ``data_parallel`` and ``sw.DataParallel`` communicate with no other process: their events, on the axis ``devices``,
    are the exchanges between the first replica and the others.
    """
    recorder = attach.recorder_of(model)
    recorders = [recorder] if recorder is not None else []
    if recorder is None or attach.attachment_of(model) is not None:
        engine = attach.engine_of(model, "sw.record_collectives", on_shards=False)
        recorders += [*engine.comms, *batch_norm.comms_of(model)]
    events: list[CollectiveEvent] = []
    with contextlib.ExitStack() as stack:
        for each in recorders:
            stack.enter_context(each.record(events))
        yield events
