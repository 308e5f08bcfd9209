"""Time limits of the ranks' work, written to the heartbeat for the watchdog (``launch.hang``)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from shardwise.launch import heartbeat

#: Minimum time limit of starting, loading, the first step, a save and an evaluation: they read and write large files,
#: and the first step compiles.
LONG_S = 1800.0
#: Minimum of the default time limit of a step; with less, a slow disk or a busy machine would be taken for a hang.
SHORTEST_S = 60.0
#: Factor from the longest step so far to the limit of a step, and from there to the limit of long phases.
TIMES = 10.0


class Timeouts:
    """The limits of a run's phases. The limit of a step is ``step_timeout_s``, or follows from this process's steps."""

    def __init__(self, step_timeout_s: float | None) -> None:
        self.step_timeout_s = step_timeout_s
        self._longest_s = 0.0
        self._made_steps = 0
        self._began_at: float | None = None

    @property
    def step_limit_s(self) -> float:
        """The time limit of a step, valid after the first one."""
        return self.step_timeout_s or max(SHORTEST_S, TIMES * self._longest_s)

    @property
    def long_limit_s(self) -> float:
        """The time limit of starting, the first step, a load, a save or an evaluation."""
        return max(LONG_S, TIMES * self.step_limit_s)

    def start(self) -> None:
        """Begin the run: files are read and the model is built."""
        heartbeat.enter("start", limit_s=self.long_limit_s)

    def step(self, step: int, *, saved_step: int) -> None:
        """Begin ``step``, and end the step before it, including everything that followed that step."""
        self._end_step()
        self._began_at = time.monotonic()
        limit_s = self.step_limit_s if self._made_steps else self.long_limit_s
        heartbeat.enter("step", step=step, limit_s=limit_s, saved_step=saved_step)

    @contextlib.contextmanager
    def long(self, phase: str) -> Iterator[None]:
        """Mark a phase outside of steps: ``load``, ``evaluation`` or ``save``."""
        self._end_step()
        heartbeat.enter(phase, limit_s=self.long_limit_s)
        yield
        heartbeat.enter("step", limit_s=self.long_limit_s)

    def end(self, *, saved_step: int) -> None:
        """Begin the end of the run, in which files are still written."""
        heartbeat.enter("end", limit_s=self.long_limit_s, saved_step=saved_step)

    def _end_step(self) -> None:
        if self._began_at is None:
            return
        took_s, self._began_at = time.monotonic() - self._began_at, None
        if self._made_steps:  # not the first, which compiles
            self._longest_s = max(self._longest_s, took_s)
        self._made_steps += 1
