"""How soon ranks that wait for each other are told so: in tests sooner than in training."""

from __future__ import annotations

from shardwise.comm import watch


def report_stalls_after(seconds: float, *, interval_s: float = 0.1, idle_interval_s: float | None = None) -> None:
    """Take a collective for stalled after ``seconds``; for the rest of this process, which is a rank of a test.

    Args:
        seconds: After which ranks look for what keeps each other; a busy machine must not take as long by itself.
        interval_s: Between two looks.
        idle_interval_s: Between two looks while nothing is under way; ``None``: as it is.
    """
    watch.STALL_S, watch.INTERVAL_S = seconds, interval_s
    if idle_interval_s is not None:
        watch.IDLE_INTERVAL_S = idle_interval_s
