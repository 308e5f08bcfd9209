"""A process that must not outlive its parent. Linux does it by itself; elsewhere a thread looks twice a second."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


def die_with_parent(parent_pid: int | None = None) -> None:
    """End this process with SIGKILL as soon as its parent is gone.

    Call it as the first thing in a worker. A training worker that outlives its launcher keeps a device, and writes
    checkpoints beside those of the run that replaces it.

    Args:
        parent_pid: The parent to watch, where it may have died before this call; by default whoever is the parent now.
    """
    parent = parent_pid if parent_pid is not None else os.getppid()
    if not _ask_the_kernel():
        threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()
    if os.getppid() != parent:  # it went before the kernel knew that we care
        os.kill(os.getpid(), signal.SIGKILL)


def _ask_the_kernel() -> bool:
    if sys.platform != "linux":
        return False
    try:
        return ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
