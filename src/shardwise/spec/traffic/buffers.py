"""What keeping a model's buffers equal over the ranks sends and holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.spec.precision import item_bytes
from shardwise.spec.traffic.data import Collective

#: What ``sync_buffers`` may be. ``auto``: those that are saved with the model are broadcast.
BUFFER_SYNCS = ("auto", "broadcast", "mean", "none")

#: The unit that these collectives are said to serve.
BUFFERS = "buffers"


@dataclass(frozen=True)
class BufferMessage:
    """The buffers of one dtype, in one flat message.

    Attributes:
        dtype: Of the buffers; ``bool`` travels as bytes.
        numel: Elements of all of them.
        is_averaged: After the broadcast, the mean difference from what was sent is all-reduced.
    """

    dtype: str
    numel: int
    is_averaged: bool = False

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES.get(self.dtype) or item_bytes(self.dtype)


#: Dtypes that buffers have and parameters do not.
_ITEM_BYTES = {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "complex64": 8, "complex128": 16}


def sync_trace(messages: Sequence[BufferMessage], *, rank: int, size: int, axis: str = "dp_shard") -> list[Collective]:
    """The collectives of one sync on ``rank`` of ``axis``, with rank 0 as the root."""
    trace = []
    for message in messages:
        sent = message.numel * (size - 1) if rank == 0 else 0
        trace.append(Collective("broadcast", BUFFERS, sent * message.item_bytes, axis))
        if message.is_averaged:
            own = _own_numel(message.numel, rank, size)
            sent = message.numel - own + own * (size - 1)
            trace.append(Collective("all_reduce", BUFFERS, sent * message.item_bytes, axis))
    return trace


def held_bytes(messages: Sequence[BufferMessage], *, rank: int, size: int, has_receive_buffers: bool) -> int:
    """Bytes of the flat messages, which persist, and of what sums are received into."""
    total = 0
    for message in messages:
        numel = message.numel
        if message.is_averaged:
            numel += message.numel
            numel += _own_numel(message.numel, rank, size) * (size - 1) if has_receive_buffers else 0
        total += numel * message.item_bytes
    return total


def _own_numel(numel: int, rank: int, size: int) -> int:
    return (rank + 1) * numel // size - rank * numel // size
