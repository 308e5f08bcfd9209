"""The ranks that follow one agreed order together, and what they say while they negotiate it (``spec.order``)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwise.comm.base import Comm
from shardwise.comm.control import agree_row, refuse_different
from shardwise.engine.pool import GradientPool
from shardwise.spec.errors import CommError, RankDisagreement
from shardwise.spec.order import FAILED, Entry, Word

if TYPE_CHECKING:
    from shardwise.engine.engine import Backward
    from shardwise.engine.unit import Unit

#: Units that backward has entered and not left about which ranks can tell each other whether they will come again.
_MAX_ENTERED = 62


class RankPeers:
    """The ranks of a Comm, of which each passes through the model by the same entry.

    Args:
        comm: The Comm.
        entry: The entry.
        units: The units of the model.
        gradients: Tells where some ranks only follow others (``sw.join``), and do not answer.
        backward: The backward under way, in an order of backwards.
    """

    def __init__(
        self,
        comm: Comm,
        entry: Entry,
        units: Sequence[Unit],
        gradients: GradientPool,
        backward: Backward | None = None,
    ) -> None:
        self._comm = comm
        self._entry = entry
        self._units = units
        self._gradients = gradients
        self._backward = backward

    @property
    def are_there(self) -> bool:
        """There are other ranks, and they can answer."""
        return self._comm.size > 1 and self._comm.answers and not self._gradients.finishes_at_once

    def exchange(self, word: Word) -> Sequence[Word]:
        """Every rank's word, in rank order. In a backward ranks also learn which units some rank will enter again.

        Collective:
            One all-gather of 48 bytes per rank in host memory, which the host waits for; it is in no recorded trace.
            All ranks of the Comm must call.
        """
        entered = self._backward.entered if self._backward is not None else []
        outstanding = sum(unit.calls.is_outstanding << place for place, unit in enumerate(entered[:_MAX_ENTERED]))
        host = self._comm.host
        place = zlib.crc32(repr((self._entry, self._backward is None)).encode())
        row = [*map(int, word), place, outstanding]
        try:
            with host.unrecorded():
                rows = agree_row(host, row, unit="order")
        except RankDisagreement as error:
            if word.wants < 0:
                raise
            name = self._units[word.wants].name
            raise RankDisagreement(
                f"{error}\n  This rank came to unit {name!r}, which the agreed order does not hold here."
            ) from error
        failed = [rank for rank, row in enumerate(rows) if row[0] == FAILED]
        if word.wants == FAILED:
            return ()
        if failed:
            raise CommError(
                f"rank {failed[0]} along {host.axis} has left a pass through the model by an exception, while the ranks"
                " agreed on the order of its units.\n  Look for the first error among the ranks' logs."
            )
        refuse_different(
            host,
            [row[-2] for row in rows],
            "the ranks call the model through different modules, or are in different passes",
            "Call the same module of the model on every rank, as a rule the model itself.",
            show=lambda: self._entry[1] or self._units[self._entry[0]].name,
        )
        if self._backward is not None:
            places = range(len(entered))
            self._backward.awaited = {
                entered[place] for place in places if place >= _MAX_ENTERED or any(row[-1] >> place & 1 for row in rows)
            }
        return [Word(*row[:3], is_whole=bool(row[3])) for row in rows]
