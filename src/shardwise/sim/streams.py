"""A discrete-event simulation of streams: tasks run one after another on each stream, and wait for other tasks.

A stream runs its tasks in the given order. A task begins when the previous task on its stream and every task that it
names in ``after`` have ended. Computation is the stream ``compute``. Time in which ``compute`` waits is *exposed*, and
is counted for the category of the task that it waits for. Example, a gather that overlaps a computation::

    timeline = run([
        Task("compute", 3.0, label="block 1"),
        Task("gather", 5.0, label="block 2", category="gather"),
        Task("compute", 3.0, after=(0, 1), label="block 2"),
    ])
    timeline.end_s            # 8.0
    timeline.exposed["gather"]  # 2.0

While ``compute`` and a communicating stream are both busy, both are slower: computation takes ``slowdown.compute``
times as long, communication ``slowdown.transfer`` times (1.1 to 1.3 on a GPU with NCCL, Galvatron, arXiv 2211.13878).
Over Gloo, computation and messages of a rank with one thread share one core; ``shardwise calibrate`` measures how much.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardwise.spec.traffic.data import Collective

COMPUTE = "compute"


class Task(NamedTuple):
    """A piece of work on one stream.

    Attributes:
        stream: The stream on which the task runs.
        seconds: Duration without slowdown.
        after: Indices, in the list of all tasks, of earlier tasks that must end before this one begins.
        label: Text for the timeline: the name of a unit, a microbatch.
        category: Category of the time in which computation waits for this task; "" for computation.
        collective: The collective, if the task is one.
    """

    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    label: str = ""
    category: str = ""
    collective: Collective | None = None


def add_up(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The sum of seconds of each category."""
    found: dict[str, float] = {}
    for category, seconds in parts:
        found[category] = found.get(category, 0.0) + seconds
    return found


class Span(NamedTuple):
    """A task with its start and end."""

    begin_s: float
    end_s: float
    task: Task


class Slowdown(NamedTuple):
    """The slowdown of work while computation and communication run at the same time.

    Attributes:
        compute: Factor of computation.
        transfer: Factor of communication.
        divides_link: Streams that share one link: two that communicate at the same time have half of it each.
        shared: How far streams share one core: while n streams are busy, each takes ``1 + shared (n - 1)`` times as
            long. If it is not 0, ``compute`` and ``transfer`` have no effect.
    """

    compute: float = 1.0
    transfer: float = 1.0
    divides_link: frozenset[str] = frozenset()
    shared: float = 0.0

    def factors(self, num_computing: int, num_sending: int) -> tuple[float, float]:
        """The slowdown of computation and of communication while these numbers of streams are busy."""
        if self.shared:
            return (1 + self.shared * max(num_computing + num_sending - 1, 0),) * 2
        return (self.compute, self.transfer) if num_computing and num_sending else (1.0, 1.0)


NO_SLOWDOWN = Slowdown()


@dataclass(frozen=True)
class Timeline:
    """The simulated start and end of each task.

    Attributes:
        spans: One span for each task, in the order of the tasks.
    """

    spans: tuple[Span, ...]

    @cached_property
    def end_s(self) -> float:
        """The end of the last task; the first begins at 0."""
        return max((span.end_s for span in self.spans), default=0.0)

    @cached_property
    def streams(self) -> dict[str, list[Span]]:
        """The spans of each stream, in order of time; streams are in the order of their first task."""
        found: dict[str, list[Span]] = {}
        for span in self.spans:
            found.setdefault(span.task.stream, []).append(span)
        return found

    @cached_property
    def busy(self) -> dict[str, float]:
        """Seconds in which each stream works."""
        return {stream: sum(span.end_s - span.begin_s for span in spans) for stream, spans in self.streams.items()}

    @cached_property
    def exposed(self) -> dict[str, float]:
        """Seconds in which ``compute`` waits, by the category of the task that it waits for, also after its last task.

        Their sum, plus the seconds in which ``compute`` works, is :attr:`end_s`.
        """
        return add_up(_exposed(self))

    @property
    def collectives(self) -> list[tuple[Span, Collective]]:
        """The collectives, sorted by start; equal starts are in the order of the tasks."""
        found = [(span, span.task.collective) for span in self.spans if span.task.collective is not None]
        return sorted(found, key=lambda entry: entry[0].begin_s)


def run(tasks: Sequence[Task], slowdown: Slowdown = NO_SLOWDOWN) -> Timeline:
    """Simulate tasks, given in an order in which each follows the tasks that it waits for."""
    if slowdown == NO_SLOWDOWN:
        return _run_freely(tasks)
    return _Streams(tasks, slowdown).timeline()


def _run_freely(tasks: Sequence[Task]) -> Timeline:
    """Simulate tasks without slowdown, in one pass: a task's start depends only on earlier tasks."""
    free: dict[str, float] = {}
    ends: list[float] = []
    spans: list[Span] = []
    for task in tasks:
        begin = free.get(task.stream, 0.0)
        for index in task.after:
            begin = max(begin, ends[index])
        end = begin + task.seconds
        free[task.stream] = end
        ends.append(end)
        spans.append(Span(begin, end, task))
    return Timeline(tuple(spans))


class _Streams:
    """Simulates streams event by event, because rates change whenever a stream begins or ends a task."""

    def __init__(self, tasks: Sequence[Task], slowdown: Slowdown) -> None:
        names = list(dict.fromkeys(task.stream for task in tasks))
        number = {name: stream for stream, name in enumerate(names)}
        self._tasks = tasks
        self._slowdown = slowdown
        self._compute = number.get(COMPUTE, -1)
        self._sends = [name not in {COMPUTE, "host", "update"} for name in names]
        self._divides = [name in slowdown.divides_link for name in names]
        self._stream_of = [number[task.stream] for task in tasks]
        self._queues: list[deque[int]] = [deque() for _ in names]
        self._followers: list[list[int]] = [[] for _ in tasks]
        self._unmet = [len(task.after) for task in tasks]
        self._begins, self._ends = [0.0] * len(tasks), [0.0] * len(tasks)
        self._running: dict[int, tuple[int, float]] = {}  # by stream: the task, and its remaining seconds of work
        self._ready = list(range(len(names)))[::-1]  # streams that may have a task to begin
        self._now = 0.0
        for index, task in enumerate(tasks):
            self._queues[self._stream_of[index]].append(index)
            for other in task.after:
                self._followers[other].append(index)

    def timeline(self) -> Timeline:
        while self._ready:
            self._begin()
            if self._running:
                self._advance()
        return Timeline(tuple(map(Span, self._begins, self._ends, self._tasks)))

    def _begin(self) -> None:
        """Begin all tasks that can begin; tasks without duration end at once."""
        while self._ready:
            stream = self._ready.pop()
            queue = self._queues[stream]
            while queue and stream not in self._running and not self._unmet[queue[0]]:
                index = queue.popleft()
                self._begins[index] = self._now
                seconds = self._tasks[index].seconds
                if seconds > 0:
                    self._running[stream] = index, seconds
                else:
                    self._end(index)

    def _end(self, index: int) -> None:
        self._ends[index] = self._now
        for follower in self._followers[index]:
            self._unmet[follower] -= 1
            self._ready.append(self._stream_of[follower])

    def _advance(self) -> None:
        """Advance the time to the next end of a task."""
        sends, running = self._sends, self._running
        computing, sending = self._slowdown.factors(self._compute in running, sum(sends[stream] for stream in running))
        on_link = sum(self._divides[stream] for stream in running)
        factors = [
            computing
            if stream == self._compute
            else (sending if sends[stream] else 1.0) * (on_link if self._divides[stream] else 1)
            for stream in running
        ]
        step = min(left * factor for (_, left), factor in zip(running.values(), factors, strict=True))
        self._now += step
        for (stream, (index, left)), factor in zip(tuple(running.items()), factors, strict=True):
            remaining_s = left - step / factor
            if remaining_s > 1e-12 * left:
                running[stream] = index, remaining_s
            else:
                del running[stream]
                self._ready.append(stream)
                self._end(index)


def _exposed(timeline: Timeline) -> Iterator[tuple[str, float]]:
    spans = timeline.spans
    before: dict[str, int] = {}
    previous: list[int | None] = []  # the task before each on its stream
    for index, span in enumerate(spans):
        previous.append(before.get(span.task.stream))
        before[span.task.stream] = index
    computing = 0.0
    for index, span in enumerate(spans):
        if span.task.stream == COMPUTE:
            yield from _waits(spans, previous, index, computing)
            computing = span.end_s
    if spans and timeline.end_s > computing:
        last = max(range(len(spans)), key=lambda index: spans[index].end_s)
        yield from _split_wait(spans, previous, last, computing, timeline.end_s)


def _waits(
    spans: Sequence[Span], previous: Sequence[int | None], index: int, since: float
) -> Iterator[tuple[str, float]]:
    """Yield the waits, by category, between ``since``, the end of the previous computation, and this computation."""
    begin = spans[index].begin_s
    if begin <= since:
        return
    blocker = max(spans[index].task.after, key=lambda other: spans[other].end_s, default=None)
    if blocker is not None:
        yield from _split_wait(spans, previous, blocker, since, begin)


def _split_wait(
    spans: Sequence[Span], previous: Sequence[int | None], index: int | None, since: float, until: float
) -> Iterator[tuple[str, float]]:
    """Split a wait over the task that ended it, the task that this one waited for, and so on."""
    while index is not None and until > since:
        span = spans[index]
        begin = max(since, span.begin_s)
        if begin < until and span.task.stream != COMPUTE:
            yield span.task.category or span.task.stream, until - begin
        until = min(until, begin)
        earlier = [*span.task.after, *(() if previous[index] is None else (previous[index],))]
        index = max(earlier, key=lambda other: spans[other].end_s, default=None)  # pyrefly: ignore
