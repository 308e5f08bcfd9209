"""Comparison between ranks of the order in which Comms of several models use one communicator.

NCCL matches collectives only by their order. Models over the same ranks share a communicator for each purpose
(``comm.axes``), so ranks that run two models in different orders would exchange wrong data without an error.
Collectives are therefore numbered by communicator, and the ranks compare their issued collectives whenever another
model than the last one is about to use it. A communicator of a single model compares nothing.
"""

from __future__ import annotations

import zlib

import torch

from shardwise.comm.gloo import GlooComm
from shardwise.comm.stall import Stamp
from shardwise.spec.errors import RankDisagreement

#: Bytes of the message from a rank to the next one: a digest, and a description of the collective.
_NUM_BYTES = 256


class IssueOrder:
    """The operations that this process has issued on one communicator."""

    def __init__(self) -> None:
        self.num_comms = 0  # Comms opened on the communicator so far: the same number on every rank
        self.num_issued: dict[str, int] = {}  # number of collectives and messages, by channel
        #: The stream of all of them; torch has only 32 streams.
        self.stream: torch.cuda.Stream | None = None
        self._last_comm: str | None = None  # the Comm that issued the last collective
        self._digest = 0  # digest of all collectives since the second Comm was opened

    def record(self, comm: str, host: GlooComm, stamp: Stamp) -> None:
        """Record that the Comm ``comm`` is about to issue a collective.

        Raises:
            RankDisagreement: Ranks use the communicator in different orders.

        Collective:
            If another Comm issued the last collective: 256 bytes over ``host`` from each rank to the next one, whose
            host waits. Otherwise none.
        """
        if self.num_comms < 2:
            return  # every rank's second Comm is opened after the same collectives
        stamp.unit += f" of {comm}"
        if comm != self._last_comm and host.size > 1:
            self._compare(host, f"{stamp.kind} of unit {stamp.unit}")
        self._last_comm = comm
        text = f"{stamp.kind} {stamp.unit} {stamp.numel} {stamp.dtype}"
        self._digest = zlib.crc32(text.encode(), self._digest)

    def _compare(self, host: GlooComm, upcoming: str) -> None:
        rank, previous, following = host.rank, (host.rank - 1) % host.size, (host.rank + 1) % host.size
        own_text = f"{self._digest:08x}{upcoming}".encode()[:_NUM_BYTES].ljust(_NUM_BYTES)
        own, theirs = (
            torch.frombuffer(bytearray(own_text), dtype=torch.uint8),
            torch.empty(_NUM_BYTES, dtype=torch.uint8, device="cpu"),
        )
        host.exchange([(own, following, "turn")], [(theirs, previous, "turn")]).wait()
        received = theirs.numpy().tobytes()
        if received == own_text:
            return
        other = "the same, after other collectives" if received[8:] == own_text[8:] else received[8:].decode().rstrip()
        error = RankDisagreement(
            f"models share a communicator along {host.axis}, and ranks use it in different orders. Rank {rank} is"
            f" about to issue {upcoming}, rank {previous} {other}.\n"
            "  Run the models' forwards, backwards and steps in the same order on all ranks."
        )
        if host.watch is not None:
            host.watch.publish_verdict(error)
        raise error
