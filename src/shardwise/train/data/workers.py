"""The worker processes of a ``DataLoader``: they leave a request to stop to the rank that has started them."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing import util
from multiprocessing.connection import Connection
from typing import Any

from torch.utils.data import DataLoader


def obey_this_rank(loader: DataLoader[Any]) -> None:
    """Leave a request to stop, which a terminal or a scheduler sends to all processes, to this rank itself.

    A loader whose workers have ended gives no batch for the step that the rank still makes, and fails.
    """
    loader.worker_init_fn = functools.partial(_begin, _exit_of(os.getpid()), loader.worker_init_fn)


@functools.cache
def _exit_of(_rank: int) -> Connection:
    """A pipe that can be read once this process exits: Python then sends SIGTERM to workers and waits for them."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    util.Finalize(None, writer.send_bytes, (b"exit",), exitpriority=0)  # runs before the workers get their signal
    return reader


def _begin(rank_exit: Connection, then: Callable[[int], None] | None, worker: int) -> None:
    def hear(*_: object) -> None:
        if rank_exit.poll():  # nobody reads it, so that all workers see it
            os._exit(0)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, hear)  # programs that a worker starts inherit a blocked or ignored signal, but no handler
    if then is not None:
        then(worker)
