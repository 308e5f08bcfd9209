"""The order in which the Comms of several models use one communicator, compared between ranks.

NCCL tells collectives apart by their order alone. Models over the same ranks share a communicator for each purpose
(``comm.axes``), so ranks that stepped two models in different orders would exchange foreign data without an error.
Collectives are therefore numbered by communicator, and the ranks compare what they have issued whenever another model
than the last one is about to use it. A communicator of one model compares nothing.
"""

from __future__ import annotations

import zlib

import torch

from shardwise.comm.gloo import GlooComm
from shardwise.comm.stall import Issued
from shardwise.spec.errors import RankDisagreement

#: Bytes that a rank tells the next one: a digest, and the collective in words.
_NUM_BYTES = 256


class Turns:
    """The operations that this process has issued on one communicator."""

    def __init__(self) -> None:
        self.num_comms = 0  # Comms that were opened on the communicator, in all: the same number on every rank
        self.num_issued: dict[str, int] = {}  # collectives and messages, by channel
        #: On which all of them run: torch has no more than 32 streams to give.
        self.stream: torch.cuda.Stream | None = None
        self._user: str | None = None  # that has issued last
        self._digest = 0  # of all collectives since there is a second Comm

    def take(self, user: str, host: GlooComm, issued: Issued) -> None:
        """Note that the Comm ``user`` is about to issue a collective.

        Raises:
            RankDisagreement: Ranks use the communicator in different orders.

        Collective:
            Nothing, but where another Comm has issued last: over ``host`` 256 bytes from each rank to the next one,
            for which the next one's host waits.
        """
        if self.num_comms < 2:
            return  # every rank's second Comm is opened after the same collectives
        issued.unit += f" of {user}"
        if user != self._user and host.size > 1:
            self._compare(host, f"{issued.kind} of unit {issued.unit}")
        self._user = user
        text = f"{issued.kind} {issued.unit} {issued.numel} {issued.dtype}"
        self._digest = zlib.crc32(text.encode(), self._digest)

    def _compare(self, host: GlooComm, upcoming: str) -> None:
        rank, before, after = host.rank, (host.rank - 1) % host.size, (host.rank + 1) % host.size
        told = f"{self._digest:08x}{upcoming}".encode()[:_NUM_BYTES].ljust(_NUM_BYTES)
        own, theirs = (
            torch.frombuffer(bytearray(told), dtype=torch.uint8),
            torch.empty(_NUM_BYTES, dtype=torch.uint8, device="cpu"),
        )
        host.exchange([(own, after, "turn")], [(theirs, before, "turn")]).wait()
        heard = theirs.numpy().tobytes()
        if heard == told:
            return
        other = "the same, after other collectives" if heard[8:] == told[8:] else heard[8:].decode().rstrip()
        error = RankDisagreement(
            f"models share a communicator along {host.axis}, and ranks use it in different orders. Rank {rank} is"
            f" about to issue {upcoming}, rank {before} {other}.\n"
            "  Run the models' forwards, backwards and steps in the same order on all ranks."
        )
        if host.watch is not None:
            host.watch.tell(error)
        raise error
