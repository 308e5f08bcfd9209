"""Requests to continue one prompt, and the bounded queue in which they wait for the model. Both are thread-safe."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from shardwise.generation.running_batch import Entry
from shardwise.generation.sample import Sampling
from shardwise.generation.score import Row, Score

_numbers = itertools.count()


class Event(NamedTuple):
    """An event of a request."""

    token: int | None = None  # a new token
    finish: str | None = None  # why the answer ended: ``stop`` (``token`` ends a text), ``length``, or ``error``
    error: str = ""  # the error's text
    score: Score | None = None  # log-probabilities of the tokens, in the last event of a scored request


class GenerationRequest:
    """A request to continue one prompt, from the queue to its last token.

    ``index`` is its number within the client's request, which selects its random stream. ``scored_from`` is the first
    token, of the prompt or new, whose log-probability is requested, if any. ``on_event`` is called with every event, in
    the model's thread, and must return at once.

    Attributes:
        is_scored: Whether log-probabilities are requested.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        seed: int,
        index: int = 0,
        ends: Collection[int],
        scored_from: int | None = None,
        num_top: int = 0,
        on_event: Callable[[Event], None],
    ) -> None:
        #: The row that the model continues.
        self.entry = Entry(next(_numbers), prompt, max_new_tokens, sampling, seed, index)
        self.ends = ends
        self.is_cancelled = False  # whether no more tokens are needed. Any thread may set it.
        self.num_new = 0  # new tokens so far
        self.is_scored, self.num_top = scored_from is not None, num_top
        self._on_event = on_event
        self._ids, self._scored_from = [*prompt], scored_from or 0
        self._last = Event(finish="length")

    def add(self, token: int) -> bool:
        """Report a new token. Return whether it was the last one."""
        self.num_new += 1
        finish = "stop" if token in self.ends else "length" if self.num_new == self.entry.max_new_tokens else None
        event = Event(token, finish)
        if self.is_scored:
            self._ids.append(token)
            self._last = event
        if not self.is_cancelled and not (self.is_scored and finish):
            self._on_event(event)
        return finish is not None

    def scored_row(self) -> Row:
        """Return all tokens, and the first one that is scored."""
        return Row(self._ids, self._scored_from)

    def end(self, score: Score) -> None:
        """Report the last event, with the score of :meth:`scored_row`."""
        if not self.is_cancelled:
            self._on_event(self._last._replace(score=score))

    def fail(self, why: str) -> None:
        """End the request with an error."""
        if not self.is_cancelled:
            self._on_event(Event(finish="error", error=why))
        self.is_cancelled = True


class QueueFullError(Exception):
    """The requests do not fit the queue."""


class QueueClosedError(Exception):
    """The server is stopping."""


class Queue:
    """Requests that wait for the model."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self._waiting: deque[GenerationRequest] = deque()
        self._changed = threading.Condition()
        self._is_closed = False

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._waiting)

    @property
    def is_closed(self) -> bool:
        """Whether no further requests are accepted."""
        return self._is_closed

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Add all of these requests to the queue, or none."""
        with self._changed:
            if self._is_closed:
                raise QueueClosedError
            self._drop_cancelled()
            if len(self._waiting) + len(requests) > self.max_waiting:
                raise QueueFullError
            self._waiting.extend(requests)
            self._changed.notify()

    def take(self, max_requests: int, max_tokens: float) -> list[GenerationRequest]:
        """Remove and return the next requests, in the order of their arrival.

        Their prompts, padded to the longest, have at most ``max_tokens`` in total. The first one is always taken.
        """
        with self._changed:
            self._drop_cancelled()
            requests: list[GenerationRequest] = []
            longest = 0
            while self._waiting and len(requests) < max_requests:
                longest = max(longest, len(self._waiting[0].entry.prompt))
                if requests and longest * (len(requests) + 1) > max_tokens:
                    break
                requests.append(self._waiting.popleft())
            return requests

    def wait(self, timeout_s: float) -> None:
        """Wait until a request arrives or the queue is closed, at most ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed, timeout_s)

    def close(self) -> None:
        """Accept no further requests."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _drop_cancelled(self) -> None:
        if any(request.is_cancelled for request in self._waiting):
            self._waiting = deque(request for request in self._waiting if not request.is_cancelled)
