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


@contextlib.contextmanager
def window(runtime: Runtime, before_reduction: Callable[[], None]) -> Iterator[None]:
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
    runtime.holds_gathered = all(not unit.reshards_after_forward for unit in runtime.units)
    runtime.syncs_gradients = False
    try:
        yield
    except BaseException:
        runtime.is_window_open = False
        raise
    finally:
        runtime.holds_gathered, runtime.syncs_gradients, runtime.stage = False, syncs, None
    for unit in runtime.units:
        if unit.state is State.UNSHARDED:
            runtime.reshard(unit)
    if not torch.is_grad_enabled():
        runtime.is_window_open = False
    elif syncs:
        with torch.no_grad():
            before_reduction()
            for unit in reversed(runtime.units):
                runtime.finalise(unit)
            while runtime.reducing:
                runtime.move_on()
        runtime.wait_for_host()
        runtime.is_window_open = False


def enter_stage(runtime: Runtime, stage: int) -> None:
    """The next forward in the window is a pass through ``stage``: its order of units is that stage's own."""
    runtime.stage = stage


def collect(runtime: Runtime) -> None:
    """Add what gradients there are on full parameters to those of earlier microbatches."""
    for group in runtime.groups:
        if group.wants_gradients:
            group.gradient.collect(runtime.gradients)
