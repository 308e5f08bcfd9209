"""State of the forward and backward under way, and the ranks that agree on the order of units (``spec.order``)."""

from __future__ import annotations

import contextlib
import itertools
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from shardwise.comm.base import Comm
from shardwise.comm.control import all_gather_ints, all_reduce_max, refuse_different
from shardwise.engine.unit import State, Unit
from shardwise.spec.errors import CommError, RankDisagreement
from shardwise.spec.order import FAILED, FINISHED, EntryPoint, OrderMessage

#: Number of entered units for which a message can say whether backward will enter them again: the bits of an integer.
_MAX_ENTERED = 62


class Forward:
    """The outermost forward under way, or the newest one.

    Attributes:
        trains: Whether grad was enabled when it began.
        is_shared: Whether all ranks make it, in one agreed order of units: it trains, or is part of an evaluation.
        num_frames: Number of calls of units under way.
        thread: Identity of the thread in which it runs.
        handled_exception: The exception that its caller is handling.
        exited: Units that forward has left without entering another one since.
        path: Numbers of the units whose calls a backward may reach, in the order of the calls since the last backward.
        version: ``Engine.version`` of the calls that ``CallCounts.num_outstanding`` counts.
    """

    def __init__(self) -> None:
        self.trains = self.is_shared = False
        self.num_frames = 0
        self.thread = 0
        self.handled_exception: BaseException | None = None
        self.exited: list[Unit] = []
        self.path: deque[int] = deque(maxlen=1 << 14)
        self.version = 0


class Backward:
    """The backward under way, or the newest one.

    Attributes:
        is_under_way: Whether it has begun and not ended.
        generation: Number of the backward, counted from the start.
        entered: Units that backward has entered and not left.
        active: The unit that was entered last, for the first time or again.
        makes_graph: Whether it was called with ``create_graph=True``.
        awaited: While the ranks negotiate the order: entered units that some rank will enter again.
        had_sums: Whether sums of earlier microbatches were waiting when it began.
        has_accumulated: Whether such sums were waiting when any backward so far began.
        end: Weak reference to the callback that torch calls at its end; torch drops the callback if backward raises.
    """

    def __init__(self) -> None:
        self.is_under_way = False
        self.generation = 0
        self.makes_graph = False
        self.entered: list[Unit] = []
        self.active: Unit | None = None
        self.awaited: set[Unit] = set()
        self.had_sums = False
        self.has_accumulated = False
        self.end: weakref.ref[Callable[[], None]] | None = None


class RankPeers:
    """The ranks of a Comm that pass through the model by one entry; ``backward`` is set for backward passes."""

    def __init__(
        self,
        comm: Comm,
        entry: EntryPoint,
        units: Sequence[Unit],
        backward: Backward | None = None,
    ) -> None:
        self._comm = comm
        self._entry = entry
        self._units = units
        self._backward = backward

    @property
    def can_answer(self) -> bool:
        """Whether there are other ranks that can answer."""
        return self._comm.size > 1 and self._comm.has_peers

    @property
    def under_way(self) -> frozenset[int]:
        """Numbers of the units that this rank is prefetching."""
        return frozenset(unit.index for unit in self._units if unit.state is State.UNSHARDING)

    def _checksum(self, entered: Sequence[Unit] = ()) -> int:
        """A checksum of the pass and of the units that backward has entered in it."""
        return zlib.crc32(repr((self._entry, self._backward is None, *(unit.index for unit in entered))).encode())

    def highest(self, *numbers: int, wants: int = FINISHED) -> Sequence[int]:
        """Return the highest of each number over the ranks. ``wants``: the unit for which this rank asks.

        Collective:
            Messages of eight bytes per number between pairs of ranks (``all_reduce_max``), which the host waits for.
            They are in no recorded trace. All ranks of the Comm must call, at any place in the order of their
            collectives. Messages of different passes never match.
        """
        with self._comm.host.unrecorded(), self._with_wanted_unit(wants):
            return all_reduce_max(self._comm, numbers, unit=f"order {self._checksum()}")

    @contextlib.contextmanager
    def _with_wanted_unit(self, wants: int) -> Iterator[None]:
        """Add the unit that this rank wants to the message of a disagreement raised inside."""
        try:
            yield
        except RankDisagreement as error:
            if wants < 0:
                raise
            name = self._units[wants].name
            raise RankDisagreement(
                f"{error}\n  This rank came to unit {name!r}, which the agreed order does not hold here."
            ) from error

    def exchange(self, message: OrderMessage) -> Sequence[OrderMessage]:
        """Return every rank's message, in rank order; in a backward, also set ``Backward.awaited``.

        Collective:
            One all-gather of 40 bytes per rank in host memory, which the host waits for; it is in no recorded trace.
            All ranks of the Comm must call.
        """
        entered = self._backward.entered if self._backward is not None else []
        outstanding = sum(unit.calls.is_outstanding << place for place, unit in enumerate(entered[:_MAX_ENTERED]))
        host = self._comm.host
        row = [*map(int, message), self._checksum(entered), outstanding]
        with host.unrecorded(), self._with_wanted_unit(message.wants):
            rows = all_gather_ints(host, row, unit="order")
        failed = [rank for rank, row in enumerate(rows) if row[0] == FAILED]
        if message.wants == FAILED:
            return ()
        if failed:
            raise CommError(
                f"rank {failed[0]} along {host.axis} has left a pass through the model by an exception, while the ranks"
                " agreed on the order of its units.\n  Look for the first error among the ranks' logs."
            )
        name = self._entry[1] or self._units[self._entry[0]].name
        refuse_different(
            host,
            [row[-2] for row in rows],
            "the ranks call the model through different modules, or are in different passes",
            "Call the same module of the model on every rank, as a rule the model itself.",
            show=lambda: ", ".join([name, *(unit.name for unit in entered)]),
        )
        if self._backward is not None:
            awaited = [p >= _MAX_ENTERED or any(row[-1] >> p & 1 for row in rows) for p in range(len(entered))]
            self._backward.awaited = set(itertools.compress(entered, awaited))
        return [OrderMessage(row[0], row[1], bool(row[2])) for row in rows]
