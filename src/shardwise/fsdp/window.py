"""A step of several forwards that are followed by several backwards, as pipelines make them.

Inside a window parameters do not change: what is gathered stays so from the first forward that needs it to the end of
the window, and gradients are added up on this rank. At its end they are reduced, once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from shardwise.fsdp.runtime import Runtime
from shardwise.fsdp.unit import State
from shardwise.spec.errors import StateError


class Window:
    """One such step.

    Args:
        runtime: The engine.

    Attributes:
        holds: What is gathered stays gathered, and in its modules. Not where units are to be released after forward.
        stage: The pipeline stage of the newest forward.
        rests: Its units are all there: the hooks around them have nothing to do.
        only_for: The call that nothing but forwards without grad may come between, until it has ended.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.holds = all(not unit.reshards_after_forward for unit in runtime.units)
        self.stage: int | None = None
        self.rests = False
        self.only_for: str | None = None
        self._runtime = runtime
        self._stages_run: set[int] = set()

    def enter(self, stage: int) -> None:
        """The next forward is a pass through ``stage``.

        The first pass gathers the stage's units, in an order of its own. Later passes find them there.
        """
        if self.stage is not None:
            self._stages_run.add(self.stage)
        self.stage = stage
        self.rests = self.holds and stage in self._stages_run

    def collect(self) -> None:
        """Add what gradients there are on full parameters to those of earlier microbatches."""
        runtime = self._runtime
        for group in runtime.groups:
            if group.wants_gradients:
                group.gradient.collect(runtime.gradients)
                if self.holds:
                    group.gradient.show()

    def reduce(self, before: Callable[[], None]) -> None:
        """Reduce the gradients of every unit, last unit first, once ``before`` has been called."""
        runtime = self._runtime
        with torch.no_grad():
            before()
            for unit in reversed(runtime.units):
                runtime.finalise(unit)
            while runtime.reducing:
                runtime.move_on()
        runtime.wait_for_host()


@contextlib.contextmanager
def window(runtime: Runtime, before_reduction: Callable[[], None]) -> Iterator[Window]:
    """Run several forwards and backwards on the same parameters, and reduce their gradients at the end.

    Args:
        runtime: Of a model whose forwards train, unless grad is off.
        before_reduction: Called when all gradients of this rank are added up.

    Collective:
        At the end, with grad: the reduction of every unit, last unit first; not where ``syncs_gradients`` is off.

    Raises:
        StateError: The optimizer steps inside backward.
    """
    if runtime.update is not None or runtime.join is not None:
        raise StateError(
            "a pipeline step adds up the gradients of its microbatches: sw.optimizer_in_backward() and sw.join() do not"
            " go with it.\n  Leave them out, or set pp=1."
        )
    runtime.settle("sw.train_step")
    runtime.trains = torch.is_grad_enabled()
    syncs = runtime.syncs_gradients
    if not runtime.is_window_open:
        runtime.refresh()
        runtime.is_window_open = True
    runtime.window = opened = Window(runtime)
    runtime.syncs_gradients = False
    try:
        yield opened
    except BaseException:
        runtime.is_window_open = False
        for unit in runtime.units:
            unit.swap_out()
        raise
    finally:
        runtime.window, runtime.syncs_gradients = None, syncs
    for unit in runtime.units:
        if unit.state is State.UNSHARDED:
            runtime.reshard(unit)
    if syncs and torch.is_grad_enabled():
        opened.reduce(before_reduction)
    if syncs or not torch.is_grad_enabled():
        runtime.is_window_open = False
