"""Injected faults, for tests of recovery: ``SHARDWISE_FAULT="mid_shard_write@rank=1@step=20:kill"``.

The code calls :func:`at` at each of the points below. The call has no effect unless the variable names the point and
``SHARDWISE_ARM_FAULTS=1`` is set too; no configuration can set either. Several faults are separated by ``;``.

Conditions: ``rank`` (default: every rank), ``step`` (every step), ``attempt`` (0: not in a restarted run; or ``any``).
Actions: ``kill`` (SIGKILL), ``segv``, ``stop`` (SIGSTOP), ``term`` and ``int`` (SIGTERM and SIGINT to this process),
    ``raise``, ``exit=CODE``, ``enospc`` (as a full disk), ``edquot`` (as an exceeded quota), ``sleep=SECONDS``,
    ``spin`` (an endless loop in Python), ``nan`` and ``flip`` (in the first tensor that the point offers).
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

FAULT, ARMED = "SHARDWISE_FAULT", "SHARDWISE_ARM_FAULTS"

#: Points of faults, in the order in which a run reaches them.
POINTS = (
    "load_begin",
    "load_mid_shard",
    "after_load",
    "step_begin",
    "before_backward",
    "before_update",
    "after_step",
    "save_begin",
    "before_shard_open",
    "mid_shard_write",
    "after_shard_fsync",
    "before_manifest",
    "after_manifest",
    "before_rename",
    "after_rename",
    "before_latest",
    "after_latest",
    "gc_before_delete",
    "gc_mid_delete",
)
#: Points in the process that copies a checkpoint to a store.
STORE_POINTS = (
    *("store_begin", "store_before_file", "store_after_file", "store_before_manifest", "store_after_manifest"),
    *("store_before_delete", "store_mid_delete", "store_end"),
)
_SIGNALS = {
    "kill": signal.SIGKILL,
    "segv": signal.SIGSEGV,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "int": signal.SIGINT,
}
_REFUSALS = {"enospc": errno.ENOSPC, "edquot": errno.EDQUOT}
_FAULT = re.compile(r"(?P<point>\w+)(?P<conditions>(?:@\w+=\w+)*):(?P<action>\w+)(?:=(?P<value>[0-9.]+))?")


class InjectedError(RuntimeError):
    """The error of the action ``raise``."""


@dataclass(frozen=True)
class Fault:
    """One armed fault."""

    point: str
    conditions: dict[str, str]
    action: str
    value: float = 0.0

    def is_due(self, point: str, step: int | None) -> bool:
        """Return whether the fault must be injected here and now."""
        here = {
            "rank": _variable("RANK", "SLURM_PROCID"),
            "attempt": _variable("SHARDWISE_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"),
            "step": str(step),
        }
        wanted = {"attempt": "0", **self.conditions}
        return point == self.point and all(value in ("any", here[name]) for name, value in wanted.items())


def parse(text: str) -> list[Fault]:
    """Parse the faults in ``text``."""
    faults = []
    for part in filter(None, text.split(";")):
        match = _FAULT.fullmatch(part.strip())
        if match is None or match["point"] not in POINTS + STORE_POINTS:
            raise ValueError(f"{FAULT}: {part!r} is not a fault. Points: {', '.join(POINTS + STORE_POINTS)}")
        conditions = dict(item.split("=") for item in match["conditions"].split("@")[1:])
        if set(conditions) - {"rank", "step", "attempt"}:
            raise ValueError(f"{FAULT}: {part!r} has another condition than rank, step and attempt")
        if match["action"] not in (*_SIGNALS, *_REFUSALS, "raise", "exit", "sleep", "spin", "nan", "flip"):
            raise ValueError(f"{FAULT}: {part!r} has an unknown action")
        faults.append(Fault(match["point"], conditions, match["action"], float(match["value"] or 0)))
    return faults


def _armed() -> list[Fault]:
    text = os.environ.get(FAULT, "")
    return parse(text) if text and os.environ.get(ARMED) == "1" else []


_FAULTS = _armed()


def at(point: str, step: int | None = None, tensors: Callable[[], Iterable[Any]] = tuple) -> None:
    """Inject the faults for this point, if any are armed.

    Raises:
        InjectedError, OSError: An armed fault requests it.
    """
    for fault in _FAULTS:
        if fault.is_due(point, step):
            _inject(fault, tensors)


def _inject(fault: Fault, tensors: Callable[[], Iterable[Any]]) -> None:
    if fault.action in _SIGNALS:
        sys.stdout.flush()
        os.kill(os.getpid(), _SIGNALS[fault.action])
    elif fault.action == "raise":
        raise InjectedError(f"injected at {fault.point}")
    elif fault.action == "exit":
        sys.exit(int(fault.value))
    elif fault.action in _REFUSALS:
        number = _REFUSALS[fault.action]
        raise OSError(number, os.strerror(number))
    elif fault.action == "sleep":
        time.sleep(fault.value)
    elif fault.action == "spin":
        while True:
            pass
    else:
        _damage(next(iter(tensors())), fault.action)


def _damage(tensor: Any, action: str) -> None:
    import torch

    with torch.no_grad():
        flat = tensor.detach().view(-1)
        if action == "nan":
            flat[0] = float("nan")
        else:
            flat[:1].view(torch.uint8)[0] ^= 1


def _variable(*names: str) -> str:
    """Return the first of the variables that is set, else "0"."""
    return next((os.environ[name] for name in names if name in os.environ), "0")
