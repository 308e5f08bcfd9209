"""Settings of torch's NCCL watchdog, so that it does not end a process before ``launch.hang`` has explained a hang.

torch reads them when the first process group with NCCL is created. The user's settings are kept; if they would hide one
of our messages, a warning is printed. https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
"""

from __future__ import annotations

import logging
import math
import os

#: Seconds by which torch's watchdog waits longer than our time limit.
MARGIN_S = 60.0

_logger = logging.getLogger("shardwise")

#: torch ends the process when its watchdog is stuck in a call of CUDA or NCCL for this many seconds.
_HEARTBEAT_S, _IS_MONITORED = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_ENABLE_MONITORING"
_DEFAULT_HEARTBEAT_S = 480
#: Number of collectives in the flight recorder, by its current name and an earlier one. 0 turns the recorder off.
_RECORDS, _NUM_RECORDS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), 2000
#: Variables that make the host wait in every collective, so that ``comm.stall`` cannot compare the ranks' collectives.
_BLOCKS = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


def prepare(timeout_s: float) -> None:
    """Set the environment of torch's watchdog for collectives of up to ``timeout_s``, and warn of conflicts."""
    if not any(name in os.environ for name in _RECORDS):
        os.environ[_RECORDS[0]] = str(_NUM_RECORDS)
    heartbeat_s = math.ceil(timeout_s + MARGIN_S)
    if heartbeat_s > _DEFAULT_HEARTBEAT_S:
        os.environ.setdefault(_HEARTBEAT_S, str(heartbeat_s))
    set_s = os.environ.get(_HEARTBEAT_S, "")
    if set_s.isdigit() and int(set_s) <= timeout_s and _is_on(_IS_MONITORED, default=True):
        _logger.warning(
            "%s=%s is shorter than the %g s that a collective may take here: torch may end a process that hangs"
            " (SIGABRT) before shardwise names the rank that the others wait for.\n  Unset it, or set at least %d.",
            *(_HEARTBEAT_S, set_s, timeout_s, heartbeat_s),
        )
    for name in _BLOCKS:
        if _is_on(name):
            _logger.warning(
                "%s=%s makes the host wait in every collective: steps take longer, and ranks that disagree are found"
                " only when the time limit is over.\n  Unset it.",
                *(name, os.environ[name]),
            )


def _is_on(name: str, *, default: bool = False) -> bool:
    """Return whether a variable is on, by the rules of torch."""
    value = os.environ.get(name, "").lower()
    return value in {"1", "y", "yes", "t", "true"} or (default and not value)
