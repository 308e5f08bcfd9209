"""The moments of a step, in the order of time: when units are gathered, released and reduced.

A unit is reduced when backward enters another one, a boundary that all ranks share. Reducing it when all its gradients
have arrived would order the collectives differently on ranks that use different parameters. A unit that backward will
enter again, for an earlier call, is reduced after that call.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardwise import torch_private
from shardwise.comm.axes import Comms
from shardwise.comm.base import Comm, Handle
from shardwise.engine.attach import Extras, Window
from shardwise.engine.gradient import GradientMemory, Meter, read_unused_flags
from shardwise.engine.group import Group
from shardwise.engine.hooks import (
    EndOfBackward,
    Ticket,
    attach_tickets,
    begin_label,
    end_label,
    gradient_hook,
    label,
)
from shardwise.engine.order import Backward, Forward, RankPeers
from shardwise.engine.unit import Member, State, Unit
from shardwise.spec.errors import CommError, StateError
from shardwise.spec.order import AgreedOrder, EntryPoint, ModelOrders, units_in
from shardwise.spec.placement import Placements
from shardwise.spec.unit_facts import EngineOptions

#: Whether ``extensions.safety.checks`` is active: observers are then called in every step, also where steps repeat.
is_checking = False


class Engine:
    """The engine of one model.

    Attributes:
        units: The units, outermost first; ``units[0]`` is the root.
        placements: Placements of the strategy.
        extras: Objects that other packages attach: observers, guards and others.
        window: State of the time between two updates of the parameters.
        gradients: Counts the full-size gradient buffers in use.
        gathered: Counts the bytes of gathered parameters.
        num_wrong_prefetches: Gathers so far of units that this rank then did not run.
        reducing: Reductions under way, oldest first: unit, group and the handle to wait for.
        epoch: Number of times that gathered buffers became out of date: an outermost forward that gathers again, or
            ``unshard_now``.
        version: Number of updates of the parameters. The backward of a call that ran before the newest update of its
            unit is refused.
        hooks: Handles of the hooks on modules and parameters.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        placements: Placements,
        comms: Comms,
        options: EngineOptions,
    ) -> None:
        self.units = list(units)
        self.reducing: deque[tuple[Unit, Group, Handle]] = deque()
        self.placements = placements
        self.comms = comms
        self.options = options
        self.extras = Extras()
        self.window = Window(options.accumulation(placements))
        self.gradients = GradientMemory(options.num_gradient_buffers, self._finish_oldest)
        self.gathered = Meter()
        self.num_wrong_prefetches = 0
        self.forward, self.backward = Forward(), Backward()
        self.orders = self._make_orders()
        self.version = 0
        # By the set of shards that were written: version of its last write, units.
        self._changes: dict[frozenset[int] | None, tuple[int, list[Unit]]] = {}
        self.epoch = 0
        self.hooks: list[Any] = []
        self._watched: set[int] = set()  # identities of full parameters with a gradient hook

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Wait for collectives under way before their memory is freed: the model has been deleted.

        The wait ends because running peers issue the same collectives. If they do not, the stall watch ends it.
        """
        if is_finalizing():  # an argument, because module globals are None at interpreter exit
            return
        handles = [handle for unit in self.units for handle in unit.handles]
        for handle in [*handles, *(entry[2] for entry in self.reducing)]:
            with contextlib.suppress(CommError):  # the next collective raises it again
                handle.wait()
        for unit in self.units:
            unit.dissolve()

    def _make_orders(self) -> ModelOrders:
        units, backward = self.units, self.backward
        gather, control, gathers = self.comms.gather, self.comms.control, self.placements.shards_optimizer

        def peers(entry: EntryPoint) -> tuple[RankPeers | None, RankPeers]:
            forward = RankPeers(gather, entry, units) if gathers else None
            return forward, RankPeers(control, entry, units, backward)

        return ModelOrders(peers, lambda entry: indices_below(units, entry), self.extras.resume_all)

    def remove(self) -> None:
        """Remove the hooks: the units now belong to another engine."""
        for hook in self.hooks:
            hook.remove()
        self.units = []

    @property
    def groups(self) -> Iterator[Group]:
        """Every group of every unit."""
        return (group for unit in self.units for group in unit.groups)

    @property
    def num_ranks_with_data(self) -> int:
        """Number of ranks over which gradients are averaged: those that have a batch."""
        known = (observer.num_ranks_with_data for observer in self.extras.observers)
        return next((number for number in known if number is not None), self.comms.num_ranks)

    # -- forward

    def before_forward(self, unit: Unit, member: Member, path: str = "") -> None:
        """Gather ``unit`` before its ``member``, or the module at ``path`` in it, runs.

        Collective:
            All-gather of the unit on ``dp_shard``, unless it is gathered already, and of the next one (prefetch).
        """
        is_traced = torch.compiler.is_dynamo_compiling() or torch_private.tracing_callback() is not None
        if is_traced or torch_private.is_transformed():
            _refuse_compiled(unit) if is_traced else self.require_full_parameters("a transform of torch.func", unit)
        if self.window.step.skips_hooks:
            self.window.step.refuse_grad()
            return
        calls, forward = unit.calls, self.forward
        if torch_private.current_backward() != -1:
            calls.replays.append(torch_private.next_sequence_number())
            self._ensure_gathered(unit)  # for a recomputation, which takes no place in the order and is not counted
            unit.is_unused = False
            return
        if self.backward.is_under_way:
            self.recover()
        elif unit.parent is None and not path:
            self.clean_up_interrupted()
        if forward.num_frames == 0:
            self._begin_forward(self.window.step.entry or (unit.index, path))
        elif threading.get_ident() != forward.thread:
            _refuse_thread(unit)
        forward.num_frames += 1
        calls.frames.append(torch_private.next_sequence_number())
        member.num_frames += 1
        calls.has_run |= forward.trains
        if self.placements.shards_optimizer:
            for index in self.orders.forward_order.advance_to(unit.index):
                self._visit(self.units[index])
        self._release_exited(but=unit)
        self.unshard(unit, ahead=self.orders.forward_order)
        unit.is_unused = False
        member.use_unsharded()
        self._prefetch(unit, self.orders.forward_order)
        begin_label(calls.labels, "forward", unit.name)

    def after_forward(self, unit: Unit, member: Member, output: object, path: str = "") -> None:
        """Attach tickets to ``output`` after ``member``, or the module at ``path``, has run; ``None``: it raised."""
        if self.window.step.skips_hooks:
            return
        calls, forward = unit.calls, self.forward
        if torch_private.current_backward() != -1:
            since = calls.replays.pop()
            if torch.is_grad_enabled():  # a reentrant recomputation runs its own backward through these
                attach_tickets(lambda: self._ticket(unit, path or member.path, is_counted=False), output, since)
            return
        if not calls.frames or (output is None and threading.get_ident() != forward.thread):
            return  # before_forward has raised
        end_label(calls.labels)
        since = calls.frames.pop()
        forward.num_frames -= 1
        if not torch.is_grad_enabled():
            calls.num_without_grad += forward.trains
        elif not torch_private.is_transformed():
            attach_tickets(lambda: self._ticket(unit, path or member.path), output, since)
        self._exit(unit, member)
        if forward.num_frames == 0:
            for notify in self.extras.forward_ended:
                notify(self)
            if output is not None or sys.exception() is forward.handled_exception:
                self._end_forward()
            else:  # it raised: the next forward drops gathers under way
                self._fail(self.orders.forward_order)

    def _ticket(self, unit: Unit, path: str, *, is_counted: bool = True) -> Ticket:
        """Make a ticket for the call of ``unit``, through its module at ``path``, that has just ended."""
        if is_counted:
            self.forward.path.append(unit.index)
        entry = self.orders.entry
        return Ticket(self.pre_backward, unit, path, entry=entry, version=self.version, is_counted=is_counted)

    def _exit(self, unit: Unit, member: Member) -> None:
        member.num_frames -= 1
        if member.num_frames <= 0 and not self.window.step.keeps_units:
            member.use_sharded()
            unit.all_use_unsharded = False
        if not unit.calls.frames:
            self.forward.exited.append(unit)

    def _begin_forward(self, entry: EntryPoint) -> None:
        self.need_values("a forward")
        forward = self.forward
        forward.thread = threading.get_ident()
        forward.handled_exception = sys.exception()
        forward.trains = torch.is_grad_enabled()
        for unit in self.units:
            if unit.state is State.UNSHARDING and not self._is_kept(unit):  # prefetched by a forward that raised
                self.reshard(unit)
        while forward.exited:
            self.reshard(forward.exited.pop())
        forward.is_shared = forward.trains or self.window.evaluates
        self.orders.enter(entry, trains=forward.trains, is_shared=forward.is_shared)
        if is_checking or not self.orders.forward_order.is_recorded or torch_private.active_ddp() is not None:
            self.extras.resume_all()
        self.refresh()
        # Cached autocasts of an earlier forward belong to its graph. Their gradients would arrive after backward has
        # left the units.
        torch.clear_autocast_cache()
        for notify in self.extras.forward_begins:
            notify(self, entry)
        self.window.is_open |= self.window.evaluates
        self.orders.forward_order.start()
        if forward.version != self.version:
            for unit in self.units:
                if unit.version > forward.version:
                    unit.calls.num_outstanding = 0  # the backward of calls before the last update is refused
            forward.version = self.version

    def open_window(self, begin: Callable[[Engine], None]) -> None:
        """Open a window of several forwards between which no parameter changes; ``begin`` is called if none is open."""
        self.forward.trains = torch.is_grad_enabled()
        if not self.window.is_open:
            begin(self)
            self.refresh()
            self.window.is_open = True

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Run forwards without grad, made by all ranks together, between which no parameter changes.

        Units that are replicated, or stay gathered after forward, are gathered once.
        """
        was_open = self.window.is_open
        try:
            with self.window.override(evaluates=True):
                yield
        finally:
            if not was_open:
                self.window.close()
            for unit in self.units:
                self._reshard_after_forward(unit, needs_backward=False)

    def interrupt(self, *, has_gradients: bool, had_sums: bool) -> None:
        """Close a window that an exception has ended; the next call drops its remains (:meth:`recover`).

        ``had_sums``: sums of earlier windows were waiting when it began.
        """
        self.window.close()
        for unit in self.units:
            unit.use_sharded()
        if has_gradients or self.reducing:
            self.backward.is_under_way, self.backward.had_sums = True, had_sums

    def refresh(self) -> None:
        """Mark gathered buffers as out of date, so that the present values of the masters are gathered from now on."""
        if not self.window.is_open:
            self.epoch += 1
        self.apply_user_changes()

    def _end_forward(self) -> None:
        order, agrees = self.orders.forward_order, self.forward.is_shared and self.placements.shards_optimizer
        self.forward.handled_exception = None  # its traceback holds activations
        if agrees:
            for index in order.finish():
                self._visit(self.units[index])
        self._release_exited()
        for unit in self.units:
            if unit.state is State.UNSHARDING and not self._is_kept(unit):  # prefetched and never used
                self.wait(unit)
                self._reshard_after_forward(unit, needs_backward=False)
        if agrees:
            self._agree(order, self.comms.gather)
        else:
            order.end()
            # No agreement is needed: outside of evaluations, ranks that gather together take the same path.
            if order.is_overgrown:
                order.keep(order.marks())

    def _agree(self, order: AgreedOrder, comm: Comm) -> None:
        """Remove from an order that has grown too long the places that no rank uses.

        Collective:
            All-reduce of two integers for each place of the order, on ``dp_shard`` at the end of a shared forward,
            over all data-parallel ranks at the end of a backward; only where the paths through the model keep changing.
        """
        if order.is_overgrown:
            marks = torch.tensor(order.marks(), device=comm.device)
            comm.all_reduce(marks, unit="order").wait()
            order.keep(marks.tolist())

    def _visit(self, unit: Unit) -> None:
        """Gather a unit that this rank's forward skips, because the peers gather it."""
        if not self.forward.is_shared:
            return
        self._release_exited(but=unit)
        self.unshard(unit)
        if not unit.calls.frames:
            self.forward.exited.append(unit)

    def _release_exited(self, *, but: Unit | None = None) -> None:
        """Release the units that forward has left, except ``but`` and those that are kept for backward."""
        exited, self.forward.exited = self.forward.exited, []
        for unit in exited:
            if unit is not but:
                self._reshard_after_forward(unit, needs_backward=self._has_backward(unit))

    def _has_backward(self, unit: Unit) -> bool:
        """Whether backward will enter the unit: it did in some step, or the unit is the root. The same on all ranks.

        A unit that only peers have run so far is assumed to take part in their backward.
        """
        if not self.forward.trains:
            return False
        is_run_by_peers = self.orders.forward_order.is_new(unit.index) and not unit.calls.has_run
        return unit.parent is None or is_run_by_peers or self.orders.has_backward(unit.index)

    def _reshard_after_forward(self, unit: Unit, *, needs_backward: bool) -> None:
        if unit.is_resident or unit.state is not State.UNSHARDED:
            return
        if needs_backward or unit.calls.num_outstanding > 0 or self.window.evaluates:
            if not unit.reshards_after_forward:
                return
            if self.forward.trains and self.orders.forward_order.is_last(unit.index):
                return  # backward begins with this unit
        if self.forward.trains:
            for group in unit.groups:
                group.form.keep(group)
        self.reshard(unit)

    # -- gathering

    def _is_current(self, unit: Unit) -> bool:
        """Whether the gathered buffers hold the values that the masters had at the outermost forward."""
        for group in unit.groups:  # noqa: SIM110 - on a hot path
            if group.epoch != self.epoch and group.needs_refresh:
                return False
        return True

    def unshard(self, unit: Unit, *, ahead: AgreedOrder | None = None) -> None:
        """Gather the unit if it is not up to date, and wait for it; the next units of ``ahead`` are prefetched."""
        if unit.state is State.UNSHARDED and (self._is_current(unit) or unit.calls.frames[1:]):
            return
        self._fetch(unit, ahead)

    def _fetch(self, unit: Unit, ahead: AgreedOrder | None) -> None:
        """Gather the unit, unless its gather is under way, and wait for it."""
        if unit.state is not State.UNSHARDING:
            self._issue_gather(unit)
        # Packed gathers share one buffer, so only one can be under way.
        if ahead is not None and not any(group.facts.gathered_as for group in unit.groups):
            self._prefetch(unit, ahead)
        self.wait(unit)

    def _issue_gather(self, unit: Unit) -> None:
        while unit.state is State.REDUCING:
            self._finish_oldest()
        if self.backward.is_under_way and unit.updated_in == self.backward.generation:
            raise StateError(
                f"backward came back to unit {unit.name!r} after its parameters had been updated: a value left the unit"
                " without passing through its outputs.\n"
                "  Return the value from the unit's forward, or do without sw.optimizer_in_backward()."
            )
        unit.move_to(State.UNSHARDING)
        try:
            for group in unit.groups:
                if not group.needs_refresh or (group.is_resident and group.epoch == self.epoch):
                    continue
                self.gathered.add(num_bytes := group.allocate())
                if is_checking and num_bytes:
                    group.poison()
                is_kept = group.form.kept_epoch == self.epoch
                for notify in self.extras.before_gather:
                    notify(self, unit, group, is_kept=is_kept)
                group.epoch = self.epoch
                with label("gather", unit.name):
                    unit.handles.append(group.form.gather_kept(group) if is_kept else group.form.gather(group))
                unit.is_unused = True
        except BaseException:
            self.reshard(unit)  # a unit with some groups gathered cannot be used
            raise

    def wait(self, unit: Unit) -> None:
        """Wait for the gathers of a unit."""
        if unit.handles:
            with label("wait", unit.name):
                for handle in unit.handles:
                    handle.wait()
            unit.handles.clear()
        unit.move_to(State.UNSHARDED)

    def _prefetch(self, unit: Unit, order: AgreedOrder) -> None:
        """While ``unit`` computes, issue the gathers of the next units, up to one that cannot be gathered yet."""
        for index in order.upcoming(unit.ahead[order.is_backward]):
            following = self.units[index]
            if following.state is State.REDUCING:
                return
            if following.calls.frames:
                return  # its call is running; ranks that skip this call release the unit and gather it again later
            is_there = following.state is State.UNSHARDING
            if following.state is State.UNSHARDED and (self.backward.is_under_way or self._is_current(following)):
                is_there = True
            if not is_there:
                self._issue_gather(following)

    def gather_ahead(self) -> None:
        """Issue the gathers of all units that the forwards of a step will run, in that order.

        Collective:
            As ``Form.gather`` of each unit in the agreed orders; nothing before these are recorded. Without prefetching
            (``forward_prefetch=0``), and for packed gathers, which share one buffer, each unit is gathered when its
            forward begins.
        """
        for index in units_in(self.orders.forward):
            unit = self.units[index]
            is_packed = any(group.facts.gathered_as for group in unit.groups)
            if unit.ahead[0] and not is_packed and unit.state is State.SHARDED:
                self._issue_gather(unit)

    def _is_kept(self, unit: Unit) -> bool:
        """Whether the step keeps the unit gathered."""
        return self.window.step.keeps_units and self.window.step.is_kept(unit)

    def _ensure_gathered(self, unit: Unit, *, ahead: AgreedOrder | None = None) -> None:
        """Gather the unit's parameters inside a backward, without taking part in the order."""
        if unit.state is not State.UNSHARDED:
            self._fetch(unit, ahead)
        unit.use_unsharded()

    def reshard(self, unit: Unit) -> None:
        """Free the unit's gathered buffers. Replicated parameters stay allocated."""
        if unit.state is State.UNSHARDING:
            self.wait(unit)
        self.num_wrong_prefetches += unit.is_unused
        unit.is_unused = False
        if self._is_kept(unit):
            return
        unit.use_sharded()
        for group in unit.groups:
            self.gathered.add(-group.release())
        if unit.state is State.UNSHARDED:
            unit.move_to(State.SHARDED)

    # -- backward

    def pre_backward(self, ticket: Ticket, unit: Unit) -> None:
        """Enter ``unit``: backward has reached a call of it."""
        backward = self.backward
        if backward.is_under_way and backward.end is not None and backward.end() is None:
            self.recover()  # an earlier backward raised; this one is not nested in it
        if backward.is_under_way and ticket.generation == backward.generation:
            return
        if ticket.version < unit.version:
            self._refuse_changed(unit, unit.shards_below(ticket.path), ticket.version)
        if torch.is_grad_enabled():
            self.require_full_parameters("backward with create_graph=True", unit)
            ticket.mark_reached(unit)
            return  # a gradient of a parameter, if one arrives, enters its unit
        if not backward.is_under_way:
            self._begin_backward(ticket.entry)
        ticket.generation = backward.generation
        ticket.mark_reached(unit)
        unit.calls.num_recomputed += ticket.is_repeated
        self._enter_with_peers(unit)

    def _enter_with_peers(self, unit: Unit) -> None:
        """Enter ``unit``, which backward has reached, after the units that peers enter before it."""
        unit.calls.was_reached = True
        if not self._communicates(unit):
            self._ensure_gathered(unit)
            return
        for index in self.orders.backward_order.advance_to(unit.index):
            self._enter(self.units[index])
        self._enter(unit)
        unit.is_unused = False

    def _communicates(self, unit: Unit) -> bool:
        """Whether backward gathers or reduces the unit, which then needs a place in the order; not a frozen replica."""
        return not unit.is_resident or any(group.wants_gradients for group in unit.groups)

    def on_use_outside(self, group: Group, index: int, grad: Tensor) -> None:
        """Add a gradient of a shard that is the full parameter: the parameter was used outside of its unit."""
        self._enter_without_ticket(group.unit)
        _refuse_graph(group.unit, [grad])
        group.gradient.add(index, grad, self.gradients)

    def on_gradient(self, group: Group, index: int) -> None:
        """Enter the unit of a full parameter that has received a gradient, maybe without a ticket before it."""
        unit, parameter = group.unit, group.unsharded[index]
        if parameter.grad is None:
            return
        if unit.version > self.forward.version:
            self._refuse_changed(unit, {id(group.shards[index])}, self.forward.version)
        grad, parameter.grad = parameter.grad, None  # because recover() drops it
        self._enter_without_ticket(unit)
        parameter.grad = grad

    def _enter_without_ticket(self, unit: Unit) -> None:
        """Enter ``unit`` in a backward without a ticket; it gets a place in the order, so that all peers take part."""
        backward = self.backward
        if backward.is_under_way and backward.end is not None and backward.end() is None:
            self.recover()
        if not backward.is_under_way:
            self._begin_backward(self.orders.entry)
        if unit not in backward.entered:
            self._enter_with_peers(unit)

    def require_full_parameters(self, what: str, unit: Unit) -> None:
        """Refuse ``what``, which differentiates by more than one backward, unless every parameter is stored in full.

        If it is allowed, later backwards may bring gradients of the unit without a ticket before them. Hooks on the
        parameters detect these.
        """
        comms = self.comms
        is_divided = any(comm is not None for comm in (comms.tp, comms.pp, comms.cp, comms.ep))
        if is_divided or any(not group.is_resident or group.placements.shards_optimizer for group in self.groups):
            raise StateError(
                f"{what} reached unit {unit.name!r}: the plan divides its parameters, or their gradients, over ranks,"
                " and then only first derivatives are computed, by loss.backward().\n"
                "  Set strategy='ddp' (without tp, pp, cp and ep), under which it works, or compute it with a plain"
                " model that takes model.state_dict() of `with sw.full_parameters(model):`."
            )
        for group in unit.groups:
            for index, full in enumerate(group.unsharded):
                if full.requires_grad and id(full) not in self._watched:
                    self._watched.add(id(full))
                    hook = gradient_hook(self.on_gradient, group, index)
                    self.hooks.append(Tensor.register_post_accumulate_grad_hook(full, hook))

    def _begin_backward(self, entry: EntryPoint) -> None:
        if threading.get_ident() != self.forward.thread and torch_private.has_rpc_agent():
            self.extras.resume_all()
        for notify in self.extras.backward_begins:
            notify(self)
        backward = self.backward
        backward.is_under_way = True
        backward.makes_graph = torch.is_grad_enabled()
        for group in self.groups:
            group.copy_requires_grad()
        backward.had_sums = any(group.gradient.is_local for group in self.groups)
        backward.has_accumulated |= backward.had_sums
        backward.generation += 1
        self.orders.enter_backward(entry, anew=self._needs_negotiation(entry))
        end = EndOfBackward(self.end_backward)
        torch_private.at_end_of_backward(end)
        backward.end = weakref.ref(end)

    def _needs_negotiation(self, entry: EntryPoint) -> bool:
        """Whether this backward may leave its order on some rank, so that the ranks negotiate it. All ranks agree.

        Collective:
            An exchange of messages over all data-parallel ranks, while no rank has run the whole order in one pass, or
            while there are trained units that no backward has entered. Under ``hsdp``, where forwards of different
            shard groups exchange nothing, also while there are frozen units that no backward has entered.
        """
        order, gather_order = self.orders.backward[entry], self.orders.forward[entry]
        has_shard_peers = self.placements.shards_optimizer and self.comms.gather.size > 1
        is_same_comm = self.comms.control is self.comms.gather
        was_open, gather_order.was_open = gather_order.was_open, False
        if was_open and is_same_comm:
            return True
        missing = [unit for unit in map(self.units.__getitem__, order.missing) if self._communicates(unit)]
        lacks_trained = any(group.wants_gradients for unit in missing for group in unit.groups)
        is_exchanged = not order.is_settled or lacks_trained or (bool(missing) and not is_same_comm)
        path = (index for index in reversed(self.forward.path) if self._communicates(self.units[index]))
        stays = order.is_settled or (has_shard_peers and order.contains_path(path))
        is_wanted_here = was_open or not stays or any(unit.calls.num_outstanding for unit in missing)
        return order.is_negotiation_wanted(is_wanted_here=is_wanted_here, is_exchanged=is_exchanged)

    def _fail(self, order: AgreedOrder) -> None:
        """Notify peers that negotiate a pass that an exception has ended it on this rank; they raise too."""
        with contextlib.suppress(CommError):
            order.fail()

    def _enter(self, unit: Unit) -> None:
        """Enter ``unit`` in backward: reduce the units that backward has left, gather ``unit``, prefetch the next ones.

        Ranks whose backward reaches the unit and ranks that skip it do the same, so that the gathers on one Comm and
        the reductions on another each follow one order on all ranks ([Note: Agreed order]).
        """
        backward = self.backward
        with label("backward", unit.name):
            for other in backward.entered.copy():
                if other.index not in unit.family and not self._is_outstanding(other):
                    self.post_backward(other)
            backward.active = unit
            if unit not in backward.entered:
                backward.entered.append(unit)
            self._ensure_gathered(unit, ahead=self.orders.backward_order)
        self._prefetch(unit, self.orders.backward_order)

    def _is_outstanding(self, unit: Unit) -> bool:
        """Whether backward will enter this unit again, for an earlier call of it."""
        order = self.orders.backward_order
        if order.is_open:
            return unit in self.backward.awaited
        if order.is_recorded and order.remaining(unit.index) > 0:
            return True
        # This rank's loss may not depend on a call on which the losses of its peers depend.
        return unit.calls.is_outstanding and (unit.calls.was_reached or not order.is_recorded)

    def post_backward(self, unit: Unit) -> None:
        """Release a unit that backward has left, and issue the reduction of its gradients.

        Collective:
            Reduce-scatter or all-reduce of each trained group on ``dp_shard``, if this backward synchronizes or
            gradients of microbatches are accumulated sharded; on ``dp_replicate``, the all-reduce of the unit before.
            Otherwise as ``Step.leave``.
        """
        if unit in self.backward.entered:
            self.backward.entered.remove(unit)
        if self.backward.makes_graph:
            _refuse_graph(unit, [full.grad for group in unit.groups for full in group.unsharded])
        while unit.state is State.REDUCING:
            self._finish_oldest()  # a gradient arrived after the unit was reduced; its buffer is still being reduced
        reduces = self.window.syncs or self.window.mode != "unsharded"
        # Free buffers of finished reductions and the unit's parameters before the unit allocates its gradient buffer.
        if reduces:
            self.wait_for_reductions(keep=self._max_under_way)
        is_read = any(group.gradient.shares_parameter_memory for group in unit.groups)
        if not is_read:
            self.reshard(unit)
        for group in unit.groups:
            if group.wants_gradients:
                group.gradient.collect(self.gradients)
        if is_read:
            self.reshard(unit)
        if reduces:
            self.reduce(unit)
        else:
            self.window.step.after_collect(self, unit)

    def reduce(self, unit: Unit) -> None:
        """Issue the reduction of a unit whose gradients have been collected.

        Collective:
            As :meth:`post_backward`.
        """
        trained = [group for group in unit.groups if group.wants_gradients]
        if not trained:
            return
        unit.move_to(State.REDUCING)
        for notify in self.extras.before_reduce:
            notify(self, unit)
        if not self.window.step.ends_with_backward:  # otherwise post_backward has waited
            self.wait_for_reductions(keep=self._max_under_way)
        is_last = self.window.syncs or self.window.mode != "defer_replicate"
        for group in trained:
            with label("reduce", unit.name):
                handle = group.gradient.reduce(self.gradients, is_last=is_last)
            self.reducing.append((unit, group, handle))

    @property
    def _max_under_way(self) -> int:
        """Number of units whose reductions may stay under way while another unit's is issued."""
        if self.comms.replicate is not None:
            return 0  # the all-reduce on dp_replicate must be issued now
        return self.gradients.limit - 2

    def wait_for_reductions(self, *, keep: int = 0) -> None:
        """Start the next phase of every reduction under way, oldest first; finish those that have no further phase.

        The ``keep`` newest units are left alone.
        """
        newest: set[Unit] = set()
        for unit, _, _ in reversed(self.reducing):
            if len(newest) >= keep:
                break
            newest.add(unit)
        for entry in tuple(self.reducing):
            if entry[0] in newest:
                break
            has_more = entry[2].start_next_phase()
            if not has_more and entry is self.reducing[0]:
                self._finish_oldest()

    def mark_updated(self, unit: Unit) -> None:
        """Record that the parameters of ``unit`` have been updated inside the backward under way."""
        unit.updated_in = self.backward.generation

    def _finish_oldest(self) -> bool:
        """Finish the oldest reduction under way. Returns False if there is none."""
        if not self.reducing:
            return False
        unit, group, handle = self.reducing.popleft()
        handle.wait()
        group.gradient.finish(self.gradients)
        for notify in self.extras.reduced:
            notify(self, unit, group)
        if unit.state is State.REDUCING and not (self.reducing and self.reducing[0][0] is unit):
            unit.move_to(State.SHARDED)
        return True

    def end_backward(self) -> None:
        """End a backward: reduce the remaining units, wait for the reductions, release everything."""
        for index in self.orders.backward_order.finish():
            self._enter(self.units[index])
        for unit in reversed(self.backward.entered.copy()):
            self.post_backward(unit)
        # In a pipeline the previous stage waits for this backward; the reductions are waited for at the step's end.
        if self.window.step.ends_with_backward:
            self.finish_reductions()
        self._agree(self.orders.backward_order, self.comms.control)
        for unit in self.units:
            if unit.state is State.UNSHARDING or unit.state is State.UNSHARDED:
                self.reshard(unit)
            if not self.window.step.keeps_units:
                unit.use_sharded()
            unit.calls.num_left_before = unit.calls.num_outstanding
            unit.calls.end_backward()
        self._reset_backward()
        self.window.is_open = not self.window.syncs

    def _reset_backward(self) -> None:
        backward = self.backward
        backward.is_under_way = False
        backward.active = None
        backward.entered.clear()
        backward.awaited.clear()
        self.forward.path.clear()

    def finish_reductions(self) -> None:
        """Reduce gradients that no ticket announced, and wait for all reductions; backward has left every unit."""
        self._finish_strays()
        self.drain()
        for notify in self.extras.backward_ended:
            notify(self)

    def _finish_strays(self) -> None:
        """Reduce waiting sums, and gradients without a ticket: of values that left a unit other than by its outputs."""
        generation = self.backward.generation
        for unit in self.units:
            trained = [group for group in unit.groups if group.wants_gradients]
            strays = [
                spec
                for group in trained
                for spec, full in zip(group.layout.params, group.unsharded, strict=True)
                if full.grad is not None
            ]
            was_kept = unit.state is State.UNSHARDED and not unit.reshards_after_forward
            is_there = was_kept or unit.regathered_in == generation or all(group.is_permanent for group in unit.groups)
            if strays and (not is_there or unit.updated_in == generation):
                for group in trained:
                    for full in group.unsharded:
                        full.grad = None
                when = "after unit {!r} had been updated" if is_there else "while unit {!r} was not gathered"
                raise StateError(
                    f"a gradient for {strays[0].name!r} (logical shape {list(strays[0].shape)}) arrived"
                    f" {when.format(unit.name)}: a value left the unit without passing through its outputs.\n"
                    "  Return the value from the unit's forward, or wrap the module that uses it as well."
                )
            if strays or (self.window.syncs and any(group.gradient.is_local for group in trained)):
                self.post_backward(unit)

    def drain(self) -> None:
        """Wait for every reduction under way and for its copy to the host, then read the flags of unused parameters."""
        while self.reducing:
            self.wait_for_reductions()
        self.wait_for_host()
        read_unused_flags(group.gradient for group in self.groups)

    def regather(self, unit: Unit) -> None:
        """Gather a unit again because autograd reads a saved tensor whose memory was freed with the unit."""
        self._ensure_gathered(unit)
        unit.is_unused = False
        unit.regathered_in = self.backward.generation

    # -- after an exception

    def recover(self) -> None:
        """Drop what a backward that raised has left under way. Gradients already on ``.grad`` stay.

        Raises:
            StateError: Sums of earlier microbatches are lost, or some units were updated inside that backward.
        """
        backward = self.backward
        self._fail(self.orders.backward_order)
        self.wait_for_host()
        while self.reducing:
            self.reducing.popleft()[2].wait()  # its buffer is in use until then; the sum is dropped below
        for unit in self.units:
            if unit.state is State.REDUCING:
                unit.move_to(State.SHARDED)
            unit.calls.end_backward()
            unit.calls.replays.clear()
            for group in unit.groups:
                group.gradient.drop(self.gradients)
        self._release_all()
        self._reset_backward()
        if backward.had_sums:
            raise StateError(
                "a backward failed while gradients were being accumulated: the sums of the earlier microbatches are"
                " lost.\n"
                "  Call zero_grad() and begin the step again."
            )
        if any(unit.updated_in == backward.generation for unit in self.units):
            raise StateError(
                "a backward failed after it had updated some of the units: the parameters are of two different steps.\n"
                "  Load a checkpoint."
            )

    def clean_up_interrupted(self) -> None:
        """Clean up after a forward that was interrupted, for which torch runs no hooks; the caller is outside of it."""
        if self.forward.num_frames and threading.get_ident() == self.forward.thread:
            self.clean_up_forward()

    def clean_up_forward(self) -> None:
        """Clean up after a forward that ended without its hooks."""
        for notify in self.extras.forward_ended:
            notify(self)
        self._fail(self.orders.forward_order)
        self._release_all()

    def _release_all(self) -> None:
        self.forward.exited.clear()
        self.forward.num_frames = 0
        for unit in self.units:
            self.reshard(unit)
            unit.clear_frames()

    # -- between steps

    def require_idle(self, call: str) -> None:
        """Refuse ``call`` unless the engine is between steps; drop the remains of a backward that raised."""
        self.wait_for_host()
        self.need_values(call)
        self.window.step.refuse(call)
        if self.forward.num_frames > 0 or torch_private.current_backward() != -1:
            raise StateError(
                f"{call} was called inside a forward or backward (or after a forward was interrupted).\n"
                "  Call it between steps."
            )
        if self.backward.is_under_way:
            self.recover()
        self.apply_user_changes()

    def need_values(self, call: str) -> None:
        """Call the guards, which raise if ``call`` may not use the parameters' values."""
        for guard in self.extras.guards:
            guard(self, call)

    def apply_user_changes(self) -> None:
        """Apply the user's changes of the parameters (``p.data = ...``, ``requires_grad``) to masters and full ones."""
        for group in self.groups:
            group.apply_user_changes()
        self.free_gradients()

    def free_gradients(self) -> None:
        """Free the memory of ``.grad`` in every group where ``zero_grad()`` has dropped all of it."""
        for group in self.groups:
            group.gradient.free()

    def wait_for_host(self) -> None:
        """Make the host wait for copies from and to its memory, and for optimizer updates that run there."""
        for wait in self.extras.host_waits:
            wait()

    def invalidate(self, changed: frozenset[int] | None = None) -> None:
        """Mark gathered buffers as out of date: the masters of these shards (``id``; ``None``: all) were written."""
        self.clean_up_interrupted()
        self.window.close()
        self.version += 1
        units = self._changes[changed][1] if changed in self._changes else self.units
        if changed is not None and changed not in self._changes:
            units = [unit for unit in units if not changed.isdisjoint(unit.shards_below(""))]
        self._changes[changed] = self.version, units
        for unit in units:
            unit.version = self.version

    def _refuse_changed(self, unit: Unit, used: set[int], since: int) -> None:
        """Refuse the backward of a forward of ``unit`` if a shard that it may have used has been written since."""
        newer = [changed for changed, (version, _) in self._changes.items() if version > since]
        unchanged = set() if None in newer else used.difference(*filter(None, newer))
        if unchanged == used:
            return
        advice = f", or make the modules of {unit.name!r} that this optimizer trains units of their own"
        raise StateError(
            f"backward reached a forward of unit {unit.name!r} that ran before the last optimizer.step(): its"
            " parameters have changed since.\n  Call backward() before optimizer.step()"
            f"{advice + ' (auto_wrap_policy=sw.wrap_by_name(...))' if unchanged else ''}."
        )

    def sync_buffers(self) -> None:
        """Make the model's buffers equal on all ranks now, not only at the next forward.

        Collective:
            Those of ``Extras.before_state``. All ranks must call.
        """
        for make_equal in self.extras.before_state:
            make_equal()

    def unshard_now(self, unit: Unit) -> None:
        """Gather a unit on request; its modules then hold the full parameters until :meth:`reshard_now`.

        Collective:
            All-gather of the unit. All ranks must call.
        """
        self.epoch += 1
        self.unshard(unit)
        unit.use()

    def reshard_now(self, unit: Unit) -> None:
        """Undo :meth:`unshard_now`."""
        if unit.state is State.UNSHARDED and not unit.calls.frames:
            self.reshard(unit)


def indices_below(units: Sequence[Unit], entry: EntryPoint) -> Sequence[int]:
    """Numbers of the units that a forward through ``entry`` may run; none for a stage, whose units all run."""
    if entry[0] < 0:
        return ()
    roots = (entry[1],) if entry[1] else tuple(member.path for member in units[entry[0]].members)
    inside = tuple(f"{path}." for path in roots) if roots != ("",) else ("",)
    return [i for i, unit in enumerate(units) if any(f"{member.path}.".startswith(inside) for member in unit.members)]


def _refuse_compiled(unit: Unit) -> NoReturn:
    raise StateError(
        f"unit {unit.name!r} was called inside torch.compile(), which would trace the engine's messages.\n"
        "  Set sw.ParallelPlan(compile=True), which compiles the units, and leave torch.compile() out."
    )


def _refuse_graph(unit: Unit, grads: Sequence[Tensor | None]) -> None:
    """Refuse gradients that have an autograd graph, because their mean over the ranks would have none."""
    if any(grad is not None and grad.requires_grad for grad in grads):
        raise StateError(
            f"loss.backward(create_graph=True) left gradients of unit {unit.name!r} that have a graph; their means over"
            " the ranks have none.\n"
            "  Call torch.autograd.grad(outputs, inputs, create_graph=True), compute the loss with what it returns, and"
            " call loss.backward()."
        )


def _refuse_thread(unit: Unit) -> NoReturn:
    raise StateError(
        f"unit {unit.name!r} was called from a second thread while a forward is under way in another.\n"
        "  Call the model from one thread at a time."
    )
