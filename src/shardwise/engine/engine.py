"""When units are gathered, released and reduced: the hooks around forward and backward.

**Forward.** Before a unit computes it is gathered (unless a prefetch has done so) and the next one's gather is issued.
It is released when forward enters another unit, or ends, unless it is kept for backward. Calls of one unit that follow
one another thus gather it once.

**Backward.** A *ticket*, a hook on each output of a unit's call, fires when backward reaches that call. Entering a unit
completes every unit entered before that is neither above nor below it: those are *finalised*, that is, released, and
their gradients reduced. A unit is thus reduced at a boundary that all ranks share, not when a count of gradients is
full, which would order the collectives differently on ranks that use different parameters.

**End of backward.** Finalises what is left, waits for the reductions, and puts the gradients on the shards.

The order of gathers and of entries is agreed (``spec.order``): recorded in the first pass, followed later.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardwise import torch_private
from shardwise.comm.axes import Comms
from shardwise.comm.base import Comm, Handle
from shardwise.engine.gradient import settle
from shardwise.engine.group import Group
from shardwise.engine.hooks import Call, EndOfBackward, Observer, attach_tickets, begin, end, label
from shardwise.engine.order import (
    ROOT_ENTRY,
    Entry,
    Orders,
    backward_orders,
    eval_orders,
    forward_orders,
    stage_entry,
    units_in,
)
from shardwise.engine.pool import GradientPool, PackedPool, SlotPool
from shardwise.engine.unit import NOTHING, Ignored, Member, State, Unit
from shardwise.features import guard, safety
from shardwise.features.module_buffers import BufferSync
from shardwise.features.safety import SavedTensorGuard
from shardwise.forms.host import Transfers
from shardwise.optim import partial
from shardwise.spec.errors import StateError
from shardwise.spec.options import EngineOptions
from shardwise.spec.order import AgreedOrder
from shardwise.spec.placement import Placements

if TYPE_CHECKING:
    from shardwise.features.pipeline_step import PipelineStep
    from shardwise.init.materialize import Unfilled


class Engine:
    """The engine of one model.

    Args:
        units: The units, outermost first; ``units[0]`` is the root.
        row: Placements of the strategy.
        comms: Carry gathers and reductions.
        options: How the engine is to work.
    """

    unfilled: Unfilled | None = None  # what was built on meta and waits for a state dict
    notes: tuple[str, ...] = ()  # what else a summary says
    _shows_waiting = False  # some .grad is a stand-in for a sum that waits
    has_root = True  # else fully_shard was called for a list of modules, and not yet for a module around them

    def __init__(
        self, units: Sequence[Unit], row: Placements, comms: Comms, options: EngineOptions, ignored: Ignored = NOTHING
    ) -> None:
        self.units = list(units)
        self.reducing: deque[tuple[Unit, Group, Handle]] = deque()
        self.row = row
        self.comms = comms
        for group in self.groups:
            group.comms = comms.of(group.layout.params[0].slice)
        self.options = options
        self.defers_replicate = options.defers_replicate
        is_default = options.accumulates_sharded is None
        self.accumulates_sharded = (
            row.pools_gradients and not self.defers_replicate if is_default else bool(options.accumulates_sharded)
        )
        self.syncs_gradients = True
        self.ignored = ignored  # parameters that are left alone
        self.buffers: BufferSync | None = None  # keeps the model's buffers equal over the ranks
        self.observers: tuple[Observer, ...] = ()  # what attaches from outside
        self.num_terms = comms.num_ranks  # of a mean over the ranks: those that have a batch
        self.ranks_follow = False  # some rank only follows what others tell it: nothing may be left under way
        self.recomputed: tuple[str, ...] = ()  # names of the modules whose forward is run again in backward
        self.slots = SlotPool(keeps=options.keeps_buffers)
        self.packed = PackedPool()
        self.gradients = GradientPool(options.num_gradient_buffers, self._drain_one, keeps=options.keeps_buffers)
        offloaded = [group for group in self.groups if group.offload is not None]
        self.transfers = Transfers(offloaded, comms.gather.device) if offloaded else None
        self._forward_orders = forward_orders(self.units)
        self._eval_orders = eval_orders()
        self._backward_orders = backward_orders(self.units)
        self.entry = ROOT_ENTRY  # of the newest outermost forward
        self.version = 0  # counts optimizer steps: backward of an earlier version would be wrong
        self._order = self.forward_order
        self._backward = self.backward_order
        self._version_counted = 0  # the version of the calls in ``num_outstanding``
        self.trains = False
        self.may_change_buffers = False
        self.num_frames = 0
        self._thread = 0
        self._handled: BaseException | None = None  # what the caller of the outermost forward is handling
        self.epoch = 0
        self.parameters_are_unchanged = False  # microbatches are being accumulated: parameters have not changed
        self.pipeline_step: PipelineStep | None = None  # the step of a pipeline that is under way
        self.stages: Mapping[int, Sequence[Unit]] = {}  # units that belong to one stage of a pipeline alone, by stage
        self.share_state: Callable[[], object] | None = None  # gives all stages what only one of them has
        self.is_in_backward = False
        self.had_sums = False  # sums of earlier microbatches were waiting when this backward began ...
        self._has_waited = False  # ... or when any did
        self.generation = 0
        self._end: weakref.ref[EndOfBackward] | None = None  # what the backward under way calls at its end
        self.num_wrong_prefetches = 0
        self.left: list[Unit] = []  # forward has left them, and entered no other unit since
        self.entered: list[Unit] = []
        self.active: Unit | None = None
        self.saved = SavedTensorGuard(self)
        self.hooks: list[Any] = []

    def __del__(self) -> None:
        """The model has been deleted."""
        safety.wait_for_all(self)

    def remove(self) -> None:
        """Take the hooks off: the units now belong to another engine."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    @property
    def groups(self) -> Iterator[Group]:
        """Every group of every unit."""
        return (group for unit in self.units for group in unit.groups)

    @property
    def holds_gathered(self) -> bool:
        """What is gathered stays so, and in its place (``features.pipeline_step``)."""
        return self.pipeline_step is not None and self.pipeline_step.holds

    @property
    def updates_in_backward(self) -> bool:
        """Optimizers step inside backward, and so nobody ever sees all gradients."""
        return any(observer.updates_in_backward for observer in self.observers)

    @property
    def accumulation(self) -> str:
        """How microbatches are added up, in the plan's words."""
        if self.defers_replicate:
            return "defer_replicate"
        return "sharded" if self.accumulates_sharded else "unsharded"

    @property
    def accumulations(self) -> set[str]:
        """How microbatches have been added up so far; backwards that each synchronise are ``sharded`` anywhere."""
        seen = {self.accumulation} if self._has_waited else set()
        return seen | ({"sharded"} if any(group.gradient.has_added for group in self.groups) else set())

    @property
    def forward_order(self) -> AgreedOrder:
        """The order of gathers in forwards of the whole model that train."""
        return self._forward_orders[ROOT_ENTRY]

    @property
    def backward_order(self) -> AgreedOrder:
        """The order in which backward enters the units of the whole model."""
        return self._backward_orders[ROOT_ENTRY]

    @property
    def units_in_forward(self) -> tuple[int, ...]:
        """Numbers of the units as they are gathered; empty before the first step."""
        return units_in(self._forward_orders)

    @property
    def units_in_backward(self) -> tuple[int, ...]:
        """Numbers of the units as backward enters them; empty before the first step."""
        return units_in(self._backward_orders)

    @property
    def all_orders(self) -> tuple[Orders, ...]:
        """Those of forwards, evaluations and backwards."""
        return self._forward_orders, self._eval_orders, self._backward_orders

    # -- forward

    def before_forward(self, unit: Unit, member: Member, path: str = "") -> None:
        """``member`` of ``unit``, or the module at ``path`` in it, is about to run.

        Collective:
            All-gather of the unit on ``dp_shard`` where one is due, and of the next one (prefetch).
        """
        safety.refuse_compiled(unit)
        if self.pipeline_step is not None and self.pipeline_step.rests:
            safety.refuse_grad(self)
            return
        if torch_private.current_backward() != -1:
            self._ensure(unit)  # recomputation: the data must be there, nothing is entered, ordered or counted
            unit.is_unused = False
            unit.replays.append(torch_private.next_sequence_number())
            return
        if self.is_in_backward:
            safety.recover(self)
        elif unit.parent is None and unit.frames and not path and threading.get_ident() == self._thread:
            safety.leave_frames(self)  # torch runs no hooks after a KeyboardInterrupt
        if self.num_frames == 0:
            stage = self.pipeline_step.stage if self.pipeline_step is not None else None
            self._begin_forward((unit.index, path) if stage is None else stage_entry(stage))
        elif threading.get_ident() != self._thread:
            raise StateError(
                f"unit {unit.name!r} was called from a second thread while a forward is under way in another.\n"
                "  Call the model from one thread at a time."
            )
        self.num_frames += 1
        unit.frames.append(torch_private.next_sequence_number())
        unit.has_run |= self.trains
        if self.row.shards_optimizer:
            for index in self._order.reach(unit.index):
                if self.trains:
                    self._visit(self.units[index])
        self._release_left(but=unit)
        self.unshard(unit)
        unit.is_unused = False
        member.num_frames += 1
        member.swap_in()
        self._prefetch(self._order)
        begin(unit.labels, "forward", unit.name)

    def after_forward(self, unit: Unit, member: Member, output: object) -> None:
        """``member`` of ``unit`` has run (``output`` is ``None`` where it raised)."""
        if self.pipeline_step is not None and self.pipeline_step.rests:
            return
        if torch_private.current_backward() != -1:
            since = unit.replays.pop()
            if torch.is_grad_enabled():  # a reentrant recomputation runs a backward of its own through these
                attach_tickets(self, unit, output, since, is_counted=False)
            return
        if not unit.frames:
            return  # the forward never got through before_forward
        end(unit.labels)
        since = unit.frames.pop()
        self.num_frames -= 1
        if torch.is_grad_enabled():
            attach_tickets(self, unit, output, since)
        elif self.trains:
            unit.num_silent += 1
        self._leave(unit, member)
        if self.num_frames == 0:
            self.saved.leave_forward()
            if output is not None or sys.exception() is self._handled:
                self._end_forward()  # else it raised: what is under way is dropped by the next forward

    def _leave(self, unit: Unit, member: Member) -> None:
        member.num_frames -= 1
        if member.num_frames <= 0 and not self.holds_gathered:
            member.swap_out()
            unit.has_swapped_in = False
        if not unit.frames:
            self.left.append(unit)

    def settle(self, call: str) -> None:
        """Be between steps, for ``call``: what a backward left that raised is dropped.

        Raises:
            StateError: A forward or a backward is under way.
        """
        self.wait_for_host()
        self.refuse_unfilled(call)
        safety.refuse_between(self, call)
        if self.num_frames > 0 or torch_private.current_backward() != -1:
            raise StateError(
                f"{call} was called inside a forward or backward (or after a forward was interrupted).\n"
                "  Call it between steps."
            )
        if self.is_in_backward:
            safety.recover(self)
        self.follow_shards()
        self.announce(call)

    def announce(self, call: str) -> None:
        """Tell the observers what the user has called between steps; they may refuse it."""
        for observer in self.observers:
            observer.before_call(self, call)

    def _begin_forward(self, entry: Entry) -> None:
        safety.refuse_rootless(self)
        self.refuse_unfilled("a forward")
        safety.refuse_whole(self)
        self._thread = threading.get_ident()
        self._handled = sys.exception()
        for unit in self.units:
            if unit.state is State.UNSHARDING:  # prefetched by a forward that raised
                self.wait(unit)
                self.reshard(unit)
        while self.left:
            self.reshard(self.left.pop())
        self.trains = torch.is_grad_enabled()
        self.may_change_buffers = self.trains or (self.buffers is not None and self.buffers.has_holder_in_training)
        for observer in self.observers:
            observer.forward_begins(self, entry)
        self.entry = entry
        guard.refuse_ddp(self)
        self._order = (self._forward_orders if self.trains else self._eval_orders)[entry]
        if self.trains and not self._order.is_recorded:
            guard.refuse_added(self)
        self._order.start()
        if self._version_counted != self.version:
            self._version_counted = self.version
            for unit in self.units:
                unit.num_outstanding = 0  # a backward of calls before the last step would be refused
        self.refresh()
        if self.trains:
            self.saved.enter_forward(is_known=self._order.is_recorded)

    def refresh(self) -> None:
        """What is gathered from now on is what the masters hold now."""
        if not self.parameters_are_unchanged:
            self.epoch += 1
            if self.buffers is not None:
                self.buffers.forward_begins(may_change=self.may_change_buffers)
        self.follow_shards()

    def drop_zeroed(self) -> None:
        """Drop the sums of accumulated microbatches for which ``zero_grad()`` was called since the last backward."""
        if self._shows_waiting:
            for group in self.groups:
                group.gradient.drop_zeroed(self.gradients)

    def hide_waiting(self) -> None:
        """A backward begins: let ``.grad`` be what it is, also where sums wait, once zeroed sums are dropped."""
        if self._shows_waiting:
            self.drop_zeroed()
            for group in self.groups:
                group.gradient.hide_waiting()
            self._shows_waiting = any(group.gradient.shows_waiting for group in self.groups)

    def show_waiting(self) -> None:
        """Let ``.grad`` be a stand-in wherever sums wait, so that ``zero_grad()`` is noticed."""
        for group in self.groups:
            group.gradient.show_waiting()
            self._shows_waiting |= group.gradient.shows_waiting

    def refuse_unfilled(self, call: str) -> None:
        """Refuse ``call`` while parameters have no values.

        Raises:
            StateError: Some have none.
        """
        if self.unfilled is not None:
            self.unfilled.refuse(call)

    def refuse_sums(self, call: str) -> None:
        """Refuse ``call`` while gradients of accumulated microbatches are not in ``.grad``.

        Raises:
            StateError: Some are not.
        """
        self.drop_zeroed()
        if any(group.gradient.is_local for group in self.groups):
            raise StateError(
                f"{call} came before the gradients of accumulated microbatches were reduced over the ranks.\n"
                "  Run the last backward of a step outside of sw.gradient_sync(model, False)."
            )

    def follow_shards(self) -> None:
        """Take over what the user changed on the parameters: other memory (``p.data = ...``), what is trained.

        ``model.to()`` a device that has another name for the same one (``cpu:0``) gives every parameter new memory.
        """
        for group in self.groups:
            group.follow_shards()
        self.free_gradients()

    def free_gradients(self) -> None:
        """Free what ``.grad`` lived in, where nothing is kept for the next step."""
        for group in self.groups:
            group.gradient.free()

    def _end_forward(self) -> None:
        if self.trains and self.row.shards_optimizer:
            for index in self._order.rest():
                self._visit(self.units[index])
        self._release_left()
        for unit in self.units:
            if unit.state is State.UNSHARDING:  # prefetched and never used
                self.wait(unit)
                self._reshard_after_forward(unit, needs_backward=False)
        if self.trains:
            self._agree(self._order, self.comms.gather)
        else:
            self._order.end()
            # Nobody is asked: without grad, ranks that gather together take one path; others may take another.
            if self._order.is_overgrown:
                self._order.keep(self._order.marks())

    def _agree(self, order: AgreedOrder, comm: Comm) -> None:
        """Take out of an order that has grown too long what no rank uses.

        Args:
            order: It is the same on the ranks of ``comm``, but need not be on others.
            comm: Over the ranks that issue its collectives.

        Collective:
            All-reduce of two integers for each place of the order, on ``dp_shard`` at the end of a forward that trains,
            over all data-parallel ranks at the end of a backward; only where the paths through the model keep changing.
        """
        if order.is_overgrown and not self.ranks_follow:
            marks = torch.tensor(order.marks(), device=comm.device)
            comm.all_reduce(marks, unit="order").wait()
            order.keep(marks.tolist())

    def _visit(self, unit: Unit) -> None:
        """Issue what the peers issue for a unit that this rank's forward skips."""
        self._release_left(but=unit)
        self.unshard(unit)
        if not unit.frames:
            self.left.append(unit)

    def _release_left(self, *, but: Unit | None = None) -> None:
        """Forward enters ``but``, or ends: whatever it has left is released, or kept for backward."""
        left, self.left = self.left, []
        for unit in left:
            if unit is not but:
                self._reshard_after_forward(unit, needs_backward=self._has_backward(unit))

    def _has_backward(self, unit: Unit) -> bool:
        """Backward entered the unit in some step, or it is the root. What is kept for it is the same on all ranks.

        Of a unit that only peers have run so far, it is taken that they will run it backward.
        """
        if not self.trains:
            return False
        is_run_by_peers = self._order.is_new(unit.index) and not unit.has_run
        return unit.parent is None or is_run_by_peers or self._is_in_backward_order(unit)

    def _is_in_backward_order(self, unit: Unit) -> bool:
        return any(unit.index in order for order in self._backward_orders.values())

    def _reshard_after_forward(self, unit: Unit, *, needs_backward: bool) -> None:
        if unit.is_resident or unit.state is not State.UNSHARDED:
            return
        if needs_backward or unit.num_outstanding > 0:
            if not unit.reshards_after_forward:
                return
            if self.trains and self._order.is_last(unit.index):
                return  # backward needs it first
        if self.trains:
            for group in unit.groups:
                if group.inner is not None:
                    group.inner.keep(group.gathered, self.epoch)
        self.reshard(unit)

    # -- gathering

    def _is_current(self, unit: Unit) -> bool:
        """The gathered buffer holds what the masters held at the outermost forward."""
        for group in unit.groups:  # noqa: SIM110 - on a hot path
            if group.epoch != self.epoch and group.needs_refresh:
                return False
        return True

    def unshard(self, unit: Unit) -> None:
        """Bring the unit's parameters up to date and wait for them."""
        if unit.state is State.UNSHARDED and (self._is_current(unit) or unit.frames[1:]):
            return
        if unit.state is not State.UNSHARDING:
            self._issue_gather(unit)
        self.wait(unit)

    def _issue_gather(self, unit: Unit) -> None:
        if unit.state is State.REDUCING:
            while unit.state is State.REDUCING:
                self._drain_one()
        if self.is_in_backward:
            safety.check_not_updated(self, unit)
        for group in unit.groups:
            if not group.needs_refresh or (group.slot is None and group.epoch == self.epoch):
                continue
            if group.slot is not None and group.slot.owner is not group:
                self.claim(group)
            is_inner = group.inner is not None and group.inner.epoch == self.epoch
            for observer in self.observers:
                observer.before_gather(self, unit, group, is_inner=is_inner)
            unit.handles.append(self.gather(group, is_inner=is_inner))
            unit.is_unused = True
        unit.move_to(State.UNSHARDING)

    def gather(self, group: Group, *, is_inner: bool) -> Handle:
        """Issue the gather of a group into its slot.

        Collective:
            All-gather on ``dp_shard``, or among the neighbours that keep the group sharded (``is_inner``).
        """
        group.epoch = self.epoch
        with label("gather", group.unit.name):
            if is_inner and group.inner is not None:
                return group.inner.gather(group.gathered, unit=group.unit.name)
            return group.gather()

    def claim(self, group: Group) -> None:
        """Make ``group`` the owner of its slot; whoever lies there is evicted, or, if it computes, keeps it."""
        slot = group.slot
        assert slot is not None
        holder = slot.owner
        if holder is not None:
            if holder.unit.frames:
                if group.unit.num_outstanding:
                    raise StateError(
                        f"units {group.unit.name!r} and {holder.unit.name!r} share storage, but one now runs inside the"
                        " other, which it did not before.\n  Wrap only the outer one, or neither."
                    )
                slot = self.slots.grow(group.layout.numel)
                group.use_slot(slot)
            else:
                if holder.unit.state is State.UNSHARDING:
                    self.wait(holder.unit)
                self.reshard(holder.unit)
        slot.owner = group

    def wait(self, unit: Unit) -> None:
        """Wait for the gathers of a unit."""
        if unit.handles:
            with label("wait", unit.name):
                for handle in unit.handles:
                    handle.wait()
            unit.handles.clear()
        unit.move_to(State.UNSHARDED)

    def _prefetch(self, order: AgreedOrder) -> None:
        """Issue the gather of the unit that comes next, if its slot is free."""
        index = order.upcoming()
        if index is None:
            return
        unit = self.units[index]
        if unit.frames or unit.state is State.UNSHARDING:
            return
        if unit.state is State.UNSHARDED and (self.is_in_backward or self._is_current(unit)):
            return
        if unit.state is State.REDUCING:
            return
        for group in unit.groups:
            holder = group.slot.owner if group.slot is not None else None
            if holder is not None and holder is not group:
                other = holder.unit
                if other.frames or other is self.active or other in self.entered:
                    return
        self._issue_gather(unit)

    def _ensure(self, unit: Unit) -> None:
        """Have the unit's parameters there, inside a backward, without taking part in the order."""
        if unit.state is not State.UNSHARDED:
            if unit.state is not State.UNSHARDING:
                self._issue_gather(unit)
            self.wait(unit)
        unit.swap_in()

    def reshard(self, unit: Unit) -> None:
        """Release the unit's slots. Units with replicated parameters keep their data."""
        self.num_wrong_prefetches += unit.is_unused
        unit.is_unused = False
        if self.pipeline_step is not None and self.pipeline_step.keeps(unit):
            return
        unit.swap_out()
        for group in unit.groups:
            group.release(poison=safety.is_on)
        if unit.state is State.UNSHARDED:
            unit.move_to(State.SHARDED)

    def wait_for_host(self) -> None:
        """Have the host wait for what is on its way from or to it."""
        if self.transfers is not None:
            self.transfers.synchronise()

    def invalidate(self) -> None:
        """The masters have been written: what is gathered, or was, is out of date."""
        self.parameters_are_unchanged = False
        self.version += 1

    def sync_buffers(self) -> None:
        """Have the model's buffers equal over the ranks now, not only at the next forward.

        Collective:
            As :meth:`BufferSync.sync`, if one is due, and of :attr:`share_state`. All ranks must call.
        """
        if self.buffers is not None and self.buffers.is_due:
            self.buffers.sync()
        if self.share_state is not None:
            self.share_state()

    def unshard_now(self, unit: Unit) -> None:
        """Gather a unit by hand; its module then holds the whole parameters until :meth:`reshard_now`.

        Collective:
            All-gather of the unit. All ranks must call.
        """
        self.epoch += 1
        self.unshard(unit)
        unit.is_unused = False
        unit.swap_in()

    def reshard_now(self, unit: Unit) -> None:
        """Undo :meth:`unshard_now`."""
        if unit.state is State.UNSHARDED and not unit.frames:
            self.reshard(unit)

    # -- backward

    def on_ticket(self, call: Call, unit: Unit) -> None:
        """Backward has reached a call of ``unit``.

        Raises:
            StateError: Double backward, or the parameters were changed since that call's forward.
        """
        if self.is_in_backward and self._end is not None and self._end() is None:
            safety.recover(self)  # a backward that raised began before this one, which is not inside of it
        if self.is_in_backward and call.generation == self.generation:
            return
        if torch.is_grad_enabled():
            raise StateError(
                f"backward with create_graph=True reached unit {unit.name!r}: its parameters are released after use, so"
                " a second derivative would be wrong.\n  Compute higher derivatives outside of sw.parallelize()."
            )
        if call.version != self.version:
            raise StateError(
                f"backward reached a forward of unit {unit.name!r} that ran before the last optimizer.step(): its"
                " parameters have changed since.\n  Call backward() before optimizer.step()."
            )
        if not self.is_in_backward:
            self._begin_backward(call.entry)
        call.generation = self.generation
        call.leave()
        unit.num_repeated += call.is_repeated
        for index in self._backward.reach(unit.index):
            self._enter(self.units[index])
        self._enter(unit)
        unit.is_unused = False
        self._prefetch(self._backward)

    def counts(self, version: int) -> bool:
        """Whether calls of ``version`` are in ``num_outstanding``."""
        return version == self._version_counted

    def _begin_backward(self, entry: Entry) -> None:
        safety.refuse_distributed_autograd(self._thread)
        self.is_in_backward = True
        partial.allow(is_allowed=False)  # an optimizer's step raised, or calls this in its closure
        if self.pipeline_step is None:
            self.hide_waiting()
        self.had_sums = any(group.gradient.is_local for group in self.groups)
        self._has_waited |= self.had_sums
        self.generation += 1
        self.entered.clear()
        self._backward = self._backward_orders[entry]
        self._backward.start()
        for observer in self.observers:
            observer.backward_begins(self)
        end = EndOfBackward(self)
        # The backward holds it until it has ended, or has raised.
        torch_private.at_end_of_backward(end)
        self._end = weakref.ref(end)

    def _enter(self, unit: Unit) -> None:
        """Backward is now in ``unit``: finalise what it has left, and have this unit's parameters there."""
        with label("backward", unit.name):
            for other in self.entered.copy():
                if other.index not in unit.family and not self._is_outstanding(other):
                    self.finalise(other)
            self.active = unit
            if unit not in self.entered:
                self.entered.append(unit)
            self._ensure(unit)

    def _is_outstanding(self, unit: Unit) -> bool:
        """Backward will come to this unit again, in an earlier call of it."""
        if self._backward.is_recorded and self._backward.remaining(unit.index) > 0:
            return True
        return unit.num_outstanding > 0 or 0 < unit.num_repeated < unit.num_silent

    def finalise(self, unit: Unit) -> None:
        """Release a unit that backward has left, and issue the reduction of its gradients.

        Collective:
            Reduce-scatter or all-reduce of each trained group on ``dp_shard``, where this backward synchronises; on
            ``dp_replicate`` those of the unit before. In the step of a pipeline as :meth:`PipelineStep.leave`.
        """
        if unit in self.entered:
            self.entered.remove(unit)
        reduces = self.syncs_gradients or self.accumulates_sharded or self.defers_replicate
        if reduces and not self.options.keeps_buffers:
            self.move_on(num_kept=self._num_travelling)  # before this unit takes its buffer
        for group in unit.groups:
            if group.wants_gradients:
                group.gradient.collect(self.gradients)
        if unit.state is State.UNSHARDING:
            self.wait(unit)
        self.reshard(unit)
        if reduces:
            self.reduce(unit)
        elif self.pipeline_step is not None:
            self.pipeline_step.leave(unit)

    def reduce(self, unit: Unit) -> None:
        """Issue the reduction of a unit whose gradients have been collected.

        Collective:
            As :meth:`finalise`.
        """
        trained = [group for group in unit.groups if group.wants_gradients]
        if not trained:
            return
        unit.move_to(State.REDUCING)
        for observer in self.observers:
            observer.before_reduce(self, unit)
        # The reductions before this one had a whole unit's backward to travel: moving them on first costs no time that
        # could be measured, and their receive buffers serve again. More than two gradient buffers give them longer.
        if self.options.keeps_buffers or self.pipeline_step is not None:  # else finalise has done so
            self.move_on(num_kept=self._num_travelling)
        is_last = self.syncs_gradients or not self.defers_replicate
        for group in trained:
            with label("reduce", unit.name):
                handle = group.gradient.reduce(self.gradients, is_last=is_last)
            self.reducing.append((unit, group, handle))
        while self.reducing and self.ranks_follow:  # a rank that follows waits for the next word, not for this
            self.move_on()

    @property
    def _num_travelling(self) -> int:
        """Units whose reductions are left to travel while another one's is issued."""
        if self.comms.replicate is not None:
            return 0  # the sum over the groups is due
        return self.gradients.limit - 2

    def move_on(self, *, num_kept: int = 0) -> None:
        """Begin the next phase of every reduction under way, oldest first; finish those that have come to their end.

        Args:
            num_kept: The reductions of so many units, the newest, are left to travel.
        """
        kept: set[Unit] = set()
        for unit, _, _ in reversed(self.reducing):
            if len(kept) >= num_kept:
                break
            kept.add(unit)
        for entry in tuple(self.reducing):
            if entry[0] in kept:
                break
            has_more = entry[2].advance()
            if not has_more and entry is self.reducing[0]:
                self._drain_one()

    def _drain_one(self) -> bool:
        """Finish the oldest reduction under way. Returns False if there is none."""
        if not self.reducing:
            return False
        unit, group, handle = self.reducing.popleft()
        handle.wait()
        group.gradient.finish(self.gradients)
        for observer in self.observers:
            observer.reduced(self, unit, group)
        if unit.state is State.REDUCING and not (self.reducing and self.reducing[0][0] is unit):
            unit.move_to(State.SHARDED)
        return True

    def end_backward(self) -> None:
        """Backward is over: finalise the rest, wait for the reductions, release everything."""
        for index in self._backward.rest():
            self._enter(self.units[index])
        for unit in reversed(self.entered.copy()):
            self.finalise(unit)
        if self.pipeline_step is None:  # else a stage waits for this backward to end, and nobody for the sums
            self.finish_reductions()
        self._agree(self._backward, self.comms.control)
        for unit in self.units:
            if unit.state is State.UNSHARDING:
                self.wait(unit)
            if unit.state is State.UNSHARDED:
                self.reshard(unit)
            if not self.holds_gathered:
                unit.swap_out()
            unit.num_silent = unit.num_repeated = 0
            unit.has_run = False
        self.is_in_backward = False
        self.active = None
        self.parameters_are_unchanged = not self.syncs_gradients
        if self.parameters_are_unchanged and self.pipeline_step is None:
            self.show_waiting()
        self.saved.leave_backward(sum(1 + order.num_changes for order in self._backward_orders.values()))

    def finish_reductions(self) -> None:
        """Every unit has been left: reduce what came otherwise, and wait for all that is under way."""
        safety.finish_strays(self)
        self.drain()
        for observer in self.observers:
            observer.backward_ended(self)

    def drain(self) -> None:
        """Wait for every reduction under way, and for what the host is about to read of them."""
        while self.reducing:
            self.move_on()
        self.wait_for_host()
        settle(group.gradient for group in self.groups)

    def heal(self, unit: Unit) -> None:
        """Bring back the data of a unit for a saved tensor that would otherwise read another unit's."""
        self._ensure(unit)
        unit.is_unused = False
        unit.healed_in = self.generation

    def collect_eagerly(self, group: Group, index: int) -> None:
        """A large gradient has arrived: move it into the flat buffer at once.

        Raises:
            StateError: The unit is not gathered, so the gradient cannot be trusted.
        """
        unit = group.unit
        is_released = not unit.is_resident and unit.healed_in != self.generation
        if unit not in self.entered and (is_released or unit.updated_in == self.generation):
            return  # left on the parameter; the end of backward reports it
        group.gradient.collect_one(index, self.gradients)
