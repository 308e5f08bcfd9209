"""A step of several forwards that are followed by several backwards, as pipelines make them.

Inside a step parameters do not change. What is gathered once stays so; once the orders of the stages are known, the
gathers of all of them are issued at the step's beginning, and run while the rank waits for the stages before its own.
Gradients are added up on this rank. They are reduced once. In the last backward of a stage the engine leaves its units
one by one, as in any backward, and each is released and reduced behind what is still computed: that of the units before
it, and of other stages. They go in a fixed order, the last first, so that the order of collectives depends on nobody's
path. Whatever does not belong to one stage alone (the root, what several stages or ranks use) waits for the end.
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
from shardwise.engine.extensions.module_buffers import begin
from shardwise.engine.storage.attachment import place_of
from shardwise.engine.storage.waiting import WaitingSums
from shardwise.engine.unit import State, Unit
from shardwise.spec.errors import StateError
from shardwise.spec.order import stage_entry


class PipelineStep(Step):
    """One such step.

    Args:
        engine: The engine.
        last: The microbatch whose backward through a stage is to reduce its units as it leaves them; ``None``: no
            backward is.
        synchronises: Gradients are reduced in this step.
    """

    ends_with_backward = False

    def __init__(self, engine: Engine, last: int | None = None, *, synchronises: bool = False) -> None:
        self.holds = all(not unit.reshards_after_forward for unit in engine.units)
        self.has_gradients = False  # of this step's own backwards
        self._engine = engine
        self._last = last if synchronises else None
        self._synchronises = synchronises
        self._due: deque[Unit] = deque()  # to be reduced in the backward under way, in this order
        self._left: set[Unit] = set()  # in that backward
        self._reduced: set[Unit] = set()

    def enter(self, stage: int, microbatch: int) -> None:
        """The next forward or backward is that of ``microbatch`` through ``stage``.

        The first takes the stage's units in an order of its own, and gathers what is not; later ones find them there.
        Of the last one the hooks tell when its backward leaves a unit.
        """
        self.entry = stage_entry(stage)
        is_last = microbatch == self._last
        self.skips_hooks = self.holds and microbatch > 0 and not is_last
        self._left.clear()
        self._due = self._of_stage(stage) if is_last else deque()

    def keeps(self, unit: Unit) -> bool:
        """The unit stays gathered, as it is needed again."""
        return unit not in self._reduced

    def leave(self, engine: Engine, unit: Unit) -> None:
        """The engine has left ``unit``, and collected its gradients: reduce what is due, as far as that has been left.

        Collective:
            As :meth:`Engine.reduce`, in a last backward.
        """
        self._left.add(unit)
        while self._due and self._due[0] in self._left:
            ready = self._due.popleft()
            self._reduced.add(ready)
            engine.reshard(ready)
            engine.reduce(ready)

    @torch.no_grad()
    def end(self, stage: int, compute: Callable[[Sequence[Tensor]], None] | None = None) -> None:
        """The last backward of ``stage`` is over: reduce those of its units that are still to be.

        Collective:
            As :meth:`Engine.reduce`; not where this step does not synchronise.
        """
        if not self._synchronises:
            return
        self._left.clear()
        self._due = self._of_stage(stage)
        for unit in tuple(self._due):
            if compute is not None:
                compute([full for group in unit.groups for full in group.unsharded])
            self._engine.post_backward(unit)

    def collect(self) -> None:
        """Add what gradients there are on full parameters to those of earlier microbatches."""
        self.has_gradients = True
        for unit in self._engine.units:
            if unit in self._reduced:
                continue
            for group in unit.groups:
                if group.wants_gradients:
                    group.gradient.collect(self._engine.gradients)
                    if self.holds:
                        group.gradient.show()

    def reduce(self, before: Callable[[], None]) -> None:
        """Reduce the gradients of every other unit, last unit first, once ``before`` has been called."""
        engine = self._engine
        with torch.no_grad():
            before()
            for unit in reversed(engine.units):
                if unit not in self._reduced:
                    engine.post_backward(unit)
            engine.finish_reductions()

    def _of_stage(self, stage: int) -> deque[Unit]:
        return deque(
            unit for unit in reversed(self._engine.extras.take(StageUnits).get(stage, ())) if unit not in self._reduced
        )


@contextlib.contextmanager
def open_step(engine: Engine, before_reduction: Callable[[], None], last: int | None = None) -> Iterator[PipelineStep]:
    """Run several forwards and backwards on the same parameters, and reduce their gradients.

    Collective:
        With grad: the reduction of every unit, last unit first. In the last backward of a stage those that belong to it
        alone, at the end the others. Not where the window does not synchronise.
    """
    _refuse_observers(engine)
    engine.require_idle("sw.train_step")
    sums = engine.extras.take(WaitingSums)
    sums.hide(engine)
    window = engine.window
    synchronises = window.syncs and torch.is_grad_enabled()
    engine.open_window(begin)
    had_sums = any(group.gradient.is_local for group in engine.groups)
    opened = PipelineStep(engine, last, synchronises=synchronises)
    try:
        with window.having(syncs=False, step=opened):  # what is reduced, and when, the step says
            if opened.holds and torch.is_grad_enabled():
                engine.gather_ahead()
            yield opened
        for unit in engine.units:
            if unit.state in {State.UNSHARDING, State.UNSHARDED}:
                engine.reshard(unit)
        if synchronises:
            opened.reduce(before_reduction)
    except BaseException:
        # Nobody waits here, as peers may be waiting for this rank in turn: the next call drops what is there.
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
    """Forwards without grad that follow one another on the same parameters."""

    skips_hooks = True
    ends_with_backward = False

    def __init__(self, call: str) -> None:
        self._call = call

    def refuse(self, what: str) -> None:
        """Between the tokens of a stream the modules hold whole parameters, and gradients would be lost."""
        raise StateError(
            f"{what} while {self._call} is under way: its iterator is neither exhausted nor closed.\n"
            "  Call its close(), or go on to its end, before."
        )

    def refuse_grad(self) -> None:
        """As :meth:`refuse`, of a forward."""
        if torch.is_grad_enabled():
            self.refuse("a forward with grad")


class StageUnits(dict[int, Sequence[Unit]]):
    """The units that belong to one stage of a pipeline alone, by stage; empty without a pipeline."""


@contextlib.contextmanager
def constant_parameters(engine: Engine, call: str) -> Iterator[None]:
    """Run forwards without grad between which no parameter changes.

    Where every unit can be whole all the while (it is replicated, or stays gathered after forward, or this rank has all
    of it), it is put into the modules at the beginning, and forwards go by the engine: they cost what the plain
    model's do. Else units come and go as in any forward.

    Collective:
        An all-gather on ``dp_shard`` of each unit that stays gathered after forward. All ranks must call.
    """
    engine.require_idle(call)
    if not all(unit.is_resident or not unit.reshards_after_forward or _is_whole(unit) for unit in engine.units):
        yield
        return
    was_open = engine.window.is_open
    engine.open_window(begin)
    try:
        for unit in engine.units:
            if unit.is_resident or not _is_whole(unit):
                engine.unshard(unit)
            unit.use()
        with engine.window.having(step=ConstantParameters(call)):
            yield
    finally:
        if not was_open:
            engine.window.close()
        for unit in engine.units:
            unit.use_sharded()
            if unit.state is State.UNSHARDED:
                engine.reshard(unit)


def _is_whole(unit: Unit) -> bool:
    """The whole parameters, as forward needs them, are this rank's master."""
    return all(group.facts.is_alone and not group.form.is_shown for group in unit.groups)


def sum_over_copies(engine: Engine, copies: Mapping[nn.Parameter, Sequence[int]], comm: Comm) -> None:
    """Add up the local gradients of parameters over the ranks that hold a copy, before they are reduced.

    Every copy gets the same sum, in the order of ranks, so that copies stay equal to the last bit.

    Collective:
        Between the ranks of each parameter: the whole gradient from each to each.
    """
    for parameter, ranks in copies.items():
        place = place_of(parameter)
        if place is None or not place[0].wants_gradients:
            continue
        group, index = place
        gradient, spec = group.gradient, group.layout.params[index]
        views = gradient.local_views(index, engine.gradients)
        own = views[0].new_empty(spec.numel)
        torch._foreach_copy_(gradient.parts(index, own), views)
        unit = f"copies of {spec.name}"
        terms = {peer: own if peer == comm.rank else torch.empty_like(own) for peer in ranks}
        peers = [peer for peer in ranks if peer != comm.rank]
        sends, receives = [(own, peer, unit) for peer in peers], [(terms[peer], peer, unit) for peer in peers]
        comm.exchange(sends, receives).wait()
        total = terms[ranks[0]].clone()
        for peer in ranks[1:]:
            total += terms[peer]
        torch._foreach_copy_(views, gradient.parts(index, total))
