"""Worker processes of a ``DataLoader``: they ignore signals to stop, which only their rank handles."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing import util
from multiprocessing.connection import Connection
from typing import Any

from torch.utils.data import DataLoader


def exit_with_this_rank(loader: DataLoader[Any]) -> None:
    """Make the workers of a loader ignore SIGINT and SIGTERM, which terminals and schedulers send to all processes.

    Otherwise the workers would exit, and the loader would fail in the step that this rank still makes before it stops.
    """
    init = loader.worker_init_fn
    if not isinstance(init, functools.partial) or init.func is not _start_worker:  # else already done
        loader.worker_init_fn = functools.partial(_start_worker, _exit_of(os.getpid()), init)


@contextlib.contextmanager
def workers_exit_with_this_rank() -> Iterator[None]:
    """Apply :func:`exit_with_this_rank` to every loader that starts workers in the block, such as a user's."""

    def patched(begin: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(begin)
        def begins(loader: DataLoader[Any]) -> Any:
            if loader.num_workers:
                exit_with_this_rank(loader)
            return begin(loader)

        return begins

    classes = [each for each in _classes(DataLoader) if "__iter__" in vars(each)]
    begins = [vars(each)["__iter__"] for each in classes]
    for each, begin in zip(classes, begins, strict=True):
        each.__iter__ = patched(begin)
    try:
        yield
    finally:
        for each, begin in zip(classes, begins, strict=True):
            each.__iter__ = begin


def _classes(base: type[Any]) -> set[type[Any]]:
    """Return a class and all of its subclasses."""
    return {base}.union(*(_classes(each) for each in base.__subclasses__()))


@functools.cache
def _exit_of(_rank: int) -> Connection:
    """Return a pipe that becomes readable when this process exits: Python then sends SIGTERM to workers and waits."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    util.Finalize(None, writer.send_bytes, (b"exit",), exitpriority=0)  # runs before the workers get their signal
    return reader


def _start_worker(rank_exit: Connection, init: Callable[[int], None] | None, worker: int) -> None:
    def on_signal(*_: object) -> None:
        if rank_exit.poll():  # never read, so that all workers see it
            os._exit(0)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, on_signal)  # programs that a worker starts do not inherit handlers
    if init is not None:
        init(worker)
