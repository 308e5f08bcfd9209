"""The scheduler of the model's running batches: which requests leave a batch, and which start in it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from shardwise.generation.running_batch import Decision
from shardwise.generation.score import Score
from shardwise.serve.queue import GenerationRequest, Queue

#: Seconds between empty decisions of an idle server to the other ranks, which prevent their time limits from expiring.
IDLE_S = 0.5
#: Maximum number of prompt tokens that go through the model together, while running rows wait.
_PROMPT_TOKENS = 4096


class Scheduler:
    """Decides between two steps, on the first rank.

    ``time_left_s`` returns how long requests may continue; ``None`` unless the server was asked to stop.
    """

    def __init__(
        self, queue: Queue, num_batches: int, max_rows: int, time_left_s: Callable[[], float | None] = lambda: None
    ) -> None:
        self._queue, self._max_rows, self._time_left_s = queue, max_rows, time_left_s
        self._batches: list[dict[int, GenerationRequest]] = [{} for _ in range(num_batches)]
        self._had_new_rows = [False] * num_batches  # whether the batch's last forward had new rows
        self._to_score: list[GenerationRequest] = []  # ended requests
        self._in_scoring: list[GenerationRequest] = []  # requests scored by the last decision

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return sum(map(len, self._batches))

    def __call__(self, batch: int, tokens: Mapping[int, int]) -> Decision:
        """Report the newest tokens of a batch to its requests, and decide on the batch's next action."""
        running = self._batches[batch]
        finished = [number for number, token in tokens.items() if number in running and running[number].add(token)]
        self._to_score += [each for each in map(running.pop, finished) if each.is_scored]
        left_s = self._time_left_s()
        if left_s is not None:
            self._queue.close()
            if left_s <= 0:
                self.fail("the server ends, and the time is over that answers under way had left")
        cancelled = [number for number, each in running.items() if each.is_cancelled]
        for number in cancelled:
            del running[number]
        if not self.num_running and not len(self._queue) and not self._to_score:
            if self._queue.is_closed:
                return Decision(is_last=True)
            self._queue.wait(IDLE_S)
        new = self._next(batch)
        self._to_score += [each for each in new if not each.entry.max_new_tokens]
        started = [each for each in new if each.entry.max_new_tokens]
        running.update((each.entry.number, each) for each in started)
        self._had_new_rows[batch] = bool(started)
        self._in_scoring, self._to_score = [each for each in self._to_score if not each.is_cancelled], []
        to_score = [(each.scored_row(), each.num_top) for each in self._in_scoring]
        return Decision(sorted([*finished, *cancelled]), [each.entry for each in started], to_score=to_score)

    def report(self, scores: Sequence[Score]) -> None:
        """End the requests that were scored by the last decision."""
        scored, self._in_scoring = self._in_scoring, []
        for each, score in zip(scored, scores, strict=True):
            each.end(score)

    def fail(self, why: str) -> None:
        """End all requests with an error, including waiting ones."""
        self._queue.close()
        waiting = self._queue.take(self._queue.max_waiting, math.inf)
        batches = (batch.values() for batch in self._batches)
        for each in itertools.chain(waiting, self._to_score, self._in_scoring, *batches):
            each.fail(why)

    def _next(self, batch: int) -> list[GenerationRequest]:
        """Return requests that start in a batch; none in two successive turns, so that running rows continue."""
        num_running = len(self._batches[batch])
        if num_running and self._had_new_rows[batch]:
            return []
        target = min(self.num_running + len(self._queue), self._max_rows)
        room = min(math.ceil(target / len(self._batches)) - num_running, self._max_rows - self.num_running)
        return self._queue.take(room, _PROMPT_TOKENS)
