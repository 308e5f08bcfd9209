"""What one Comm has issued, where a device does it: numbered, and followed until the device has done it.

The host goes on while the device waits for a peer. The ledger is what ``comm.watch`` reads to tell that the device does
not get on, and what it compares with the peers' ledgers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shardwise.comm import progress
from shardwise.comm.progress import Issued

if TYPE_CHECKING:
    from shardwise.comm.watch import StallWatch

#: Of one Comm. Where older ones are stuck, so are those that came after them.
_MAX_UNDER_WAY = 256


class Ledger:
    """The collectives of one Comm.

    Args:
        channel: Name of the Comm, the same on all its ranks.
        rank: This rank's coordinate on the axis.
        ranks: Those of the watched process group that the Comm connects, in coordinate order.
        watch: Compares the ranks; ``None``: nobody does.

    Attributes:
        peers: The other ranks, in the numbers of the watched process group.
    """

    def __init__(self, channel: str, rank: int, ranks: Sequence[int], watch: StallWatch | None) -> None:
        self.peers = [peer for place, peer in enumerate(ranks) if place != rank]
        self._channel = channel
        self._rank = rank
        self._watch = watch
        self._num_issued: Counter[str] = Counter()
        self._under_way: deque[tuple[Issued, Callable[[], bool]]] = deque(maxlen=_MAX_UNDER_WAY)
        if watch is not None:
            watch.follow(self)

    def collective(self, kind: str, unit: str, numel: int) -> Issued:
        """Note a collective of all ranks, which is about to be issued.

        Raises:
            RankDisagreement, CommTimeout: The watch has found that an earlier one will not end.
        """
        return self._note(self._channel, kind, unit, numel)

    def message(self, unit: str, numel: int, *, to: int | None = None, source: int | None = None) -> Issued:
        """Note a message to or from another rank; each way between two ranks has an order of its own.

        Raises:
            RankDisagreement, CommTimeout: As :meth:`collective`.
        """
        sender, receiver = (self._rank if rank is None else rank for rank in (source, to))
        return self._note(f"{self._channel}/{sender}>{receiver}", "message", unit, numel)

    def follow(self, issued: Issued, is_done: Callable[[], bool]) -> None:
        """It has been issued; ``is_done`` asks the device, without waiting."""
        if self._watch is not None:
            self._under_way.append((issued, is_done))

    def oldest(self, before_s: float) -> Issued | None:
        """The oldest collective that the device has not done, of those issued before ``before_s``.

        What came later is not asked about: asking disturbs a capture of CUDA graphs.
        """
        while self._under_way:
            issued, is_done = self._under_way[0]
            if issued.issued_at_s > before_s:
                return None
            if not _is_done(is_done):
                return issued
            self._under_way.popleft()
        return None

    def _note(self, channel: str, kind: str, unit: str, numel: int) -> Issued:
        if self._watch is not None:
            self._watch.check()
        issued = Issued(channel, self._num_issued[channel], kind, unit, numel)
        self._num_issued[channel] += 1
        progress.note(issued)
        return issued


def _is_done(ask: Callable[[], bool]) -> bool:
    try:
        return ask()
    except RuntimeError:  # the event belongs to a captured graph, or the device has failed, which others will say
        return True
