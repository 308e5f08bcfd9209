"""What the lanes of the model do next: jobs leave when they are over, and others begin where there is room."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from shardwise.generation.lane import Order
from shardwise.serve.job import Job, Queue

#: A server without work tells the other ranks so often that it is there.
IDLE_S = 0.5
#: The most tokens of prompts that go through the model together: rows that are under way wait meanwhile.
_PROMPT_TOKENS = 4096


class Scheduler:
    """Decides on the first rank, between two steps.

    Args:
        queue: Jobs that wait.
        num_lanes: Lanes of the model.
        max_rows: The most jobs in all lanes.
        time_left_s: How long jobs may go on; ``None`` while nobody has asked the server to end.
    """

    def __init__(
        self, queue: Queue, num_lanes: int, max_rows: int, time_left_s: Callable[[], float | None] = lambda: None
    ) -> None:
        self._queue, self._max_rows, self._time_left_s = queue, max_rows, time_left_s
        self._lanes: list[dict[int, Job]] = [{} for _ in range(num_lanes)]
        self._has_begun = [False] * num_lanes  # new rows, in the lane's last forward

    @property
    def num_running(self) -> int:
        """Jobs under way."""
        return sum(map(len, self._lanes))

    def __call__(self, lane: int, tokens: Mapping[int, int]) -> Order:
        """The order for a lane, whose newest tokens are handed on."""
        jobs = self._lanes[lane]
        gone = {number for number, token in tokens.items() if number in jobs and jobs[number].add(token)}
        gone |= {number for number, job in jobs.items() if job.is_cancelled}
        left_s = self._time_left_s()
        if left_s is not None:
            self._queue.close()
            if left_s <= 0:
                gone |= self._end(lane)
        for number in gone:
            del jobs[number]
        if not self.num_running and not len(self._queue):
            if self._queue.is_closed:
                return Order(is_last=True)
            self._queue.wait(IDLE_S)
        new = self._begun(lane)
        self._has_begun[lane] = bool(new)
        return Order(sorted(gone), [job.entry for job in new])

    def fail(self, why: str) -> None:
        """End all jobs."""
        self._queue.close()
        waiting = self._queue.take(self._queue.most, math.inf)
        for job in [*waiting, *(job for jobs in self._lanes for job in jobs.values())]:
            job.fail(why)
            job.is_cancelled = True

    def _end(self, lane: int) -> set[int]:
        self.fail("the server ends, and the time is over that answers under way had left")
        return set(self._lanes[lane])

    def _begun(self, lane: int) -> list[Job]:
        """Jobs that begin in a lane: not in two of its turns one after the other, so that the others go on."""
        jobs = self._lanes[lane]
        if jobs and self._has_begun[lane]:
            return []
        wanted = min(self.num_running + len(self._queue), self._max_rows)
        room = math.ceil(wanted / len(self._lanes)) - len(jobs)
        new = self._queue.take(min(room, self._max_rows - self.num_running), _PROMPT_TOKENS) if room > 0 else []
        jobs.update((job.entry.number, job) for job in new)
        return new
