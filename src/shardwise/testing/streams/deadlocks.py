"""Check that the collectives of all ranks can end, in every interleaving of their streams, without deadlock.

A *meeting* is one collective on all ranks of its communicator, or one message between two ranks. A collective begins
when earlier ones in its rank's order have ended, and ends when all ranks of its meetings have begun it. Streams run
work in order, so the set of collectives that can end does not depend on the speed of ranks: one simulation of the
orders decides for every interleaving.

Two orders are checked. In *streams* a collective waits for earlier ones on its stream, and for everything that its
stream had waited for when the collective was issued. In *one queue* a collective waits for everything that its rank has
issued before, as on a device with one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``), or without room for two of
NCCL's kernels. *One queue* is the stronger condition: if it holds, all ranks follow one order of all collectives, over
all communicators.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwise.testing.streams.report import Collective
from shardwise.testing.streams.stacks import shown

ORDERS = ("one queue", "streams")
#: Collectives whose result has the same size on every rank.
_EQUALLY_LARGE = ("all_gather", "all_reduce")


class DeadlockError(AssertionError):
    """Ranks wait for each other, or issue different collectives in one meeting.

    Attributes:
        circle: For each rank of the circle, its number, the collective in which it waits, and the rank that it waits
            for.
    """

    def __init__(self, message: str, circle: Sequence[tuple[int, Collective, int]] = ()) -> None:
        super().__init__(message)
        self.circle = tuple(circle)


class Program(NamedTuple):
    """The collectives that a rank issues, in order.

    Attributes:
        collectives: The collectives; several ranks may share the list.
        ranks: The ranks of each communicator, if they differ from those in ``collectives``.
    """

    collectives: Sequence[Collective]
    ranks: Mapping[str, tuple[int, ...]] = {}


def refuse_deadlocks(traces: Sequence[Sequence[Collective] | Program], orders: Sequence[str] = ORDERS) -> int:
    """Raise an error if the collectives of all ranks cannot end.

    Args:
        traces: The collectives of each rank of the world: ``Seen.collectives``, or :func:`world_traces`.
        orders: ``"streams"``, ``"one queue"``, or both. ``"streams"`` needs the clocks of the detector, which dry runs
            do not have.

    Returns:
        The number of meetings.

    Raises:
        DeadlockError: Ranks deadlock, or issue different collectives in one meeting.
    """
    programs = [trace if isinstance(trace, Program) else Program(trace) for trace in traces]
    return max((_Run(programs, order).run() for order in orders), default=0)


@dataclass
class _Meeting:
    """One collective on all ranks of its communicator, or one message.

    Attributes:
        members: The ranks that must take part.
        first: The first rank that has begun the meeting, and its collective.
        arrived: The ranks that have begun the meeting.
    """

    members: tuple[int, ...]
    first: tuple[int, Collective]
    arrived: set[int] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        return len(self.arrived) == len(self.members)


class _StreamQueue:
    """Collectives of a rank that run one after the other.

    Attributes:
        places: The indices of the collectives in the program.
        needs: For each collective, pairs of another queue and the number of its collectives that must end before.
        num_done: Number of collectives that have ended.
        meetings: The meetings of the current collective; ``None``: it has not begun.
    """

    def __init__(self) -> None:
        self.places: list[int] = []
        self.needs: list[tuple[tuple[_StreamQueue, int], ...]] = []
        self.num_done = 0
        self.meetings: list[_Meeting] | None = None

    @property
    def is_complete(self) -> bool:
        return self.num_done == len(self.places)

    @property
    def can_begin(self) -> bool:
        return all(queue.num_done >= count for queue, count in self.needs[self.num_done])


class _Run:
    """A simulation of all programs in one order."""

    def __init__(self, programs: Sequence[Program], order: str) -> None:
        if order not in ORDERS:
            raise ValueError(f"order {order!r}: expected one of {', '.join(ORDERS)}")
        self._programs, self._order = programs, order
        queues: Callable[[Program], list[_StreamQueue]] = _queue_of if order == "one queue" else _streams_of
        self._queues = [queues(program) for program in programs]
        self._meetings: dict[Hashable, _Meeting] = {}
        self._num_completed: list[defaultdict[Hashable, int]] = [defaultdict(int) for _ in programs]
        self._waiting: defaultdict[int, set[int]] = defaultdict(set)  # by meeting: ranks to continue when it ends
        self._num_meetings = 0

    def run(self) -> int:
        """Simulate until no rank can continue, and return the number of meetings."""
        ready = deque(range(len(self._programs)))
        while ready:
            rank = ready.popleft()
            while any(self._advance(rank, queue, ready) for queue in self._queues[rank]):
                pass
        if any(not queue.is_complete for queues in self._queues for queue in queues):
            raise self._stuck()
        return self._num_meetings

    def _advance(self, rank: int, queue: _StreamQueue, ready: deque[int]) -> bool:
        """Continue a queue as far as possible, and return whether any collective has ended."""
        before = queue.num_done
        while not queue.is_complete:
            if queue.meetings is None:
                if not queue.can_begin:
                    break
                index = queue.places[queue.num_done]
                queue.meetings = [*self._begin(rank, self._programs[rank].collectives[index], ready)]
            open_ones = [meeting for meeting in queue.meetings if not meeting.is_over]
            for meeting in open_ones:
                self._waiting[id(meeting)].add(rank)
            if open_ones:
                break
            queue.num_done += 1
            queue.meetings = None
        return queue.num_done > before

    def _begin(self, rank: int, issued: Collective, ready: deque[int]) -> Iterator[_Meeting]:
        """Note that a rank begins a collective, and yield the collective's meetings."""
        ranks = self._programs[rank].ranks.get(issued.group, issued.ranks)
        pairs = [(ranks[source], ranks[target]) for source, target in issued.messages]
        for between in pairs or [ranks]:
            key = issued.group, ranks, between if pairs else None
            number = self._num_completed[rank][key]
            self._num_completed[rank][key] = number + 1
            meeting = self._meetings.get((key, number))
            if meeting is None:
                members = tuple(dict.fromkeys(between))
                meeting = self._meetings[key, number] = _Meeting(members, (rank, issued))
                self._num_meetings += 1
            elif not pairs:
                _compare(meeting.first, (rank, issued), number)
            meeting.arrived.add(rank)
            if meeting.is_over:
                del self._meetings[key, number]
                ready.extend(self._waiting.pop(id(meeting), ()))
            yield meeting

    # -- errors

    def _stuck(self) -> DeadlockError:
        """The error: follow the ranks that wait for each other to a repeated rank, or to one that has finished."""
        rank = next(rank for rank, queues in enumerate(self._queues) if any(queue.meetings for queue in queues))
        path: list[tuple[int, Collective, int]] = []
        while rank not in {entry[0] for entry in path}:
            head = self._head_of(rank)
            if head is None:
                break
            issued, meeting = head
            missing = next(other for other in meeting.members if other not in meeting.arrived)
            path.append((rank, issued, missing))
            rank = missing
        start = next((index for index, entry in enumerate(path) if entry[0] == rank), 0)
        circle = path[start:]
        lines = [
            f"  rank {each} waits in {_named(issued, self._programs[each])} for rank {other}, at\n{shown(issued.where)}"
            for each, issued, other in circle
        ]
        has_ended = self._head_of(rank) is None
        reason = f"rank {rank} has issued all that it does" if has_ended else "ranks wait for each other in a circle"
        return DeadlockError("\n".join([f"deadlock in the order of {self._order}: {reason}", *lines]), circle)

    def _head_of(self, rank: int) -> tuple[Collective, _Meeting] | None:
        """The collective that a rank has begun and cannot end."""
        for queue in self._queues[rank]:
            for meeting in queue.meetings or ():
                if not meeting.is_over:
                    return self._programs[rank].collectives[queue.places[queue.num_done]], meeting
        return None


def _queue_of(program: Program) -> list[_StreamQueue]:
    """One queue with all collectives."""
    queue = _StreamQueue()
    queue.places = list(range(len(program.collectives)))
    queue.needs = [()] * len(queue.places)
    return [queue]


def _streams_of(program: Program) -> list[_StreamQueue]:
    """A queue for each stream. Collectives of other streams in a collective's clock must end before it begins."""
    queues: dict[int, _StreamQueue] = {}
    times: dict[int, list[int]] = {}
    for index, issued in enumerate(program.collectives):
        queue, number = queues.setdefault(issued.agent, _StreamQueue()), issued.agent
        seen = [
            (other, bisect_right(times[stream], issued.clock.get(stream, -1)))
            for stream, other in queues.items()
            if stream != number and stream in times
        ]
        queue.needs.append(tuple((other, count) for other, count in seen if count))
        queue.places.append(index)
        times.setdefault(number, []).append(issued.clock.get(number, index))
    return list(queues.values())


def _compare(first: tuple[int, Collective], second: tuple[int, Collective], number: int) -> None:
    """Refuse ranks that issue different collectives in one meeting."""
    (rank, one), (other, two) = first, second
    is_as_large = one.numel == two.numel or one.kind not in _EQUALLY_LARGE
    if (one.kind, one.unit) != (two.kind, two.unit) or not is_as_large:
        raise DeadlockError(
            f"collective {number} of {one.group}: rank {rank} issues {one.kind} of {one.unit!r} ({one.numel} elements)"
            f" at\n{shown(one.where)}\n  rank {other} {two.kind} of {two.unit!r} ({two.numel} elements) at\n"
            f"{shown(two.where)}"
        )


def _named(issued: Collective, program: Program) -> str:
    ranks = program.ranks.get(issued.group, issued.ranks)
    if issued.messages:
        pairs = ", ".join(f"{ranks[source]} to {ranks[target]}" for source, target in issued.messages)
        return f"{issued.kind} of {issued.unit!r} ({pairs})"
    return f"{issued.kind} of {issued.unit!r} over {issued.group}"
