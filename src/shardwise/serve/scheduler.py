"""The scheduler of the model's lanes: which completions leave a lane, and which start in it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from shardwise.generation.lane import Order
from shardwise.generation.score import Score
from shardwise.serve.completion import Completion, Queue

#: Seconds between empty orders of an idle server to the other ranks, which prevent their time limits from expiring.
IDLE_S = 0.5
#: Maximum number of prompt tokens that go through the model together, while running rows wait.
_PROMPT_TOKENS = 4096


class Scheduler:
    """Decides between two steps, on the first rank.

    ``time_left_s`` returns how long completions may continue; ``None`` unless the server was asked to stop.
    """

    def __init__(
        self, queue: Queue, num_lanes: int, max_rows: int, time_left_s: Callable[[], float | None] = lambda: None
    ) -> None:
        self._queue, self._max_rows, self._time_left_s = queue, max_rows, time_left_s
        self._lanes: list[dict[int, Completion]] = [{} for _ in range(num_lanes)]
        self._has_begun = [False] * num_lanes  # whether the lane's last forward had new rows
        self._ended: list[Completion] = []  # completions to be scored
        self._scored: list[Completion] = []  # completions scored by the last order

    @property
    def num_running(self) -> int:
        """Number of running completions."""
        return sum(map(len, self._lanes))

    def __call__(self, lane: int, tokens: Mapping[int, int]) -> Order:
        """Report the newest tokens of a lane to its completions, and decide on the lane's next action."""
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
        """End the completions that were scored by the last order."""
        ended, self._scored = self._scored, []
        for each, score in zip(ended, scores, strict=True):
            each.end(score)

    def fail(self, why: str) -> None:
        """End all completions with an error, including waiting ones."""
        self._queue.close()
        waiting = self._queue.take(self._queue.most, math.inf)
        for each in itertools.chain(waiting, self._ended, self._scored, *(lane.values() for lane in self._lanes)):
            each.fail(why)

    def _next(self, lane: int) -> list[Completion]:
        """Return completions that start in a lane; none in two successive turns, so that running rows continue."""
        num_running = len(self._lanes[lane])
        if num_running and self._has_begun[lane]:
            return []
        wanted = min(self.num_running + len(self._queue), self._max_rows)
        room = min(math.ceil(wanted / len(self._lanes)) - num_running, self._max_rows - self.num_running)
        return self._queue.take(room, _PROMPT_TOKENS)
