"""When units are gathered, released and reduced: the hooks around forward and backward.

**Forward.** Before a unit computes it is gathered (unless a prefetch has done so) and the next one's gather is issued.
It is released when forward enters another unit, or ends, unless it is kept for backward. Calls of one unit that follow
one another thus gather it once.

**Backward.** A *ticket*, a hook on each output of a unit's call, fires when backward reaches that call. Entering a unit
completes every unit entered before that is neither above nor below it: those are *finalised*, that is, released, and
their gradients reduced. A unit is thus reduced at a boundary that all ranks share, not when a count of gradients is
full, which would order the collectives differently on ranks that use different parameters.

**End of backward.** Finalises what is left, waits for the reductions, and puts the gradients on the shards.

The order of gathers and of entries is agreed (``spec.prefetch``): recorded in the first pass, followed later.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.comm.axes import Comms
from shardwise.comm.base import Handle
from shardwise.fsdp import debug, torch_private
from shardwise.fsdp.attach import Uncopyable
from shardwise.fsdp.buffers import BufferSync
from shardwise.fsdp.gradient import EAGER_NUMEL
from shardwise.fsdp.group import Group
from shardwise.fsdp.inner import InnerShard
from shardwise.fsdp.offload import Transfers
from shardwise.fsdp.options import EngineOptions
from shardwise.fsdp.order import ROOT_ENTRY, Entry, Orders, backward_orders, eval_orders, forward_orders
from shardwise.fsdp.packed import gathered_cuts, reduced_cuts
from shardwise.fsdp.pool import GradientPool, PackedPool, SlotPool
from shardwise.fsdp.saved import SavedTensorGuard
from shardwise.fsdp.unit import Member, State, Unit
from shardwise.spec.errors import StateError
from shardwise.spec.footprint import size_class
from shardwise.spec.placement import Placements
from shardwise.spec.prefetch import AgreedOrder

if TYPE_CHECKING:
    from shardwise.fsdp.in_backward import UpdateInBackward
    from shardwise.fsdp.join import Join


class Runtime:
    """The engine of one model.

    Args:
        units: The units, outermost first; ``units[0]`` is the root.
        row: Placements of the strategy.
        comms: Carry gathers and reductions.
        options: How the engine is to work.
    """

    def __init__(self, units: Sequence[Unit], row: Placements, comms: Comms, options: EngineOptions) -> None:
        self.units = list(units)
        self.row = row
        self.comms = comms
        self.options = options
        self.defers_replicate = options.defers_replicate
        is_default = options.accumulates_sharded is None
        self.accumulates_sharded = (
            row.pools_gradients and not self.defers_replicate if is_default else bool(options.accumulates_sharded)
        )
        self.syncs_gradients = True
        self.ignored = options.ignored  # parameters that are left alone
        self.buffers: BufferSync | None = None  # keeps the model's buffers equal over the ranks
        self.join: Join | None = None  # what ranks without a batch are told
        self.recomputed: tuple[str, ...] = ()  # names of the modules whose forward is run again in backward
        self.slots = SlotPool()
        self.packed = PackedPool()
        self.gradients = GradientPool(options.num_gradient_buffers, self._drain_one)
        offloaded = [group for group in self.groups if group.offload is not None]
        self.transfers = Transfers(offloaded, comms.gather.device) if offloaded else None
        self._forward_orders = forward_orders(self.units)
        self._eval_orders = eval_orders()
        self._backward_orders = backward_orders(self.units)
        self.entry = ROOT_ENTRY  # of the newest outermost forward
        self.update: UpdateInBackward | None = None  # where the optimizer steps inside backward
        self.version = 0  # counts optimizer steps: backward of an earlier version would be wrong
        self._order = self.forward_order
        self._backward = self.backward_order
        self._version_counted = 0  # the version of the calls in ``num_outstanding``
        self._trains = False
        self._num_frames = 0
        self._thread = 0
        self._handled: BaseException | None = None  # what the caller of the outermost forward is handling
        self._epoch = 0
        self._is_window_open = False  # microbatches are being accumulated: parameters have not changed
        self._in_backward = False
        self._had_sums = False  # sums of earlier microbatches were waiting when this backward began
        self._generation = 0
        self._end: weakref.ref[_End] | None = None  # what the backward under way calls at its end
        self.num_wrong_prefetches = 0
        self._left: list[Unit] = []  # forward has left them, and entered no other unit since
        self._entered: list[Unit] = []
        self._active: Unit | None = None
        self._reducing: deque[tuple[Unit, Group, Handle]] = deque()
        self._saved = SavedTensorGuard(self)
        self._hooks: list[Any] = []
        self._prepare()

    # -- construction

    def _prepare(self) -> None:
        """Number the units, deal out slots, make the full parameters, install the hooks."""
        me: weakref.ref[Runtime] = weakref.ref(self)
        for index, unit in enumerate(self.units):
            unit.index = index
            unit.runtime = me
        self._relate()
        gathered = [(unit, group) for unit in self.units for group in unit.groups if group.uses_slot]
        together = Counter((_slot_key(unit, group), unit.recomputed_in) for unit, group in gathered)
        for (key, place), count in together.items():
            if place is not None:
                self.slots.reserve(key, count)
        slots = {group: self._slot_of(unit, group) for unit, group in gathered}
        for unit in self.units:
            for group in unit.groups:
                group.use_slot(slots.get(group))
                self._give_buffers(unit, group)
                if group.layout.params:
                    self.gradients.announce(group.gradient.pool_key, group.reduce_layout.numel)
                for index, full in enumerate(group.fulls):
                    if full.requires_grad and full.numel() >= EAGER_NUMEL:  # torch refuses a hook on others
                        hook = _eager_hook(me, weakref.ref(group), index)
                        self._hooks.append(full.register_post_accumulate_grad_hook(hook))
            unit.is_resident = not self.row.shards_parameters and all(group.slot is None for group in unit.groups)
            self._install(unit)

    def _give_buffers(self, unit: Unit, group: Group) -> None:
        """What gathers of ``group`` need besides its slot."""
        if unit.inner_size is not None:
            group.inner = InnerShard(group.gathered, group.layout, self.comms.inner_comm(unit.inner_size))
        if group.sent_as is not None:
            group.packed_pool = self.packed
            self.packed.announce(gathered_cuts(group)[-1])
        if group.reduced_as is not None and group.layout.params:
            places = reduced_cuts(group)
            self.gradients.packed.announce(places[-1])
            self.gradients.packed.announce(group.layout.size * (places[group.rank + 1] - places[group.rank]))

    def _relate(self) -> None:
        for unit in self.units:
            above, ancestor = set(), unit.parent
            while ancestor is not None:
                above.add(ancestor.index)
                ancestor = ancestor.parent
            unit.depth = len(above)
            unit.family = frozenset({unit.index, *above})
        for unit in self.units:
            below = {other.index for other in self.units if unit.index in other.family}
            unit.family |= below

    def _slot_of(self, unit: Unit, group: Group) -> Any:
        is_shared = unit.reshards_after_forward and unit.depth > 0
        return self.slots.assign(_slot_key(unit, group), group.layout.numel, is_shared=is_shared)

    def _install(self, unit: Unit) -> None:
        for member in unit.members:
            module = member.module()
            assert module is not None
            self._hooks.append(module.register_forward_pre_hook(_Before(self, unit, member), prepend=True))
            self._hooks.append(module.register_forward_hook(_After(self, unit, member), always_call=True))

    def remove(self) -> None:
        """Take the hooks off: the units now belong to another runtime."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def groups(self) -> Iterator[Group]:
        """Every group of every unit."""
        return (group for unit in self.units for group in unit.groups)

    @property
    def forward_order(self) -> AgreedOrder:
        """The order of gathers in forwards of the whole model that train."""
        return self._forward_orders[ROOT_ENTRY]

    @property
    def backward_order(self) -> AgreedOrder:
        """The order in which backward enters the units of the whole model."""
        return self._backward_orders[ROOT_ENTRY]

    # -- forward

    def before_forward(self, unit: Unit, member: Member, path: str = "") -> None:
        """``member`` of ``unit``, or the module at ``path`` in it, is about to run.

        Collective:
            All-gather of the unit on ``dp_shard`` where one is due, and of the next one (prefetch).
        """
        if torch_private.current_backward() != -1:
            self._ensure(unit)  # recomputation: the data must be there, nothing is entered, ordered or counted
            unit.is_unused = False
            unit.replays.append(torch_private.next_sequence_number())
            return
        if self._in_backward:
            self._recover()
        elif unit.parent is None and unit.frames and not path and threading.get_ident() == self._thread:
            self.leave_frames()  # torch runs no hooks after a KeyboardInterrupt
        if self._num_frames == 0:
            self._begin_forward((unit.index, path))
        elif threading.get_ident() != self._thread:
            raise StateError(
                f"unit {unit.name!r} was called from a second thread while a forward is under way in another.\n"
                "  Call the model from one thread at a time."
            )
        self._num_frames += 1
        unit.frames.append(torch_private.next_sequence_number())
        unit.has_run |= self._trains
        if self.row.shards_optimizer:
            for index in self._order.reach(unit.index):
                if self._trains:
                    self._visit(self.units[index])
        self._release_left(but=unit)
        self._unshard(unit)
        unit.is_unused = False
        member.num_frames += 1
        member.swap_in()
        self._prefetch(self._order)

    def after_forward(self, unit: Unit, member: Member, output: object) -> None:
        """``member`` of ``unit`` has run (``output`` is ``None`` where it raised)."""
        if torch_private.current_backward() != -1:
            since = unit.replays.pop()
            if torch.is_grad_enabled():  # a reentrant recomputation runs a backward of its own through these
                self._attach(unit, output, since, is_counted=False)
            return
        if not unit.frames:
            return  # the forward never got through before_forward
        since = unit.frames.pop()
        self._num_frames -= 1
        if torch.is_grad_enabled():
            self._attach(unit, output, since)
        elif self._trains:
            unit.num_silent += 1
        member.num_frames -= 1
        if member.num_frames <= 0:
            member.swap_out()
        if not unit.frames:
            self._left.append(unit)
        if self._num_frames == 0:
            self._saved.leave_forward()
            if output is not None or sys.exception() is self._handled:
                self._end_forward()  # else it raised: what is under way is dropped by the next forward

    def settle(self, call: str) -> None:
        """Be between steps, for ``call``: what a backward left that raised is dropped.

        Raises:
            StateError: A forward or a backward is under way.
        """
        self.wait_for_host()
        if self._num_frames > 0 or torch_private.current_backward() != -1:
            raise StateError(
                f"{call} was called inside a forward or backward (or after a forward was interrupted).\n"
                "  Call it between steps."
            )
        if self._in_backward:
            self._recover()
        if self.join is not None:
            self.join.check(call)

    def _begin_forward(self, entry: Entry) -> None:
        self._refuse_whole()
        self._thread = threading.get_ident()
        self._handled = sys.exception()
        for unit in self.units:
            if unit.state is State.UNSHARDING:  # prefetched by a forward that raised
                self._wait(unit)
                self._reshard(unit)
        while self._left:
            self._reshard(self._left.pop())
        self._trains = torch.is_grad_enabled()
        if self.join is not None:
            self.join.begins_forward(entry, trains=self._trains)
        self.entry = entry
        self._order = (self._forward_orders if self._trains else self._eval_orders)[entry]
        self._order.start()
        if self._version_counted != self.version:
            self._version_counted = self.version
            for unit in self.units:
                unit.num_outstanding = 0  # a backward of calls before the last step would be refused
        self._refresh()
        if self._trains:
            self._saved.enter_forward(is_known=self._order.is_recorded)

    def _refresh(self) -> None:
        """What is gathered from now on is what the masters hold now."""
        if not self._is_window_open:
            self._epoch += 1
            if self.buffers is not None:
                self.buffers.forward_begins(trains=self._trains)
        for group in self.groups:
            group.follow_shards()

    def _refuse_whole(self) -> None:
        """Inside full_parameters a forward may compute where every rank can, but not train."""
        shown = [unit.whole for unit in self.units if unit.whole is not None]
        if shown and (torch.is_grad_enabled() or any(whole.is_on_root_only for whole in shown)):
            raise StateError(
                "a forward with grad, or on some ranks only, inside sw.full_parameters(): gradients could not be"
                " reduced.\n"
                "  Train outside of it; inside, use torch.no_grad(), without rank0_only."
            )

    def _end_forward(self) -> None:
        if self._trains and self.row.shards_optimizer:
            for index in self._order.rest():
                self._visit(self.units[index])
        self._release_left()
        for unit in self.units:
            if unit.state is State.UNSHARDING:  # prefetched and never used
                self._wait(unit)
                self._reshard_after_forward(unit, needs_backward=False)
        if not self._trains:
            self._order.end()
        self._agree(self._order)

    def _agree(self, order: AgreedOrder) -> None:
        """Take out of an order that has grown too long what no rank uses.

        Collective:
            All-reduce of two integers for each place of the order, over all data-parallel ranks; only where the paths
            through the model keep changing.
        """
        if order.is_overgrown and not (self.join is not None and self.join.is_short):
            control = self.comms.control
            marks = torch.tensor(order.marks(), device=control.device)
            control.all_reduce(marks, unit="order").wait()
            order.keep(marks.tolist())

    def _visit(self, unit: Unit) -> None:
        """Issue what the peers issue for a unit that this rank's forward skips."""
        self._release_left(but=unit)
        self._unshard(unit)
        if not unit.frames:
            self._left.append(unit)

    def _release_left(self, *, but: Unit | None = None) -> None:
        """Forward enters ``but``, or ends: whatever it has left is released, or kept for backward."""
        left, self._left = self._left, []
        for unit in left:
            if unit is not but:
                self._reshard_after_forward(unit, needs_backward=self._has_backward(unit))

    def _has_backward(self, unit: Unit) -> bool:
        """Backward entered the unit in some step, or it is the root. What is kept for it is the same on all ranks.

        Of a unit that only peers have run so far, it is taken that they will run it backward.
        """
        if not self._trains:
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
            if self._trains and self._order.is_last(unit.index):
                return  # backward needs it first
        if self._trains:
            for group in unit.groups:
                if group.inner is not None:
                    group.inner.keep(group.gathered, self._epoch)
        self._reshard(unit)

    def _attach(self, unit: Unit, output: object, since: int, *, is_counted: bool = True) -> None:
        """Put a ticket on every output that this call has made.

        A module that hands an input through has not made that output: its ticket would fire much later, in the backward
        of whoever made it.
        """
        call: _Call | None = None
        for tensor in _tensors(output):
            node = tensor.grad_fn
            if node is None or torch_private.sequence_number(node) < since:
                continue
            if call is None:
                call = _Call(self, unit, is_counted=is_counted)
            tensor.register_hook(call)

    # -- gathering

    def _is_current(self, unit: Unit) -> bool:
        """The gathered buffer holds what the masters held at the outermost forward."""
        for group in unit.groups:  # noqa: SIM110 - on a hot path
            if group.epoch != self._epoch and group.needs_refresh:
                return False
        return True

    def _unshard(self, unit: Unit) -> None:
        """Bring the unit's parameters up to date and wait for them."""
        if unit.state is State.UNSHARDED and (self._is_current(unit) or unit.frames[1:]):
            return
        if unit.state is not State.UNSHARDING:
            self._issue_gather(unit)
        self._wait(unit)

    def _issue_gather(self, unit: Unit) -> None:
        if unit.state is State.REDUCING:
            while unit.state is State.REDUCING:
                self._drain_one()
        if self._in_backward:
            self._check_not_updated(unit)
        for group in unit.groups:
            if not group.needs_refresh or (group.slot is None and group.epoch == self._epoch):
                continue
            if group.slot is not None and group.slot.owner is not group:
                self._claim(group)
            is_inner = group.inner is not None and group.inner.epoch == self._epoch
            if self.join is not None:
                self.join.gathers(unit, group, is_inner=is_inner)
            unit.handles.append(self._gather(group, is_inner=is_inner))
            unit.is_unused = True
        unit.move_to(State.UNSHARDING)

    def _gather(self, group: Group, *, is_inner: bool) -> Handle:
        group.epoch = self._epoch
        if is_inner and group.inner is not None:
            return group.inner.gather(group.gathered, unit=group.unit.name)
        return group.gather(self.comms.gather)

    def _claim(self, group: Group) -> None:
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
                    self._wait(holder.unit)
                self._reshard(holder.unit)
        slot.owner = group

    def _check_not_updated(self, unit: Unit) -> None:
        """Backward needs the parameters with which forward has computed.

        Raises:
            StateError: The optimizer has changed them, as backward seemed to have left the unit.
        """
        if unit.updated_in == self._generation:
            raise StateError(
                f"backward came back to unit {unit.name!r} after its parameters had been updated: a value left the unit"
                " otherwise than through its outputs.\n"
                "  Return the value from the unit's forward, or do without sw.optimizer_in_backward()."
            )

    def _wait(self, unit: Unit) -> None:
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
        if unit.state is State.UNSHARDED and (self._in_backward or self._is_current(unit)):
            return
        if unit.state is State.REDUCING:
            return
        for group in unit.groups:
            holder = group.slot.owner if group.slot is not None else None
            if holder is not None and holder is not group:
                other = holder.unit
                if other.frames or other is self._active or other in self._entered:
                    return
        self._issue_gather(unit)

    def _ensure(self, unit: Unit) -> None:
        """Have the unit's parameters there, inside a backward, without taking part in the order."""
        if unit.state is not State.UNSHARDED:
            if unit.state is not State.UNSHARDING:
                self._issue_gather(unit)
            self._wait(unit)
        unit.swap_in()

    def _reshard(self, unit: Unit) -> None:
        """Release the unit's slots. Units with replicated parameters keep their data."""
        unit.swap_out()
        self.num_wrong_prefetches += unit.is_unused
        unit.is_unused = False
        for group in unit.groups:
            group.release(poison=debug.is_on)
        if unit.state is State.UNSHARDED:
            unit.move_to(State.SHARDED)

    def wait_for_host(self) -> None:
        """Have the host wait for what is on its way from or to it."""
        if self.transfers is not None:
            self.transfers.synchronise()

    def invalidate(self) -> None:
        """The masters have been written: what is gathered, or was, is out of date."""
        self._is_window_open = False
        self.version += 1

    def sync_buffers(self) -> None:
        """Have the model's buffers equal over the ranks now, not only at the next forward.

        Collective:
            As :meth:`BufferSync.sync`, if one is due. All ranks must call.
        """
        if self.buffers is not None and self.buffers.is_due:
            self.buffers.sync()

    def unshard_now(self, unit: Unit) -> None:
        """Gather a unit by hand; its module then holds the whole parameters until :meth:`reshard_now`.

        Collective:
            All-gather of the unit. All ranks must call.
        """
        self._epoch += 1
        self._unshard(unit)
        unit.is_unused = False
        unit.swap_in()

    def reshard_now(self, unit: Unit) -> None:
        """Undo :meth:`unshard_now`."""
        if unit.state is State.UNSHARDED and not unit.frames:
            self._reshard(unit)

    # -- backward

    def on_ticket(self, call: _Call, unit: Unit) -> None:
        """Backward has reached a call of ``unit``.

        Raises:
            StateError: Double backward, or the parameters were changed since that call's forward.
        """
        if self._in_backward and self._end is not None and self._end() is None:
            self._recover()  # a backward that raised began before this one, which is not inside of it
        if self._in_backward and call.generation == self._generation:
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
        if not self._in_backward:
            self._begin_backward(call.entry)
        call.generation = self._generation
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
        self._in_backward = True
        self._had_sums = any(group.gradient.is_local for group in self.groups)
        self._generation += 1
        self._entered.clear()
        self._backward = self._backward_orders[entry]
        self._backward.start()
        if self.join is not None:
            self.join.begins_backward()
        end = _End(self)
        # The backward holds it until it has ended, or has raised.
        torch_private.at_end_of_backward(end)
        self._end = weakref.ref(end)

    def _enter(self, unit: Unit) -> None:
        """Backward is now in ``unit``: finalise what it has left, and have this unit's parameters there."""
        for other in self._entered.copy():
            if other.index not in unit.family and not self._is_outstanding(other):
                self._finalise(other)
        self._active = unit
        if unit not in self._entered:
            self._entered.append(unit)
        self._ensure(unit)

    def _is_outstanding(self, unit: Unit) -> bool:
        """Backward will come to this unit again, in an earlier call of it."""
        if self._backward.is_recorded and self._backward.remaining(unit.index) > 0:
            return True
        return unit.num_outstanding > 0 or 0 < unit.num_repeated < unit.num_silent

    def _finalise(self, unit: Unit) -> None:
        """Release a unit that backward has left, and issue the reduction of its gradients.

        Collective:
            Reduce-scatter or all-reduce of each trained group on ``dp_shard``, where this backward synchronises; on
            ``dp_replicate`` those of the unit before.
        """
        if unit in self._entered:
            self._entered.remove(unit)
        reduces = self.syncs_gradients or self.accumulates_sharded or self.defers_replicate
        trained = [group for group in unit.groups if group.wants_gradients]
        for group in trained:
            group.gradient.collect(self.gradients)
        if unit.state is State.UNSHARDING:
            self._wait(unit)
        self._reshard(unit)
        if not (reduces and trained):
            return
        unit.move_to(State.REDUCING)
        if self.join is not None:
            self.join.reduces(unit, is_last=self.syncs_gradients)
        # The reductions before this one had a whole unit's backward to travel: moving them on first costs no time that
        # could be measured, and their receive buffers serve again.
        self._move_on()
        is_last = self.syncs_gradients or not self.defers_replicate
        for group in trained:
            handle = group.gradient.reduce(self.comms, self.gradients, is_last=is_last)
            self._reducing.append((unit, group, handle))
        if self.join is not None and self.join.is_short:
            while self._reducing:  # a rank that follows waits for the next word, not for this
                self._move_on()

    def _move_on(self) -> None:
        """Begin the next phase of every reduction under way, oldest first; finish those that have come to their end."""
        for entry in tuple(self._reducing):
            has_more = entry[2].advance()
            if not has_more and entry is self._reducing[0]:
                self._drain_one()

    def _drain_one(self) -> bool:
        """Finish the oldest reduction under way. Returns False if there is none."""
        if not self._reducing:
            return False
        unit, group, handle = self._reducing.popleft()
        handle.wait()
        group.gradient.finish(self.gradients)
        if self.update is not None:
            self.update.apply(group, self.gradients)
            unit.updated_in = self._generation
        if unit.state is State.REDUCING and not (self._reducing and self._reducing[0][0] is unit):
            unit.move_to(State.SHARDED)
        return True

    def end_backward(self) -> None:
        """Backward is over: finalise the rest, wait for the reductions, release everything."""
        for index in self._backward.rest():
            self._enter(self.units[index])
        for unit in reversed(self._entered.copy()):
            self._finalise(unit)
        self._finish_strays()
        if self.join is not None:
            self.join.ends_backward(has_more=not self.syncs_gradients)
        while self._reducing:
            self._move_on()
        self._agree(self._backward)
        for unit in self.units:
            if unit.state is State.UNSHARDING:
                self._wait(unit)
            if unit.state is State.UNSHARDED:
                self._reshard(unit)
            unit.swap_out()
            unit.num_silent = unit.num_repeated = 0
            unit.has_run = False
        self.wait_for_host()  # the host is about to read the gradients
        self._in_backward = False
        self._active = None
        self._is_window_open = not self.syncs_gradients
        if self.update is not None:
            self.invalidate()
        self._saved.leave_backward(sum(1 + order.num_changes for order in self._backward_orders.values()))

    def _finish_strays(self) -> None:
        """Reduce what no ticket announced: values that left a unit by a side door, and microbatches left over.

        Raises:
            StateError: A gradient came for a unit whose parameters had been released: it cannot be trusted.
        """
        for unit in self.units:
            trained = [group for group in unit.groups if group.wants_gradients]
            strays = [
                spec
                for group in trained
                for spec, full in zip(group.layout.params, group.fulls, strict=True)
                if full.grad is not None
            ]
            was_kept = unit.state is State.UNSHARDED and not unit.reshards_after_forward
            is_released = not unit.is_resident and not was_kept and unit.healed_in != self._generation
            if strays and (is_released or unit.updated_in == self._generation):
                for group in trained:
                    for full in group.fulls:
                        full.grad = None
                when = "while unit {!r} was not gathered" if is_released else "after unit {!r} had been updated"
                raise StateError(
                    f"a gradient for {strays[0].name!r} (logical shape {list(strays[0].shape)}) arrived"
                    f" {when.format(unit.name)}: a value left the unit otherwise than through its outputs.\n"
                    "  Return the value from the unit's forward, or wrap the module that uses it as well."
                )
            if strays or (self.syncs_gradients and any(group.gradient.is_local for group in trained)):
                self._finalise(unit)

    def heal(self, unit: Unit) -> None:
        """Bring back the data of a unit for a saved tensor that would otherwise read another unit's."""
        self._ensure(unit)
        unit.is_unused = False
        unit.healed_in = self._generation

    def collect_eagerly(self, group: Group, index: int) -> None:
        """A large gradient has arrived: move it into the flat buffer at once.

        Raises:
            StateError: The unit is not gathered, so the gradient cannot be trusted.
        """
        unit = group.unit
        is_released = not unit.is_resident and unit.healed_in != self._generation
        if unit not in self._entered and (is_released or unit.updated_in == self._generation):
            return  # left on the parameter; the end of backward reports it
        group.gradient.collect_one(index, self.gradients)

    def leave_frames(self) -> None:
        """A forward was left without its hooks: nothing is under way any more."""
        self._saved.leave_forward()
        self._left.clear()
        for unit in self.units:
            unit.clear_frames()
            if unit.state is State.UNSHARDING:
                self._wait(unit)
            self._reshard(unit)
        self._num_frames = 0

    # -- following the ranks that have a batch, on one that has none (``fsdp.join``)

    def follow_forward(self, *, trains: bool) -> None:
        """An outermost forward begins on the others."""
        self._trains = trains
        self._refresh()

    def follow_gather(self, index: int, place: int, *, is_inner: bool) -> None:
        """The others gather a group of a unit: take part."""
        group = self.units[index].groups[place]
        if group.slot is not None and group.slot.owner is not group:
            self._claim(group)
        self._gather(group, is_inner=is_inner).wait()
        if self._trains and group.inner is not None and not is_inner:
            group.inner.keep(group.gathered, self._epoch)
        group.release(poison=debug.is_on)

    def follow_reduction(self, index: int, *, is_last: bool) -> None:
        """The others reduce a unit: add nothing, or what earlier microbatches have left here."""
        before, self.syncs_gradients = self.syncs_gradients, is_last
        self._finalise(self.units[index])
        self.syncs_gradients = before

    def follow_end(self, *, has_more: bool) -> None:
        """The others end their backward."""
        while self._reducing:
            self._move_on()
        self._is_window_open = has_more

    def known_orders(self) -> list[list[list[Any]]]:
        """The recorded orders of forwards, evaluations and backwards, as JSON holds them."""
        return [orders.known() for orders in self._all_orders]

    def take_orders(self, known: Sequence[list[list[Any]]]) -> None:
        """Take over what :meth:`known_orders` gave on another rank."""
        for orders, recorded in zip(self._all_orders, known, strict=True):
            orders.take(recorded)

    @property
    def _all_orders(self) -> tuple[Orders, ...]:
        return self._forward_orders, self._eval_orders, self._backward_orders

    def _recover(self) -> None:
        """A backward raised before its end: drop what it left and start afresh."""
        while self._reducing:
            self._reducing.popleft()[2].wait()  # the buffer is in flight; what it brings is dropped below
        for unit in self.units:
            if unit.state is State.REDUCING:
                unit.move_to(State.SHARDED)
            if unit.state is State.UNSHARDING:
                self._wait(unit)
            self._reshard(unit)
            unit.clear_frames()
            unit.replays.clear()
            unit.num_silent = unit.num_repeated = 0
            unit.has_run = False
            for group in unit.groups:
                group.gradient.drop(self.gradients)
        self._entered.clear()
        self._left.clear()
        self._in_backward = False
        self._active = None
        self._num_frames = 0
        if self._had_sums:
            raise StateError(
                "a backward failed while gradients were being accumulated: the sums of the earlier microbatches are"
                " lost.\n"
                "  Call zero_grad() and begin the step again."
            )
        if any(unit.updated_in == self._generation for unit in self.units):
            raise StateError(
                "a backward failed after it had updated some of the units: the parameters are of two different steps.\n"
                "  Load a checkpoint."
            )


def _slot_key(unit: Unit, group: Group) -> Hashable:
    return unit.depth, size_class(group.layout.numel), group.compute_dtype, group.is_trainable


class _Call:
    """One forward call of a unit, as a hook on each of its outputs."""

    __slots__ = ("_is_counted", "_runtime", "_unit", "entry", "generation", "is_repeated", "version")

    def __init__(self, runtime: Runtime, unit: Unit, *, is_counted: bool) -> None:
        self._runtime = weakref.ref(runtime)
        self._unit = weakref.ref(unit)
        self._is_counted = is_counted
        self.is_repeated = not is_counted  # made by a reentrant recomputation
        self.generation = -1
        self.version = runtime.version
        self.entry = runtime.entry
        if is_counted:
            unit.num_outstanding += 1

    def __call__(self, _grad: Tensor) -> None:
        runtime, unit = self._runtime(), self._unit()
        if runtime is not None and unit is not None:
            runtime.on_ticket(self, unit)

    def leave(self) -> None:
        """This call is not outstanding any longer."""
        runtime, unit = self._runtime(), self._unit()
        if self._is_counted and runtime is not None and unit is not None:
            unit.num_outstanding -= runtime.counts(self.version)
            self._is_counted = False

    def __del__(self) -> None:
        self.leave()


class _Before(Uncopyable):
    """Forward pre-hook of a unit's module."""

    def __init__(self, runtime: Runtime, unit: Unit, member: Member) -> None:
        self._runtime = weakref.ref(runtime)
        self._unit = weakref.ref(unit)
        self._member = weakref.ref(member)

    def __call__(self, _module: nn.Module, _args: object) -> None:
        runtime, unit, member = self._runtime(), self._unit(), self._member()
        if runtime is not None and unit is not None and member is not None:
            runtime.before_forward(unit, member)


class _After(_Before):
    """Forward hook of a unit's module."""

    def __call__(self, _module: nn.Module, _args: object, output: object = None) -> None:
        runtime, unit, member = self._runtime(), self._unit(), self._member()
        if runtime is not None and unit is not None and member is not None:
            runtime.after_forward(unit, member, output)


def _eager_hook(
    runtime_ref: weakref.ref[Runtime], group_ref: weakref.ref[Group], index: int
) -> Callable[[Tensor], None]:
    def collect(_parameter: Tensor) -> None:
        runtime, group = runtime_ref(), group_ref()
        if runtime is not None and group is not None:
            runtime.collect_eagerly(group, index)

    return collect


class _End:
    """What a backward calls at its end."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = weakref.ref(runtime)

    def __call__(self) -> None:
        runtime = self._runtime()
        if runtime is not None:
            runtime.end_backward()


def _tensors(value: object, levels: int = 3) -> Iterator[Tensor]:
    """Every tensor that requires grad in an output of any common shape; objects are looked into, ``levels`` deep."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value
        return
    parts = _parts(value)
    is_open = hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module, ModuleType))
    if parts is None and levels and is_open:
        parts, levels = tuple(vars(value).values()), levels - 1
    for part in parts or ():
        yield from _tensors(part, levels)


def _parts(value: object) -> Iterable[object] | None:
    """What a container holds; ``None`` for anything else."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (tuple, list, set)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in fields(value)]
    return None
