"""A step of several forwards that are followed by several backwards, as pipelines make them.

Inside a step parameters do not change: what is gathered stays so from the first forward that needs it on, and
gradients are added up on this rank. They are reduced once. In the last backward of a stage the engine leaves its units
one by one, as in any backward, and each is released and reduced behind what is still computed: that of the units before
it, and of other stages. They go in a fixed order, the last first, so that the order of collectives depends on nobody's
path. Whatever does not belong to one stage alone (the root, what several stages or ranks use) waits for the end.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from shardwise.engine.engine import Engine
from shardwise.engine.unit import State, Unit
from shardwise.features import mishaps
from shardwise.spec.errors import StateError


class PipelineStep:
    """One such step.

    Args:
        engine: The engine.
        last: The microbatch whose backward through a stage is to reduce its units as it leaves them; ``None``: no
            backward is.
        synchronises: Gradients are reduced in this step.

    Attributes:
        holds: What is gathered stays gathered, and in its modules. Not where units are to be released after forward.
        stage: The pipeline stage of the newest forward.
        rests: Its units are all there, and nobody asks when backward leaves them: the hooks around them have nothing to
            do.
        only_for: The call that nothing but forwards without grad may come between, until it has ended.
    """

    def __init__(self, engine: Engine, last: int | None = None, *, synchronises: bool = False) -> None:
        self.holds = all(not unit.reshards_after_forward for unit in engine.units)
        self.stage: int | None = None
        self.rests = False
        self.only_for: str | None = None
        self.has_gradients = False  # of this step's own backwards
        self._engine = engine
        self._last = last if synchronises else None
        self._synchronises = synchronises
        self._due: deque[Unit] = deque()  # to be reduced in the backward under way, in this order
        self._left: set[Unit] = set()  # in that backward
        self._reduced: set[Unit] = set()

    def enter(self, stage: int, microbatch: int) -> None:
        """The next forward or backward is that of ``microbatch`` through ``stage``.

        The first gathers the stage's units, in an order of its own; later ones find them there. Of the last one the
        hooks tell when its backward leaves a unit.
        """
        self.stage = stage
        is_last = microbatch == self._last
        self.rests = self.holds and microbatch > 0 and not is_last
        self._left.clear()
        self._due = self._of_stage(stage) if is_last else deque()

    def keeps(self, unit: Unit) -> bool:
        """The unit stays gathered, as it is needed again."""
        return self.holds and unit not in self._reduced

    def leave(self, unit: Unit) -> None:
        """The engine has left ``unit``, and collected its gradients: reduce what is due, as far as that has been left.

        Collective:
            As :meth:`Engine.reduce`, in a last backward.
        """
        self._left.add(unit)
        while self._due and self._due[0] in self._left:
            ready = self._due.popleft()
            self._reduced.add(ready)
            self._engine.reshard(ready)
            self._engine.reduce(ready)

    @torch.no_grad()
    def end(self, stage: int, compute: Callable[[Sequence[Tensor]], None] | None = None) -> None:
        """The last backward of ``stage`` is over: reduce those of its units that are still to be.

        Args:
            stage: Whose.
            compute: Where gradients of weights are still to be computed, does so for the weights that it is given.

        Collective:
            As :meth:`Engine.reduce`; not where this step does not synchronise.
        """
        if not self._synchronises:
            return
        self._left.clear()
        self._due = self._of_stage(stage)
        for unit in tuple(self._due):
            if compute is not None:
                compute([full for group in unit.groups for full in group.fulls])
            self._engine.finalise(unit)

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
        """Reduce the gradients of every other unit, last unit first, once ``before`` has been called.

        Raises:
            StateError: A gradient has come for a unit that had been reduced.
        """
        engine = self._engine
        with torch.no_grad():
            before()
            for unit in reversed(engine.units):
                if unit not in self._reduced:
                    engine.finalise(unit)
            engine.finish_reductions()

    def _of_stage(self, stage: int) -> deque[Unit]:
        return deque(unit for unit in reversed(self._engine.stages.get(stage, ())) if unit not in self._reduced)


@contextlib.contextmanager
def open_step(engine: Engine, before_reduction: Callable[[], None], last: int | None = None) -> Iterator[PipelineStep]:
    """Run several forwards and backwards on the same parameters, and reduce their gradients.

    Args:
        engine: Of a model whose forwards train, unless grad is off.
        before_reduction: Called when all gradients of this rank are added up, before what belongs to several stages is
            reduced.
        last: As of :class:`PipelineStep`.

    Collective:
        With grad: the reduction of every unit, last unit first. In the last backward of a stage those that belong to it
        alone, at the end the others. Not where ``syncs_gradients`` is off.

    Raises:
        StateError: The optimizer steps inside backward.
    """
    if engine.observers:
        raise StateError(
            "a pipeline step adds up the gradients of its microbatches: sw.optimizer_in_backward() and sw.join() do not"
            " go with it.\n  Leave them out, or set pp=1."
        )
    engine.settle("sw.train_step")
    engine.hide_waiting()
    engine.trains = torch.is_grad_enabled()
    syncs = engine.syncs_gradients
    if not engine.parameters_are_unchanged:
        engine.refresh()
        engine.parameters_are_unchanged = True
    had_sums = any(group.gradient.is_local for group in engine.groups)
    engine.pipeline_step = opened = PipelineStep(engine, last, synchronises=syncs and torch.is_grad_enabled())
    engine.syncs_gradients = False
    try:
        yield opened
        engine.pipeline_step, engine.syncs_gradients = None, syncs
        for unit in engine.units:
            if unit.state is State.UNSHARDED:
                engine.reshard(unit)
        if syncs and torch.is_grad_enabled():
            opened.reduce(before_reduction)
    except BaseException:
        engine.parameters_are_unchanged = False
        for unit in engine.units:
            unit.swap_out()
        if opened.has_gradients or engine.reducing:
            mishaps.drop_later(engine, had_sums=had_sums)
        raise
    finally:
        engine.pipeline_step, engine.syncs_gradients = None, syncs
    if syncs or not torch.is_grad_enabled():
        engine.parameters_are_unchanged = False
    engine.show_waiting()
