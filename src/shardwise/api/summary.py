"""The readable summary of a parallelized model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.api.shard import Description
from shardwise.comm.dtype import dtype_name
from shardwise.engine.engine import Engine
from shardwise.engine.extensions.module_buffers import BufferSync
from shardwise.engine.extensions.pipeline_step import StageUnits
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.ignored import ignored_of
from shardwise.engine.unit import Unit
from shardwise.optim.in_backward import optimizers_in_backward
from shardwise.spec.extent import describe_cuts, list_alike
from shardwise.spec.granularity import ELEMENT
from shardwise.spec.layout import ParamSpec, flat_ranges, rank_bytes
from shardwise.spec.memory.footprint import Footprint, Replicas, StateBytes, footprint
from shardwise.spec.order import units_in
from shardwise.spec.shown import Page, Shown
from shardwise.spec.slice import simplest, slice_of
from shardwise.spec.traffic.data import (
    Collective,
    held_bytes,
    step_trace,
    sync_trace,
    window_order,
    window_trace,
)
from shardwise.spec.unit_facts import GroupFacts, UnitFacts


@dataclass(frozen=True)
class GroupSummary:
    """One group: its parameters (name, logical shape, number of elements on this rank), dtypes and padding.

    The logical shape is the unsharded shape. ``slices`` says, by name, which part this rank's ``tp`` coordinate holds.
    """

    parameters: tuple[tuple[str, tuple[int, ...], int], ...]
    dtype: str
    compute_dtype: str
    reduce_dtype: str
    is_trainable: bool
    numel: int
    shard_numel: int
    padding_numel: int
    is_resident: bool
    held_as: str | None = None
    sent_as: str | None = None
    reduced_as: str | None = None
    is_offloaded: bool = False
    slices: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def dtypes(self) -> str:
        """``fp32``, or ``fp32>bf16>fp32`` for master, compute and reduce dtype if they differ, and quantized forms."""
        every = (self.dtype, self.compute_dtype, self.reduce_dtype)
        shown = self.dtype if len(set(every)) == 1 else ">".join(every)
        stored = f", held as {self.held_as}" if self.held_as else ""
        sent = f", sent as {self.sent_as}" if self.sent_as else ""
        return (
            shown + stored + sent + (f", reduced as {self.reduced_as}" if self.reduced_as and self.is_trainable else "")
        )


@dataclass(frozen=True)
class UnitSummary:
    """One unit."""

    name: str
    type_name: str
    depth: int
    reshards_after_forward: bool
    inner_size: int | None
    groups: tuple[GroupSummary, ...]


@dataclass(frozen=True, repr=False)
class Summary(Shown):
    """The result of :func:`summary`; ``str()`` is for reading.

    Attributes:
        units: Units, outermost first.
        rank, world_size: This rank among the data-parallel ranks, and their number.
        mesh: Sizes of the data-parallel axes.
        placements: How parameters, gradients and optimizer state are placed, in words.
        granularity: The smallest part of a parameter that sharding does not divide.
        imbalance: Sharded bytes of the rank with the most over the mean of all ranks; 1 if nothing is sharded.
        num_idle_ranks: Number of ranks that own no sharded bytes.
        footprint: Bytes on this rank by category.
        forward_order, backward_order: Names of the units in the order of their gathers; empty before the first step.
        num_wrong_prefetches: Number of gathers so far of units that this rank then did not run: prefetched, or gathered
            because other ranks run them.
        buffers: How the model's buffers are kept equal over the ranks.
        ignored: Names of the parameters that are not sharded.
        row_sharded: Logical shapes, by name, of embeddings whose rows are sharded over all ranks.
        recomputed: Names of the modules whose forward is recomputed in backward.
        offloaded: Names of the modules whose saved activations are kept on the host.
        keeps: Operators, by name or family, whose outputs are saved also in recomputed modules.
        updated: How parameters are updated, if not by a plain step of the optimizer.
        coordinate: This rank's position on ``pp``, ``cp`` and ``tp``, for axes with several ranks.
        notes: Further lines, such as the modules of each pipeline stage.
        world_rank, num_world_ranks: This rank and the number of ranks, over all axes.
    """

    units: tuple[UnitSummary, ...]
    rank: int
    world_size: int
    mesh: dict[str, int]
    placements: str
    granularity: str
    imbalance: float
    num_idle_ranks: int
    footprint: Footprint
    forward_order: tuple[str, ...]
    backward_order: tuple[str, ...]
    buffers: str
    num_wrong_prefetches: int = 0
    ignored: tuple[str, ...] = ()
    row_sharded: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    recomputed: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    updated: str = ""
    coordinate: dict[str, int] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    world_rank: int = 0
    num_world_ranks: int = 1

    @property
    def num_parameters(self) -> int:
        """Number of unsharded parameters of the model; with ``pp`` or ``ep`` of this rank's stage and experts."""
        shapes = [shape for unit in self.units for group in unit.groups for _, shape, _ in group.parameters]
        return sum(math.prod(shape) for shape in [*shapes, *self.row_sharded.values()])

    @property
    def _groups(self) -> str:
        """Sizes of the data-parallel axes, if there are several replicas."""
        replicas = self.mesh["dp_replicate"]
        if replicas == 1:
            return ""
        return f", {replicas} groups (dp_replicate) of {self.mesh['dp_shard']} (dp_shard)"

    @property
    def _is_product(self) -> bool:
        return self.num_world_ranks > self.world_size

    @property
    def _world(self) -> str:
        return f", rank {self.world_rank} of {self.num_world_ranks} in the world" if self._is_product else ""

    @property
    def _place(self) -> list[str]:
        """This rank's stage, part of a sequence and slice, in words."""
        words = {"pp": "pipeline stage", "cp": "part of each sequence", "tp": "slice"}
        shown = [f"{words[axis]} {at + 1} of {self.mesh[axis]} ({axis})" for axis, at in self.coordinate.items()]
        return [f"this rank holds {', '.join(shown)}"] if shown else []

    @property
    def _slices(self) -> list[str]:
        slices = {name: text for unit in self.units for group in unit.groups for name, text in group.slices.items()}
        lines = [f"  {line}" for line in list_alike(slices)]
        return ["slices that this rank's shards are of:", *lines] if lines else []

    def to_records(self) -> list[dict[str, Any]]:
        """Return a record for each group of a unit: ``parameters`` counts unsharded elements, ``owned`` this rank's."""
        return [
            {"unit": unit.name, "class": unit.type_name}
            | {name: getattr(group, name) for name in _COLUMNS}
            | {"parameters": sum(math.prod(shape) for _, shape, _ in group.parameters)}
            | {"owned": sum(count for _, _, count in group.parameters)}
            for unit in self.units
            for group in unit.groups
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, including those of units and groups."""
        return {"num_parameters": self.num_parameters, **dataclasses.asdict(self)}

    def page(self) -> Page:
        """Return units and bytes as readable text."""
        above = [
            (
                f"{self.num_parameters:,} parameters{' of this rank' * ('pp' in self.coordinate)} in {len(self.units)}"
                f" units on {self.world_size} {'data-parallel ' * self._is_product}ranks"
                f"{self._groups} (this is rank {self.rank}{self._world}); {self.placements}"
            ),
            *self._place,
        ]
        lines = []
        idle = f"; {self.num_idle_ranks} of {self.world_size} ranks own nothing" if self.num_idle_ranks else ""
        lines.append(f"cut by {self.granularity}: the fullest rank owns {self.imbalance:.3f} times the mean{idle}")
        lines.append(f"bytes on this rank: {self.footprint}")
        lines.append("gathered, reduce: the most at one moment, allocated while it is in use")
        lines.append(f"buffers: {self.buffers}")
        lines += [*self._slices, *self.notes]
        if self.ignored:
            more = f" and {len(self.ignored) - 8} more" if len(self.ignored) > 8 else ""
            lines.append(f"ignored (whole, this rank's own): {' '.join(self.ignored[:8])}{more}")
        if self.recomputed:
            exceptions = f", but for what {', '.join(self.keeps)} give" if self.keeps else ""
            lines.append(f"recomputed in backward: {' '.join(self.recomputed)}{exceptions}")
        if self.offloaded:
            lines.append(f"activations on the host: {' '.join(self.offloaded)}")
        if self.updated:
            lines.append(f"updated {self.updated}")
        if self.forward_order:
            lines.append(f"gathered in forward:  {' '.join(self.forward_order)}")
        if self.backward_order:
            lines.append(f"gathered in backward: {' '.join(self.backward_order)}")
        else:
            lines.append("order of gathers: recorded in the first step")
        if self.num_wrong_prefetches:
            lines.append(f"gathered, but not run on this rank: {self.num_wrong_prefetches:,} times so far")
        return Page(above, [_HEADER, *(row for unit in self.units for row in _rows(unit))], lines, words=(0, 1, 5))


_COLUMNS = ("padding_numel", "dtypes", "is_trainable", "is_resident")
_HEADER = ("unit", "class", "params", "this rank", "padding", "dtype")


def _rows(unit: UnitSummary) -> list[tuple[str, ...]]:
    """Return the table's rows for a unit, one for each group."""
    name = "  " * unit.depth + unit.name
    rows: list[tuple[str, ...]] = []
    for group in unit.groups:
        words = [group.dtypes] + ["frozen"] * (not group.is_trainable)
        words += ["replicated" if group.is_resident else "gathered"]
        words += ["kept after forward"] * (not unit.reshards_after_forward and not group.is_resident)
        words += [] if unit.inner_size is None else [f"then over {unit.inner_size} ranks"]
        words += ["on the host"] * group.is_offloaded
        numel = sum(math.prod(shape) for _, shape, _ in group.parameters)
        num_owned = sum(count for _, _, count in group.parameters)
        padding = f"{100 * group.padding_numel / max(group.numel, 1):.1f}%"
        rows.append((name, unit.type_name, f"{numel:,}", f"{num_owned:,}", padding, ", ".join(words)))
    return rows or [(name, unit.type_name, "0", "0", "", "-")]


def summary(model: nn.Module) -> Summary:
    """Summarize a parallelized model: units, shapes, dtypes, ownership, padding, bytes per rank and prefetch order.

    Collective:
        None: every rank summarizes its own part.
    """
    engine = engine_of(model, "sw.summary", on_shards=False)
    sharded = [
        group.layout for group in engine.groups if group.placements.shards_optimizer and group.layout.logical_numel
    ]
    owned = rank_bytes(sharded)
    policy, ignored = engine.options.recompute, ignored_of(engine)
    buffers = engine.extras.find(BufferSync)
    description = engine.extras.find(Description) or Description()
    return Summary(
        units=tuple(_unit(unit) for unit in engine.units),
        rank=engine.comms.control.rank,
        world_size=engine.comms.num_ranks,
        mesh=engine.comms.sizes,
        placements=engine.placements.describe(),
        granularity=str(sharded[0].granularity if sharded else ELEMENT),
        imbalance=max(owned) * len(owned) / sum(owned) if owned else 1.0,
        num_idle_ranks=owned.count(0),
        footprint=predict(engine),
        forward_order=tuple(engine.units[i].name for i in units_in(engine.orders.forward)),
        backward_order=tuple(engine.units[i].name for i in units_in(engine.orders.backward)),
        num_wrong_prefetches=engine.num_wrong_prefetches,
        buffers=str(buffers) if buffers is not None else "not synchronised",
        ignored=tuple(name for name in ignored.parameters if name not in ignored.row_sharded),
        row_sharded={n: part.shape for n, p in ignored.row_sharded_parameters.items() if (part := slice_of(p))},
        notes=description.notes,
        world_rank=engine.comms.world.rank,
        num_world_ranks=engine.comms.world.size,
        recomputed=description.recomputed,
        offloaded=description.offloaded,
        keeps=tuple(policy.save) if policy is not None else (),
        updated=_update(engine),
        coordinate={
            axis: comm.rank for axis in ("pp", "cp", "tp") if (comm := getattr(engine.comms, axis)) is not None
        },
    )


def _update(engine: Engine) -> str:
    """Say how ``flat_parameters``, ``optimizer_in_backward`` and offloading change the update; empty if they do not."""
    flat = [group for group in engine.groups if group.facts.flat_kinds is not None]
    count = sum(len(flat_ranges(group.pieces, group.facts.flat_kinds)) for group in flat if group.facts.flat_kinds)
    names = sum(piece.numel > 0 for group in flat for piece in group.pieces)
    how = [f"as {count} flat tensors instead of {names} by name"] if flat else []
    if optimizers_in_backward(engine) is not None:
        how += ["inside backward, unit by unit"]
        if any(group.facts.is_offloaded and group.wants_gradients for group in engine.groups):
            how += ["those on the host in a thread of their own"]
    return ", ".join(how)


def group_facts(engine: Engine) -> list[GroupFacts]:
    """Return the facts of every group, updated for parameters that were frozen or unfrozen since."""
    return [dataclasses.replace(group.facts, is_trainable=group.wants_gradients) for group in engine.groups]


def unit_facts(engine: Engine) -> dict[int, UnitFacts]:
    """Return the facts of every unit, by index."""
    facts: dict[int, list[GroupFacts]] = {}
    for group in group_facts(engine):
        facts.setdefault(group.unit, []).append(group)
    return {
        unit.index: UnitFacts(unit.name, unit.family, facts.get(unit.index, []), unit.recomputed_in, unit.ahead)
        for unit in engine.units
    }


def predict(
    engine: Engine, *, optimizer_tensors: float | StateBytes = 2, num_microbatches: int | None = None
) -> Footprint:
    """Predict the bytes of this rank in closed form, from the layouts alone.

    Args:
        engine: The model's engine.
        optimizer_tensors: Number of state tensors per parameter, or a function that returns each one's bytes.
        num_microbatches: Number of microbatches of a step, all but the last under ``gradient_sync(model, False)``;
            ``None``: as in the steps so far.
    """
    planned = {engine.window.mode} if num_microbatches is not None and num_microbatches > 1 else set()
    predicted = footprint(
        group_facts(engine),
        rank=engine.comms.gather.rank,
        backward_order=_reduction_order(engine) or None,
        num_gradient_buffers=engine.gradients.limit,
        optimizer_tensors=optimizer_tensors,
        has_receive_buffers=engine.comms.gather.device.type == "cpu",
        replicas=replicas_of(engine),
        accumulations=_accumulations(engine) if num_microbatches is None else planned,
        ignored=ignored_of(engine).specs,
    )
    return dataclasses.replace(predicted, reduce=predicted.reduce + _message_bytes(engine))


def _accumulations(engine: Engine) -> set[str]:
    """Return the modes of accumulation used so far. Repeated backwards that each synchronize count as ``sharded``."""
    seen = {engine.window.mode} if engine.backward.has_accumulated else set()
    return seen | ({"sharded"} if any(group.gradient.has_added for group in engine.groups) else set())


def _stages(engine: Engine) -> dict[int, list[int]]:
    """Return the indices of the units that belong to only one pipeline stage, by stage."""
    return {stage: [unit.index for unit in units] for stage, units in engine.extras.get_or_make(StageUnits).items()}


def _reduction_order(engine: Engine) -> Sequence[int]:
    """Return the order in which units are reduced; empty before the first step of a model without a pipeline."""
    if engine.comms.pp is None:
        return units_in(engine.orders.backward)
    return window_order((unit.index for unit in engine.units), _stages(engine))


def _message_bytes(engine: Engine) -> int:
    """Return the bytes of the messages in which the model's buffers are sent."""
    comm = engine.comms.control
    buffers = engine.extras.find(BufferSync)
    messages = buffers.messages() if buffers is not None else []
    return held_bytes(messages, rank=comm.rank, size=comm.size, has_receive_buffers=comm.device.type == "cpu")


def replicas_of(engine: Engine) -> Replicas | None:
    """Return the coordinate on ``dp_replicate``; ``None`` if the mesh has no such axis."""
    comms = engine.comms
    if comms.replicate is None:
        return None
    return Replicas(comms.num_replicas, comms.replica, is_deferred=engine.window.mode == "defer_replicate")


def predict_trace(
    engine: Engine, *, is_synchronising: bool = True, is_first_of_window: bool = True
) -> list[Collective]:
    """Predict the collectives of the next step on this rank, from the layouts and the recorded order alone.

    Covers the data-parallel axes. With a pipeline it assumes that units stay gathered during the step, the default.
    """
    buffers = engine.extras.find(BufferSync)
    messages = buffers.messages() if is_first_of_window and buffers is not None and buffers.is_due else []
    control = engine.comms.control
    before = sync_trace(messages, rank=control.rank, size=control.size, axis=control.axis)
    if engine.comms.pp is not None:
        return before + window_trace(
            unit_facts(engine),
            rank=engine.comms.gather.rank,
            stages=_stages(engine),
            is_synchronising=is_synchronising,
            replicas=replicas_of(engine),
        )
    return before + step_trace(
        unit_facts(engine),
        rank=engine.comms.gather.rank,
        forward_order=units_in(engine.orders.forward) or [unit.index for unit in engine.units],
        backward_order=units_in(engine.orders.backward),
        is_synchronising=is_synchronising,
        is_first_of_window=is_first_of_window,
        replicas=replicas_of(engine),
    )


def _unit(unit: Unit) -> UnitSummary:
    groups = []
    for group in unit.groups:
        owned = {piece.index: piece.numel for piece in group.pieces}
        groups.append(
            GroupSummary(
                parameters=tuple(
                    (spec.name, spec.logical_shape, owned.get(index, 0))
                    for index, spec in enumerate(group.layout.params)
                ),
                dtype=dtype_name(group.dtype),
                compute_dtype=dtype_name(group.compute_dtype),
                reduce_dtype=dtype_name(group.reduce_dtype),
                is_trainable=group.facts.is_trainable,
                numel=group.layout.numel,
                shard_numel=group.layout.slice_numel(group.rank),
                padding_numel=group.layout.padding_numel,
                is_resident=group.is_resident,
                held_as=group.facts.stored_as,
                sent_as=group.facts.gathered_as,
                reduced_as=group.facts.reduced_as,
                is_offloaded=group.facts.is_offloaded,
                slices={spec.name: _slice(spec) for spec in group.layout.params if spec.slice is not None},
            )
        )
    return UnitSummary(
        unit.name, unit.type_name, unit.depth, unit.reshards_after_forward, unit.inner_size, tuple(groups)
    )


def _slice(spec: ParamSpec) -> str:
    part = spec.slice
    assert part is not None
    text = describe_cuts(part.shape, simplest(part.shape, part.cuts)) if part.cuts else f"all of {list(part.shape)}"
    return text + (f", copy {part.copy + 1} of {part.copies}" if part.copies > 1 else "")
