"""Forwards that follow one another on the same parameters, without gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from shardwise.fsdp.runtime import Runtime
from shardwise.fsdp.unit import State
from shardwise.fsdp.window import Window


@contextlib.contextmanager
def constant_parameters(runtime: Runtime, call: str) -> Iterator[None]:
    """Run forwards without grad between which no parameter changes.

    Where units stay gathered after forward (``reshard_after_forward``), they do so to the end: each is gathered once,
    and not for every forward.

    Args:
        runtime: Of the model.
        call: What the user called.

    Raises:
        StateError: A forward or a backward is under way.
    """
    runtime.settle(call)
    was_open = runtime.is_window_open
    if not was_open:
        runtime.refresh()
        runtime.is_window_open = True
    runtime.window = Window(runtime)
    try:
        yield
    finally:
        runtime.is_window_open, runtime.window = was_open, None
        for unit in runtime.units:
            if unit.state is State.UNSHARDED and not unit.frames:
                runtime.reshard(unit)
