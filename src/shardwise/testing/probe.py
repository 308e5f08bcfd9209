"""An engine's state and history, for tests. Tests read the inside of a parallelized model only through a probe.

::

    model = sw.parallelize(build(), sw.ParallelPlan(strategy="zero3"))
    with sw.record_collectives(model) as events:
        model(x).sum().backward()
    seen = probe(model)
    assert [tuple(event) for event in events] == seen.predicted_collectives()
    for shard in seen.shards:
        assert torch.equal(shard.values, shard.part_of(plain_values[shard.name]))

A probe reads the live engine: results show the state at the time of the call. It changes nothing and sends nothing, and
is valid as long as the model exists.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.api.summary import predict, predict_trace, replicas_of, unit_facts
from shardwise.comm.dtype import memory_order
from shardwise.engine.extensions import safety
from shardwise.engine.group import Group
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.flat_parameters import states_by_name
from shardwise.engine.storage.ignored import ignored_of
from shardwise.engine.storage.part import plain_of
from shardwise.engine.storage.waiting import WaitingGradient
from shardwise.engine.unit import State, Unit
from shardwise.measure.storage import held_bytes
from shardwise.parallel.pipeline.pipelined import pipelined_of
from shardwise.parallel.tensor.apply import copy_part
from shardwise.sim.step import UnitSeconds, simulate_facts
from shardwise.sim.streams import Timeline
from shardwise.spec.extent import Extent
from shardwise.spec.order import units_in
from shardwise.spec.placement import Placements
from shardwise.spec.slice import Slice
from shardwise.spec.traffic.data import Collective
from shardwise.spec.unit_facts import UnitFacts
from shardwise.weights.state.model import load_targets, owned_extents
from shardwise.weights.state.optimizer import optimizer_extents

#: Inside ``with checks():`` released memory is filled with NaN, and saved tensors are checked in every step. Slow.
checks = safety.checks


def probe(model: nn.Module) -> Probe:
    """Make a probe of a parallelized model.

    Raises:
        StateError: The module is not parallelized.
    """
    return Probe(model)


class Shard:
    """One parameter on this rank.

    Attributes:
        name: Full name in the plain model.
        unit: Name of the parameter's unit.
        parameter: The parameter object in the module and in the optimizer, with this rank's elements.
        whole: The unsharded parameter, which replaces ``parameter`` in the module while the unit computes. It has
            memory only then.
        start: First element of this rank's range of the parameter, in memory order.
        stop: End of this range.
        shape: Shape of the unsharded parameter on this rank, after cuts by tensor or expert parallelism.
        stride: Strides of the unsharded parameter if it is not contiguous, else ``None``.
        held_as: Form of a quantized frozen parameter (``ParallelPlan.quantize_frozen``); ``None``: its dtype.
    """

    def __init__(self, group: Group, index: int) -> None:
        spec, piece = group.layout.params[index], group.pieces[index]
        self.name, self.unit = spec.name, group.unit.name
        self.parameter: nn.Parameter = group.shards[index]
        self.whole: nn.Parameter = group.unsharded[index]
        self.start, self.stop = piece.start, piece.stop
        self.shape, self.stride = spec.shape, spec.stride
        self._cuts = spec.slice
        self.held_as = group.facts.stored_as

    @property
    def numel(self) -> int:
        """Elements on this rank."""
        return self.stop - self.start

    @property
    def values(self) -> Tensor:
        """A flat view of this rank's elements, in memory order."""
        return memory_order(plain_of(self.parameter))

    @property
    def grad(self) -> Tensor | None:
        """A flat view of these elements' gradients, in memory order; ``None`` while :attr:`waits`."""
        return None if self.parameter.grad is None or self.waits else memory_order(plain_of(self.parameter.grad))

    @property
    def waits(self) -> bool:
        """Whether a sum of microbatches has not been reduced yet, so that the gradient cannot be read."""
        return isinstance(self.parameter.grad, WaitingGradient)

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's elements of a tensor with the plain parameter's shape, flat, in memory order."""
        return self.range.part_of(whole)

    @property
    def range(self) -> Range:
        """The range of this rank's elements in the plain parameter. It has no references to the model."""
        return Range(self.start, self.stop, self.shape, self.stride, self._cuts)


@dataclass(frozen=True)
class Range:
    """A rank's elements of a plain parameter; see :class:`Shard` for the attributes."""

    start: int
    stop: int
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    cuts: Slice | None

    def part_of(self, whole: Tensor) -> Tensor:
        """The range's elements of a tensor with the plain parameter's shape, flat, in memory order."""
        whole = whole.detach() if self.cuts is None else copy_part(whole.detach(), self.cuts)
        if self.stride is None:
            return memory_order(whole.contiguous())[self.start : self.stop]
        laid_out = torch.empty_strided(self.shape, self.stride, dtype=whole.dtype, device=whole.device)
        return memory_order(laid_out.copy_(whole))[self.start : self.stop]


class UnitView:
    """One unit: modules that are gathered, computed and reduced together.

    Attributes:
        name: Name in traces and summaries.
        parent: Name of the unit that encloses this one; ``None``: this is the root.
        module_types: Class names of the unit's modules; several if small neighbours are merged.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self.name = unit.name
        self.parent = None if unit.parent is None else unit.parent.name
        self.module_types = tuple(type(member.module()).__name__ for member in unit.members)

    @property
    def state(self) -> str:
        """``sharded``, ``unsharding`` (the gather is running), ``unsharded``, ... (``engine.unit.State``)."""
        return str(self._unit.state)

    @property
    def is_gathered(self) -> bool:
        """Whether the unit is gathered, or its gather is running."""
        return self._unit.state is not State.SHARDED

    @property
    def shows_whole_parameters(self) -> bool:
        """Whether the modules have unsharded parameters at this moment."""
        return self._unit.uses_unsharded

    @property
    def num_open_forwards(self) -> int:
        """Unfinished forward calls, including recomputations in backward."""
        return len(self._unit.calls.frames) + len(self._unit.calls.replays)

    @property
    def padded_numel(self) -> int:
        """Elements of the gathered buffers, padding included."""
        return sum(group.layout.numel for group in self._unit.groups)


class Probe:
    """The result of :func:`probe`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._engine = engine_of(model, "shardwise.testing.probe", on_shards=False)

    # -- units, parameters, settings

    @property
    def units(self) -> tuple[UnitView, ...]:
        """The units, outermost first; the first is the root."""
        return tuple(UnitView(unit) for unit in self._engine.units)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Every parameter of the engine, unit by unit."""
        return tuple(Shard(group, i) for group in self._engine.groups for i in range(len(group.shards)))

    @property
    def ignored(self) -> Mapping[str, nn.Parameter]:
        """The parameters that the engine ignores (``ParallelPlan.ignored``), by name."""
        return ignored_of(self._engine).parameters

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh's axes with several ranks, and of ``dp_replicate`` and ``dp_shard``, by name."""
        return self._engine.comms.sizes

    @property
    def shard_group_size(self) -> int:
        """Number of ranks over which a unit is sharded."""
        return self._engine.comms.gather.size

    @property
    def reader(self) -> tuple[int, int]:
        """This rank's reader and the number of readers; ranks of one reader read the same samples."""
        return self._engine.comms.reader

    @property
    def replica(self) -> int:
        """This rank's group along ``dp_replicate``."""
        return self._engine.comms.replica

    @property
    def placements(self) -> Placements:
        """The placements of parameters, gradients and optimizer state under the strategy."""
        return self._engine.placements

    @property
    def transports(self) -> tuple[str, ...]:
        """Class names of the Comms, one for each group of ranks and purpose."""
        return tuple(type(comm).__name__ for comm in self._engine.comms)

    @property
    def unit_facts(self) -> dict[int, UnitFacts]:
        """The facts of every unit for ``shardwise.spec``, by number; the root has number 0."""
        return unit_facts(self._engine)

    @property
    def accumulation(self) -> str:
        """The way in which microbatches are added up: ``sharded``, ``unsharded`` or ``defer_replicate``."""
        return self._engine.window.mode

    # -- values

    def extents(self) -> list[tuple[Extent, Tensor]]:
        """Extents in the plain model of this rank's parameters and buffers, with live views."""
        return load_targets(self._model).extents

    def owned_extents(self, *optimizers: torch.optim.Optimizer) -> list[tuple[Extent, Tensor]]:
        """This rank's part of a checkpoint. Every element is in exactly one rank's part.

        Collective:
            With ``pp``, an all-gather of the names of buffers: all ranks must call.
        """
        return owned_extents(self._model) + optimizer_extents(self._model, optimizers)

    # -- memory

    @property
    def gathered(self) -> tuple[str, ...]:
        """Names of the units that are gathered now, or whose gather is running."""
        return tuple(unit.name for unit in self.units if unit.is_gathered)

    @property
    def reducing(self) -> tuple[str, ...]:
        """Names of the units whose gradients are being reduced now, oldest first."""
        return tuple(dict.fromkeys(unit.name for unit, _, _ in self._engine.reducing))

    @property
    def waiting(self) -> tuple[str, ...]:
        """Names of the units whose gradients are not (or not fully) reduced, and therefore not yet in ``.grad``."""
        groups = self._engine.groups
        return tuple(dict.fromkeys(group.unit.name for group in groups if group.gradient.is_local))

    @property
    def num_open_forwards(self) -> int:
        """Unfinished forward calls of units."""
        return self._engine.forward.num_frames

    @property
    def num_healed(self) -> int:
        """Number of tensors saved for backward whose data had to be restored so far."""
        net = self._engine.extras.find(safety.SavedTensors)
        return 0 if net is None else net.num_regathered

    @property
    def gathered_buffers(self) -> tuple[Tensor, ...]:
        """The buffers into which groups are gathered. Each has memory while its unit is gathered."""
        return tuple(group.gathered for group in self._engine.groups if group.resident_buffer is None)

    @property
    def replicas(self) -> tuple[Tensor, ...]:
        """The buffers of replicated parameters, which are never released."""
        return tuple(group.replica for group in self._engine.groups if group.replica is not None)

    @property
    def gradient_buffers(self) -> tuple[Tensor, ...]:
        """The buffers in which gradients of groups are collected and reduced. They have memory only while in use."""
        buffers = (group.gradient.scratch for group in self._engine.groups)
        return tuple(buffer for buffer in buffers if buffer is not None)

    @property
    def receive_buffers(self) -> tuple[Tensor, ...]:
        """The free receive buffers of sums, if the transport needs such buffers (Gloo)."""
        scratches = (getattr(comm, "_scratch", None) for comm in self._engine.comms)
        return tuple(buffer for scratch in scratches if scratch is not None for buffer in scratch.free)

    @property
    def kept_shards(self) -> tuple[Tensor, ...]:
        """The slices that units keep between forward and backward (``reshard_after_forward=k``)."""
        return tuple(
            tensor for group in self._engine.groups for kind, tensor in group.form.buffers() if kind == "gathered"
        )

    @property
    def waiting_sums(self) -> tuple[Tensor, ...]:
        """Buffers in which sums over ``dp_shard`` wait for later microbatches (accumulation ``defer_replicate``)."""
        stores = (group.gradient.partial_store for group in self._engine.groups)
        return tuple(store for store in stores if store is not None)

    def weak_references(self) -> list[weakref.ref[Any]]:
        """Weak references to the engine's objects and buffers; all are dead after model and probe are deleted."""
        engine = self._engine
        masters = (group.master for group in engine.groups)
        return [weakref.ref(each) for each in (engine, *engine.units, *engine.groups, *masters, *self.gathered_buffers)]

    def held_bytes(self, *optimizers: torch.optim.Optimizer) -> dict[str, int]:
        """Bytes of this rank's distinct storages by category: now, but the peaks of ``gathered`` and ``reduce``.

        See :func:`shardwise.measure.storage.held_bytes` for the categories.
        """
        by_category, engine = held_bytes(self._engine, optimizers), self._engine
        by_category["gathered"] += engine.gathered.peak - engine.gathered.current
        by_category["reduce"] += engine.gradients.peak - engine.gradients.current
        return by_category

    # -- communication

    @property
    def agreed_orders(self) -> dict[str, tuple[str, ...]]:
        """The agreed orders of units through the model, by name.

        Returns:
            ``forward`` (gathers in training forwards), ``evaluation`` (gathers in ``sw.eval_step``), ``other`` (gathers
            in other forwards) and ``backward`` (reductions); each is empty before the first such pass.
        """
        names = [unit.name for unit in self._engine.units]
        ways = zip(("forward", "evaluation", "other", "backward"), self._engine.orders.all, strict=True)
        return {way: tuple(names[index] for index in units_in(orders)) for way, orders in ways}

    def predicted_collectives(
        self, *, is_synchronising: bool = True, is_first_of_window: bool = True
    ) -> list[Collective]:
        """The data-parallel collectives of the next step on this rank, by arithmetic from layouts and agreed orders.

        ``is_synchronising``: the step reduces gradients (``sw.gradient_sync``). ``is_first_of_window``: the step has
        the first microbatch since the parameters changed.
        """
        return predict_trace(self._engine, is_synchronising=is_synchronising, is_first_of_window=is_first_of_window)

    def simulated_step(
        self,
        *,
        is_synchronising: bool = True,
        is_first_of_window: bool = True,
        computation: Callable[[int], UnitSeconds] = lambda _unit: UnitSeconds(),
    ) -> Timeline:
        """The simulated timeline of the step of :meth:`predicted_collectives`; every collective takes 1 s.

        ``computation`` returns seconds of a unit's computation and the collectives inside it, by the unit's number.
        """
        engine = self._engine
        return simulate_facts(
            self.unit_facts,
            rank=engine.comms.gather.rank,
            forward_order=units_in(engine.orders.forward) or [unit.index for unit in engine.units],
            backward_order=units_in(engine.orders.backward),
            replicas=replicas_of(engine),
            num_gradient_buffers=engine.gradients.limit,
            is_synchronising=is_synchronising,
            is_first_of_window=is_first_of_window,
            computation=computation,
        )

    def predicted_bytes(self, *, num_microbatches: int | None = None) -> dict[str, int]:
        """The prediction of :meth:`held_bytes` after a backward, with two optimizer state tensors for each parameter.

        Only the last of ``num_microbatches`` of a step reduces; ``None``: as in the steps so far.
        """
        return predict(self._engine, optimizer_tensors=2, num_microbatches=num_microbatches).as_dict()

    def free_gradients(self) -> None:
        """Free the memory of ``.grad`` after gradients were zeroed, as the next forward would."""
        self._engine.free_gradients()

    @property
    def peak_microbatches(self) -> int:
        """Peak number of a pipeline's (microbatch, stage) pairs between forward and backward on this rank."""
        pipelined = pipelined_of(self._model)
        return 0 if pipelined is None else pipelined.peak_saved

    @property
    def num_updates(self) -> int:
        """Number of optimizer steps that the engine has observed."""
        return self._engine.version


def part_of(extent: Extent, whole: Tensor) -> Tensor:
    """The flat elements of an extent, from a plain model's tensor."""
    part = copy_part(whole.detach(), Slice(extent.shape, extent.cuts)) if extent.cuts else whole.detach()
    return memory_order(part)[extent.start : extent.stop]


def optimizer_state(optimizer: torch.optim.Optimizer) -> Mapping[Tensor, Mapping[str, Any]]:
    """An optimizer's state by parameter (:attr:`Shard.parameter`), also of an optimizer of ``sw.flat_parameters``."""
    return states_by_name(optimizer)
