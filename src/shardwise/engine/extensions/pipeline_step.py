"""Pipeline steps: several forwards and backwards with the same parameters, then one update.

Units that are gathered once stay gathered for the step. Once the orders of the stages are known, the gathers of all of
them are issued when the step begins, and run while the rank waits for the previous stages.

Gradients are added up on this rank and reduced once. In the last backward of a stage each of its units is released and
reduced when backward has left it, in parallel with the backward of earlier units and of other stages. Reductions are
issued in a fixed order, the last unit first, so that the order of collectives is the same on all ranks. Units that do
not belong to one stage alone (the root, parameters that several stages or ranks use) are reduced at the end.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from shardwise.comm.base import Comm
from shardwise.engine.attach import Step
from shardwise.engine.engine import Engine
from shardwise.engine.extensions.module_buffers import sync_if_due
from shardwise.engine.gradient import Gradient
from shardwise.engine.storage.attachment import group_and_index
from shardwise.engine.storage.waiting import WaitingSums
from shardwise.engine.unit import State, Unit
from shardwise.spec.errors import StateError
from shardwise.spec.order import stage_entry


class PipelineStep(Step):
    """A pipeline step.

    Args:
        engine: The engine.
        last: Number of the microbatch whose backward through a stage reduces the stage's units; ``None``: none does.
        synchronises: Whether gradients are reduced in this step.
    """

    ends_with_backward = False

    def __init__(self, engine: Engine, last: int | None = None, *, synchronises: bool = False) -> None:
        self.keeps_units = all(not unit.reshards_after_forward for unit in engine.units)
        self.has_gradients = False  # whether a backward of this step has collected gradients
        self._engine = engine
        self._last = last if synchronises else None
        self._synchronises = synchronises
        self._due: deque[Unit] = deque()  # units to reduce in the backward under way, in this order
        self._exited: set[Unit] = set()  # units that this backward has left
        self._reduced: set[Unit] = set()

    def enter(self, stage: int, microbatch: int) -> None:
        """Announce that the next forward or backward is that of ``microbatch`` through ``stage``.

        The first forward gathers the stage's units in the stage's order. Later ones find them gathered and skip the
        hooks, except the last microbatch, whose hooks detect when its backward leaves a unit.
        """
        self.entry = stage_entry(stage)
        is_last = microbatch == self._last
        self.skips_hooks = self.keeps_units and microbatch > 0 and not is_last
        self._exited.clear()
        self._due = self._of_stage(stage) if is_last else deque()

    def is_kept(self, unit: Unit) -> bool:
        """Whether the unit stays gathered: until it has been reduced."""
        return unit not in self._reduced

    def after_collect(self, engine: Engine, unit: Unit) -> None:
        """Reduce the next due units, in their fixed order, as far as backward has left them.

        Collective:
            As :meth:`Engine.reduce`, in a last backward.
        """
        self._exited.add(unit)
        while self._due and self._due[0] in self._exited:
            ready = self._due.popleft()
            self._reduced.add(ready)
            engine.reshard(ready)
            engine.reduce(ready)

    @torch.no_grad()
    def end(self, stage: int, compute: Callable[[Sequence[Tensor]], None] | None = None) -> None:
        """Reduce the remaining units of ``stage`` after its last backward; ``compute`` adds deferred weight gradients.

        Collective:
            As :meth:`Engine.reduce`; nothing if this step does not synchronize.
        """
        if not self._synchronises:
            return
        self._exited.clear()
        self._due = self._of_stage(stage)
        for unit in tuple(self._due):
            if compute is not None:
                compute([full for group in unit.groups for full in group.unsharded])
            self._engine.post_backward(unit)

    def collect(self) -> None:
        """Add the gradients of full parameters to those of earlier microbatches."""
        self.has_gradients = True
        for unit in self._engine.units:
            if unit in self._reduced:
                continue
            for group in unit.groups:
                if group.wants_gradients:
                    group.gradient.collect(self._engine.gradients)
                    if self.keeps_units:
                        group.gradient.accumulate_in_place()

    def reduce(self, before: Callable[[], None]) -> None:
        """Call ``before``, then reduce the gradients of all remaining units, last unit first."""
        engine = self._engine
        with torch.no_grad():
            before()
            for unit in reversed(engine.units):
                if unit not in self._reduced:
                    engine.post_backward(unit)
            engine.finish_reductions()

    def _of_stage(self, stage: int) -> deque[Unit]:
        units = self._engine.extras.get_or_make(StageUnits).get(stage, ())
        return deque(unit for unit in reversed(units) if unit not in self._reduced)


@contextlib.contextmanager
def open_step(engine: Engine, before_reduction: Callable[[], None], last: int | None) -> Iterator[PipelineStep]:
    """Run several forwards and backwards on the same parameters, and reduce their gradients.

    Collective:
        If grad is enabled and the window synchronizes: the reduction of every unit, last unit first. Units that belong
        to one stage alone are reduced in its last backward, the others at the end.
    """
    _refuse_observers(engine)
    engine.require_idle("sw.train_step")
    sums = engine.extras.get_or_make(WaitingSums)
    sums.hide(engine)
    window = engine.window
    synchronises = window.syncs and torch.is_grad_enabled()
    engine.open_window(sync_if_due)
    had_sums = any(group.gradient.is_local for group in engine.groups)
    opened = PipelineStep(engine, last, synchronises=synchronises)
    try:
        with window.override(syncs=False, step=opened):  # the step decides when units are reduced
            if opened.keeps_units and torch.is_grad_enabled():
                engine.gather_ahead()
            yield opened
        for unit in engine.units:
            if unit.state in {State.UNSHARDING, State.UNSHARDED}:
                engine.reshard(unit)
        if synchronises:
            opened.reduce(before_reduction)
    except BaseException:
        # Do not wait for collectives here, because peers may be waiting for this rank. The next call drops the remains.
        engine.interrupt(has_gradients=opened.has_gradients, had_sums=had_sums)
        raise
    if window.syncs or not torch.is_grad_enabled():
        window.close()
    sums.show(engine)


def _refuse_observers(engine: Engine) -> None:
    if any(observer.updates_in_backward for observer in engine.extras.observers):
        raise StateError(
            "a pipeline step adds up the gradients of its microbatches: sw.optimizer_in_backward() does not go with"
            " it.\n  Leave it out, or set pp=1."
        )


class ConstantParameters(Step):
    """Several forwards without grad with the same parameters; ``call`` names the user's call in errors."""

    skips_hooks = True
    ends_with_backward = False

    def __init__(self, call: str) -> None:
        self._call = call

    def refuse(self, what: str) -> None:
        """Refuse ``what`` inside the call, because the modules hold full parameters and gradients would be lost."""
        raise StateError(
            f"{what} while {self._call} is under way: its iterator is neither exhausted nor closed.\n"
            "  Call its close(), or go on to its end, before."
        )

    def refuse_grad(self) -> None:
        """Refuse a forward with grad."""
        if torch.is_grad_enabled():
            self.refuse("a forward with grad")


class StageUnits(dict[int, Sequence[Unit]]):
    """The units that belong to one stage of a pipeline alone, by stage; empty without a pipeline."""


@contextlib.contextmanager
def constant_parameters(engine: Engine, call: str) -> Iterator[None]:
    """Run forwards without grad between which no parameter changes; ``call`` names the user's call in errors.

    If every unit can stay unsharded (it is replicated, stays gathered after forward, or is stored in full on this
    rank), the full parameters are put into the modules once and forwards skip the hooks, at the cost of the plain
    model. Otherwise units are gathered and released as in an evaluation.

    Collective:
        An all-gather on ``dp_shard`` of each unit that stays gathered after forward. All ranks must call.
    """
    engine.require_idle(call)
    if not all(unit.is_resident or not unit.reshards_after_forward or _has_all(unit) for unit in engine.units):
        with engine.evaluating():
            yield
        return
    was_open = engine.window.is_open
    engine.open_window(sync_if_due)
    try:
        for unit in engine.units:
            if unit.is_resident or not _has_all(unit):
                engine.unshard(unit)
            unit.use()
        with engine.window.override(step=ConstantParameters(call)):
            yield
    finally:
        if not was_open:
            engine.window.close()
        for unit in engine.units:
            unit.use_sharded()
            if unit.state is State.UNSHARDED:
                engine.reshard(unit)


def _has_all(unit: Unit) -> bool:
    """Whether this rank's masters are the full parameters as forward uses them."""
    return all(group.facts.is_unsharded_locally and not group.form.is_shown for group in unit.groups)


def sum_over_copies(engine: Engine, copies: Mapping[nn.Parameter, Sequence[int]], comm: Comm) -> None:
    """Add up the local gradients of parameters over the ranks that hold a copy, before they are reduced.

    Every copy gets the same sum, in rank order, so that copies stay bitwise equal. ``copies`` has, for each parameter,
    the ranks of ``comm`` with a copy. A parameter that none of them has used keeps no gradient.

    Collective:
        Every rank of a parameter sends the full gradient to every other one, and a flag: whether it used the parameter.
    """
    unused: list[tuple[Gradient, int, Tensor]] = []  # by this rank, with whether another rank used it
    for parameter, ranks in copies.items():
        place = group_and_index(parameter)
        if place is None or not place[0].wants_gradients:
            continue
        group, index = place
        gradient, spec = group.gradient, group.layout.params[index]
        if spec.numel == 0:
            continue
        gradient.collect(engine.gradients)
        is_used = gradient.has_local(index)
        flag = torch.full((1,), float(is_used), device=group.device)
        views = gradient.local_views(index, engine.gradients)
        if len(views) == 1 and views[0].is_contiguous():
            own = views[0].view(-1)
        else:
            own = views[0].new_empty(spec.numel)
            torch._foreach_copy_(gradient.parts(index, own), views)
        unit = f"copies of {spec.name}"
        peers = [peer for peer in ranks if peer != comm.rank]
        terms = {peer: (torch.empty_like(own), torch.empty_like(flag)) for peer in peers} | {comm.rank: (own, flag)}
        sends = [(tensor, peer, unit) for peer in peers for tensor in (own, flag)]
        receives = [(tensor, peer, unit) for peer in peers for tensor in terms[peer]]
        comm.exchange(sends, receives).wait()
        total = terms[ranks[0]][0]
        for peer in ranks[1:]:
            total += terms[peer][0]
        torch._foreach_copy_(views, gradient.parts(index, total))
        if not (is_used or total.is_meta):
            unused.append((gradient, index, torch.cat([used for _, used in terms.values()]).any()))
    by_others = torch.stack([used for _, _, used in unused]).tolist() if unused else []
    for (gradient, index, _), is_used in zip(unused, by_others, strict=True):
        if not is_used:
            gradient.forget_local(index)
