"""Prompts on their way to the model: jobs, and the bounded queue in which they wait. Any thread may use both."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from shardwise.generation.lane import Entry
from shardwise.generation.sample import Sampling

_numbers = itertools.count()


class Event(NamedTuple):
    """What happens to a job.

    Attributes:
        token: A new token.
        finish: Why the job is over: ``stop`` (``token`` ends a text), ``length``, or ``error``.
        error: What went wrong.
    """

    token: int | None = None
    finish: str | None = None
    error: str = ""


class Job:
    """A prompt that is to be continued.

    Args:
        prompt: Token ids.
        max_new_tokens: The most new tokens.
        sampling: How they are chosen.
        seed: Seed of the draws.
        ends: Ids that end the text.
        tell: Called with every event, in the thread of the model; does not wait.

    Attributes:
        entry: What the model is told.
        ends: As given.
        is_cancelled: Nobody wants the answer any more. Any thread may set it.
        num_new: New tokens so far.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        seed: int,
        ends: Collection[int],
        tell: Callable[[Event], None],
    ) -> None:
        self.entry = Entry(next(_numbers), prompt, max_new_tokens, sampling, seed)
        self.ends = ends
        self.is_cancelled = False
        self.num_new = 0
        self._tell = tell

    def add(self, token: int) -> bool:
        """Hand on a new token. Returns whether it was the last one."""
        self.num_new += 1
        finish = "stop" if token in self.ends else "length" if self.num_new == self.entry.max_new_tokens else None
        if not self.is_cancelled:
            self._tell(Event(token, finish))
        return finish is not None

    def fail(self, why: str) -> None:
        """End the job."""
        if not self.is_cancelled:
            self._tell(Event(finish="error", error=why))


class QueueFullError(Exception):
    """As many jobs wait as may."""


class QueueClosedError(Exception):
    """The server is about to end."""


class Queue:
    """Jobs that wait for the model.

    Args:
        most: The most that may wait.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._is_closed = False

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def is_closed(self) -> bool:
        """Whether no further jobs are taken."""
        return self._is_closed

    def add(self, jobs: Sequence[Job]) -> None:
        """Let all of these jobs wait, or none.

        Raises:
            QueueFullError: They do not fit.
            QueueClosedError: The queue takes none any more.
        """
        with self._changed:
            if self._is_closed:
                raise QueueClosedError
            self._drop_cancelled()
            if len(self._waiting) + len(jobs) > self.most:
                raise QueueFullError
            self._waiting.extend(jobs)
            self._changed.notify()

    def take(self, most: int, max_tokens: float) -> list[Job]:
        """The next jobs, in the order in which they came.

        Args:
            most: The most jobs.
            max_tokens: The most tokens of their prompts, all as long as the longest; one job is taken in any case.
        """
        with self._changed:
            self._drop_cancelled()
            taken: list[Job] = []
            longest = 0
            while self._waiting and len(taken) < most:
                longest = max(longest, len(self._waiting[0].entry.prompt))
                if taken and longest * (len(taken) + 1) > max_tokens:
                    break
                taken.append(self._waiting.popleft())
            return taken

    def wait(self, timeout_s: float) -> None:
        """Wait until a job is there or the queue is closed, but no longer than ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed, timeout_s)

    def close(self) -> None:
        """Take no further jobs."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _drop_cancelled(self) -> None:
        if any(job.is_cancelled for job in self._waiting):
            self._waiting = deque(job for job in self._waiting if not job.is_cancelled)
