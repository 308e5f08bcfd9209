"""An engine's state and history, for tests: the one door from a test to the inside of a parallelized model.

::

    model = sw.parallelize(build(), sw.ParallelPlan(strategy="zero3"))
    with sw.record_collectives(model) as events:
        model(x).sum().backward()
    seen = probe(model)
    assert [tuple(event) for event in events] == seen.predicted_collectives()
    for shard in seen.shards:
        assert torch.equal(shard.values, shard.part_of(plain_values[shard.name]))

A probe looks at the live engine: what it says is true when it is asked. It changes nothing, sends nothing, and is valid
as long as the model.
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
from shardwise.parallel.tensor.apply import take
from shardwise.sim.step import UnitSeconds, simulate_facts
from shardwise.sim.streams import Timeline
from shardwise.spec.extent import Extent
from shardwise.spec.facts import UnitFacts
from shardwise.spec.order import units_in
from shardwise.spec.placement import Placements
from shardwise.spec.slice import Slice
from shardwise.spec.traffic.data import Collective
from shardwise.weights.state.model import held_values, owned_extents
from shardwise.weights.state.optimizer import optimizer_extents

#: Inside ``with checks():`` what is released is filled with NaN and saved tensors are checked in every step. Slow.
checks = safety.checks


def probe(model: nn.Module) -> Probe:
    """Look inside a parallelized model.

    Raises:
        StateError: The module is not parallelized.
    """
    return Probe(model)


class Shard:
    """One parameter on this rank.

    Attributes:
        name: Its full name, as in the plain model.
        unit: The name of its unit.
        parameter: What the optimizer sees: the parameter object of the module, with this rank's elements.
        whole: What takes its place in the module while its unit computes; its memory is there only then.
        start, stop: This rank's range of the parameter's elements, in memory order.
        shape: Of the parameter in this rank's module: the whole one, or what tensor or expert parallelism left of it.
        stride: Likewise, where it is not contiguous.
        held_as: Form in which it is held where that is not its own dtype (``ParallelPlan.quantize_frozen``).
    """

    def __init__(self, group: Group, index: int) -> None:
        spec, piece = group.layout.params[index], group.held[index]
        self.name, self.unit = spec.name, group.unit.name
        self.parameter: nn.Parameter = group.shards[index]
        self.whole: nn.Parameter = group.unsharded[index]
        self.start, self.stop = piece.start, piece.stop
        self.shape, self.stride = spec.shape, spec.stride
        self._cuts = spec.slice
        self.held_as = group.facts.held_as

    @property
    def numel(self) -> int:
        """Elements on this rank."""
        return self.stop - self.start

    @property
    def values(self) -> Tensor:
        """This rank's elements, flat, in memory order: a view."""
        return memory_order(plain_of(self.parameter))

    @property
    def grad(self) -> Tensor | None:
        """Their gradients, likewise; ``None`` while :attr:`waits`."""
        return None if self.parameter.grad is None or self.waits else memory_order(plain_of(self.parameter.grad))

    @property
    def waits(self) -> bool:
        """A sum of microbatches waits for its reduction: until then the gradient cannot be read."""
        return isinstance(self.parameter.grad, WaitingGradient)

    def part_of(self, whole: Tensor) -> Tensor:
        """The elements of a tensor of the plain parameter's shape that this rank holds, flat, in memory order."""
        return self.range.part_of(whole)

    @property
    def range(self) -> Range:
        """The elements of the plain parameter that these are; the range keeps nothing of the model alive."""
        return Range(self.start, self.stop, self.shape, self.stride, self._cuts)


@dataclass(frozen=True)
class Range:
    """The elements of a plain parameter that a rank holds; attributes as of :class:`Shard`."""

    start: int
    stop: int
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    cuts: Slice | None

    def part_of(self, whole: Tensor) -> Tensor:
        """The elements of a tensor of the plain parameter's shape, flat, in memory order."""
        whole = whole.detach() if self.cuts is None else take(whole.detach(), self.cuts)
        if self.stride is None:
            return memory_order(whole.contiguous())[self.start : self.stop]
        laid_out = torch.empty_strided(self.shape, self.stride, dtype=whole.dtype, device=whole.device)
        return memory_order(laid_out.copy_(whole))[self.start : self.stop]


class UnitView:
    """One unit: what is gathered, computed and reduced together.

    Attributes:
        name: As in traces and summaries.
        parent: Name of the unit around it; ``None``: it is the root.
        module_types: Class names of its modules; several where small neighbours travel together.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self.name = unit.name
        self.parent = None if unit.parent is None else unit.parent.name
        self.module_types = tuple(type(member.module()).__name__ for member in unit.members)

    @property
    def state(self) -> str:
        """``sharded``, ``unsharding`` (its gather is under way), ``unsharded``, ... (``engine.unit.State``)."""
        return str(self._unit.state)

    @property
    def is_gathered(self) -> bool:
        """Whole parameters are there, or on their way."""
        return self._unit.state is not State.SHARDED

    @property
    def shows_whole_parameters(self) -> bool:
        """The modules hold whole parameters at this moment."""
        return self._unit.uses_unsharded

    @property
    def num_open_forwards(self) -> int:
        """Forward calls that have begun and not ended, recomputations in backward among them."""
        return len(self._unit.calls.frames) + len(self._unit.calls.replays)

    @property
    def padded_numel(self) -> int:
        """Elements that its gather moves in all, over all ranks."""
        return sum(group.layout.numel for group in self._unit.groups)


class Probe:
    """The result of :func:`probe`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._engine = engine_of(model, "shardwise.testing.probe", on_shards=False)

    # -- what there is

    @property
    def units(self) -> tuple[UnitView, ...]:
        """The units, outermost first; the first is the root."""
        return tuple(UnitView(unit) for unit in self._engine.units)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Every parameter that the engine holds, unit by unit."""
        return tuple(Shard(group, i) for group in self._engine.groups for i in range(len(group.shards)))

    @property
    def ignored(self) -> Mapping[str, nn.Parameter]:
        """The parameters that the engine leaves alone (``ParallelPlan.ignored``), by name."""
        return ignored_of(self._engine).parameters

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh's axes that have several ranks (and of ``dp_replicate`` and ``dp_shard``), by name."""
        return self._engine.comms.sizes

    @property
    def shard_group_size(self) -> int:
        """Ranks over which a unit is cut."""
        return self._engine.comms.gather.size

    @property
    def reader(self) -> tuple[int, int]:
        """The share of the samples that this rank reads, and of how many: ranks of one model read the same."""
        return self._engine.comms.reader

    @property
    def replica(self) -> int:
        """This rank's group along ``dp_replicate``."""
        return self._engine.comms.replica

    @property
    def placements(self) -> Placements:
        """The placements of parameters, gradients and optimizer state under the strategy."""
        return self._engine.row

    @property
    def transports(self) -> tuple[str, ...]:
        """Class names of what carries the collectives, one for each group of ranks and purpose."""
        return tuple(type(comm).__name__ for comm in self._engine.comms)

    @property
    def unit_facts(self) -> dict[int, UnitFacts]:
        """The facts of every unit for ``shardwise.spec``, by number, the root 0."""
        return unit_facts(self._engine)

    @property
    def accumulation(self) -> str:
        """The way in which microbatches are added up: ``sharded``, ``unsharded`` or ``defer_replicate``."""
        return self._engine.window.mode

    # -- values

    def extents(self) -> list[tuple[Extent, Tensor]]:
        """This rank's parameters and buffers: their extents in the plain model, with live views."""
        return held_values(self._model).extents

    def owned_extents(self, *optimizers: torch.optim.Optimizer) -> list[tuple[Extent, Tensor]]:
        """This rank's part of a checkpoint: over all ranks every element once.

        Collective:
            With ``pp``, an all-gather of the names of buffers: all ranks must call.
        """
        return owned_extents(self._model) + optimizer_extents(self._model, optimizers)

    # -- what is held

    @property
    def gathered(self) -> tuple[str, ...]:
        """Names of the units whose whole parameters are there now, or on their way."""
        return tuple(unit.name for unit in self.units if unit.is_gathered)

    @property
    def reducing(self) -> tuple[str, ...]:
        """Names of the units whose gradients are being reduced now, oldest first."""
        return tuple(dict.fromkeys(unit.name for unit, _, _ in self._engine.reducing))

    @property
    def waiting(self) -> tuple[str, ...]:
        """Names of the units whose gradients wait for their reduction, or the rest of it: not yet in ``.grad``."""
        groups = self._engine.groups
        return tuple(dict.fromkeys(group.unit.name for group in groups if group.gradient.is_local))

    @property
    def num_open_forwards(self) -> int:
        """Forward calls of units that have begun and not ended."""
        return self._engine.forward.num_frames

    @property
    def num_healed(self) -> int:
        """Tensors saved for backward whose data had to be brought back so far."""
        net = self._engine.extras.find(safety.SavedTensors)
        return 0 if net is None else net.num_healed

    @property
    def gathered_buffers(self) -> tuple[Tensor, ...]:
        """The buffers that groups are gathered into. Each has memory while its unit is gathered."""
        return tuple(group.gathered for group in self._engine.groups if group.resident_buffer is None)

    @property
    def replicas(self) -> tuple[Tensor, ...]:
        """The buffers of whole parameters that are never released."""
        return tuple(group.replica for group in self._engine.groups if group.replica is not None)

    @property
    def gradient_buffers(self) -> tuple[Tensor, ...]:
        """The buffers in which gradients of groups are collected and reduced, with memory meanwhile."""
        buffers = (group.gradient.scratch for group in self._engine.groups)
        return tuple(buffer for buffer in buffers if buffer is not None)

    @property
    def receive_buffers(self) -> tuple[Tensor, ...]:
        """The buffers in which sums are received, if the transport needs some (Gloo), without those in use now."""
        scratches = (getattr(comm, "_scratch", None) for comm in self._engine.comms)
        return tuple(buffer for scratch in scratches if scratch is not None for buffer in scratch.free)

    @property
    def kept_shards(self) -> tuple[Tensor, ...]:
        """The parameters that units keep between forward and backward (``reshard_after_forward=k``)."""
        return tuple(
            tensor for group in self._engine.groups for kind, tensor in group.form.buffers() if kind == "gathered"
        )

    @property
    def waiting_sums(self) -> tuple[Tensor, ...]:
        """Buffers in which sums over ``dp_shard`` wait for later microbatches (accumulation ``defer_replicate``)."""
        stores = (group.gradient.partial_store for group in self._engine.groups)
        return tuple(store for store in stores if store is not None)

    def weak_references(self) -> list[weakref.ref[Any]]:
        """Weak references to the engine's own objects and buffers: all are dead once model and probe are gone."""
        engine = self._engine
        masters = (group.master for group in engine.groups)
        return [weakref.ref(held) for held in (engine, *engine.units, *engine.groups, *masters, *self.gathered_buffers)]

    def held_bytes(self, *optimizers: torch.optim.Optimizer) -> dict[str, int]:
        """Bytes of this rank's storages now, by category, each storage once; gathered and reduced the most so far.

        Returns:
            ``parameters`` (what optimizers update, and what strategies keep whole), ``gradients`` (``.grad`` and sums
            that wait), ``optimizer`` (of ``optimizers``), ``gathered``, ``reduce`` (buffers in which gradients
            are collected and received) and ``host`` (of the first three, what is offloaded).
        """
        held, engine = held_bytes(self._engine, optimizers), self._engine
        held["gathered"] += engine.gathered.most - engine.gathered.live
        held["reduce"] += engine.gradients.most - engine.gradients.live
        return held

    # -- what is sent

    @property
    def agreed_orders(self) -> dict[str, tuple[str, ...]]:
        """The orders of units through the whole model, as this rank has come to know them.

        Returns:
            ``forward`` (of gathers in forwards that train), ``evaluation`` (in ``sw.eval_step``), ``other`` (in others)
            and ``backward`` (of reductions); empty before the first.
        """
        names = [unit.name for unit in self._engine.units]
        ways = zip(("forward", "evaluation", "other", "backward"), self._engine.orders.all, strict=True)
        return {way: tuple(names[index] for index in units_in(orders)) for way, orders in ways}

    def predicted_collectives(
        self, *, is_synchronising: bool = True, is_first_of_window: bool = True
    ) -> list[Collective]:
        """The data-parallel collectives of the next step on this rank, by arithmetic from layouts and agreed orders.

        Args:
            is_synchronising: Gradients are reduced in it (``sw.gradient_sync``).
            is_first_of_window: It is the first microbatch since the parameters changed.
        """
        return predict_trace(self._engine, is_synchronising=is_synchronising, is_first_of_window=is_first_of_window)

    def simulated_step(
        self,
        *,
        is_synchronising: bool = True,
        is_first_of_window: bool = True,
        computation: Callable[[int], UnitSeconds] = lambda _unit: UnitSeconds(),
    ) -> Timeline:
        """The same step as a timeline, from the moments at which the engine issues and waits; a collective takes 1 s.

        Args:
            is_synchronising: As of :meth:`predicted_collectives`.
            is_first_of_window: As of :meth:`predicted_collectives`.
            computation: What a unit computes, and the collectives inside it, by the unit's number.
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
        """The arithmetic's values for :meth:`held_bytes` after a backward, with two state tensors of each parameter.

        Args:
            num_microbatches: Of a step, all but the last without reduction; ``None``: as many as there have been.
        """
        return predict(self._engine, optimizer_tensors=2, num_microbatches=num_microbatches).as_dict()

    def free_gradients(self) -> None:
        """Free what ``.grad`` lived in, as the next forward would, once gradients are zeroed."""
        self._engine.free_gradients()

    @property
    def peak_microbatches(self) -> int:
        """The most microbatches of a pipeline, counted once a stage, between forward and backward at a time."""
        pipelined = pipelined_of(self._model)
        return 0 if pipelined is None else pipelined.peak_saved

    @property
    def num_updates(self) -> int:
        """Optimizer steps that the engine has seen."""
        return self._engine.version


def part_of(extent: Extent, whole: Tensor) -> Tensor:
    """The elements of a plain model's tensor that an extent names, flat: of its slice, where it has cuts."""
    held = take(whole.detach(), Slice(extent.shape, extent.cuts)) if extent.cuts else whole.detach()
    return memory_order(held)[extent.start : extent.stop]


def optimizer_state(optimizer: torch.optim.Optimizer) -> Mapping[Tensor, Mapping[str, Any]]:
    """An optimizer's state by parameter (:attr:`Shard.parameter`), also where it was given ``sw.flat_parameters``."""
    return states_by_name(optimizer)
