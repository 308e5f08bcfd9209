"""The worker processes of a ``DataLoader``: the rank that has started them ends them, and nobody else."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

from torch.utils.data import DataLoader


def obey_this_rank(loader: DataLoader[Any]) -> None:
    """Leave a request to stop, which a terminal or a scheduler sends to all processes, to this rank itself.

    A loader whose workers have ended gives no batch for the step that the rank still makes, and fails.
    """
    loader.worker_init_fn = partial(_begin, os.getpid(), loader.worker_init_fn)


def _begin(rank: int, then: Callable[[int], None] | None, worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # in this thread, and in those that it starts
    Thread(target=_end_with, args=(rank,), daemon=True).start()
    if then is not None:
        then(worker)


def _end_with(rank: int) -> None:
    """End this process where the rank asks for it: Python does at the rank's exit, and then waits for the worker."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
        pass
    os._exit(0)
