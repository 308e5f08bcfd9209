"""The scheduler of the model's lanes: which completions leave a lane, and which begin there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from shardwise.generation.lane import Order
from shardwise.generation.score import Score
from shardwise.serve.completion import Completion, Queue

#: A server without work gives the other ranks an empty order so often, so that none of them runs into a time limit.
IDLE_S = 0.5
#: The most tokens of prompts that go through the model together, while rows under way wait.
_PROMPT_TOKENS = 4096


class Scheduler:
    """Decides on the first rank, between two steps.

    ``time_left_s`` gives how long completions may go on; ``None`` while nobody has asked the server to end.
    """

    def __init__(
        self, queue: Queue, num_lanes: int, max_rows: int, time_left_s: Callable[[], float | None] = lambda: None
    ) -> None:
        self._queue, self._max_rows, self._time_left_s = queue, max_rows, time_left_s
        self._lanes: list[dict[int, Completion]] = [{} for _ in range(num_lanes)]
        self._has_begun = [False] * num_lanes  # new rows, in the lane's last forward
        self._ended: list[Completion] = []  # whose tokens are to be scored
        self._scored: list[Completion] = []  # by the last order

    @property
    def num_running(self) -> int:
        """Completions under way."""
        return sum(map(len, self._lanes))

    def __call__(self, lane: int, tokens: Mapping[int, int]) -> Order:
        """Report the newest tokens of a lane to its completions, and decide what the lane does next."""
        running = self._lanes[lane]
        over = [number for number, token in tokens.items() if number in running and running[number].add(token)]
        self._ended += [each for each in map(running.pop, over) if each.is_scored]
        left_s = self._time_left_s()
        if left_s is not None:
            self._queue.close()
            if left_s <= 0:
                self.fail("the server ends, and the time is over that answers under way had left")
        cancelled = [number for number, each in running.items() if each.is_cancelled]
        for number in cancelled:
            del running[number]
        if not self.num_running and not len(self._queue) and not self._ended:
            if self._queue.is_closed:
                return Order(is_last=True)
            self._queue.wait(IDLE_S)
        new = self._next(lane)
        self._ended += [each for each in new if not each.entry.max_new_tokens]
        begun = [each for each in new if each.entry.max_new_tokens]
        running.update((each.entry.number, each) for each in begun)
        self._has_begun[lane] = bool(begun)
        self._scored, self._ended = [each for each in self._ended if not each.is_cancelled], []
        scored = [(each.scored_row(), each.num_top) for each in self._scored]
        return Order(sorted([*over, *cancelled]), [each.entry for each in begun], scored=scored)

    def report(self, scores: Sequence[Score]) -> None:
        """End the completions that the last order had scored."""
        ended, self._scored = self._scored, []
        for each, score in zip(ended, scores, strict=True):
            each.end(score)

    def fail(self, why: str) -> None:
        """End all completions with an error, those that wait too."""
        self._queue.close()
        waiting = self._queue.take(self._queue.most, math.inf)
        for each in itertools.chain(waiting, self._ended, self._scored, *(lane.values() for lane in self._lanes)):
            each.fail(why)

    def _next(self, lane: int) -> list[Completion]:
        """Completions that begin in a lane: not in two of its turns one after the other, so that others go on."""
        num_running = len(self._lanes[lane])
        if num_running and self._has_begun[lane]:
            return []
        wanted = min(self.num_running + len(self._queue), self._max_rows)
        room = min(math.ceil(wanted / len(self._lanes)) - num_running, self._max_rows - self.num_running)
        return self._queue.take(room, _PROMPT_TOKENS)
