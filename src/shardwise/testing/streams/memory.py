"""Memory as the detector sees it: ranges of bytes, and who has last read and written them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from shardwise.testing.streams.clocks import Agent
from shardwise.testing.streams.places import Stack


class Side(Enum):
    """On which side of the bus memory lies."""

    DEVICE = "device memory"
    PINNED = "pinned host memory"
    HOST = "pageable host memory"


@dataclass(slots=True)
class Access:
    """One read or write of the bytes from ``low`` to ``high``.

    Attributes:
        time: When ``agent`` did it, by its own count.
        operation: What was done, in words.
    """

    agent: Agent
    time: int
    is_write: bool
    low: int
    high: int
    operation: str
    where: Stack

    def conflicts(self, other: Access) -> bool:
        """Whether the order of the two matters: they overlap, and one of them writes."""
        return (self.is_write or other.is_write) and other.low < self.high and self.low < other.high

    def covers(self, other: Access) -> bool:
        """Whether all bytes of ``other`` are among these."""
        return self.low <= other.low and other.high <= self.high


class Owner(Protocol):
    """Whoever wants to know which memory is freed."""

    def died(self, memory: Memory) -> None:
        """The memory's storage is gone."""


class Memory:
    """One allocation: what the storage of tensors lies in.

    It belongs to its storage, and dies with it: that is the moment in which the memory is freed.

    Attributes:
        side: Where it lies.
        home: The stream that it was allocated on; ``None`` on the host.
        num_bytes: Its size.
        made: Where it was allocated.
        owner: Told when the memory is freed; ``None``: nobody.
        accesses: The accesses that a later one may conflict with.
        recorded: Streams that ``Tensor.record_stream`` has named.
    """

    __slots__ = ("__weakref__", "accesses", "home", "made", "num_bytes", "owner", "recorded", "side")

    def __init__(self, side: Side, home: Agent | None, num_bytes: int, made: Stack, owner: Owner | None) -> None:
        self.side, self.home, self.num_bytes, self.made, self.owner = side, home, num_bytes, made, owner
        self.accesses: list[Access] = []
        self.recorded: set[Agent] = set()

    def __del__(self) -> None:
        if self.owner is not None:
            self.owner.died(self)

    def add(self, access: Access) -> list[Access]:
        """Note an access. Returns earlier ones that conflict with it and may run at the same time.

        An access that a later write covers is forgotten: whoever is ordered behind the write is ordered behind it too.
        """
        agent, found, kept = access.agent, [], []
        for other in self.accesses:
            is_same_range = (other.low, other.high) == (access.low, access.high)
            if access.conflicts(other):
                if not agent.has_seen(other.agent, other.time):
                    found.append(other)
                elif access.is_write and access.covers(other):
                    continue
            if other.agent is agent and other.is_write == access.is_write and is_same_range:
                continue
            kept.append(other)
        kept.append(access)
        self.accesses = kept
        return found


def extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage from the first to the last element of a tensor that has elements."""
    width = tensor.element_size()
    low = int(tensor.storage_offset()) * width
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + (last + 1) * width


class Target:
    """A place for a result that is still to come. It does not keep the memory alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._dtype, self._offset = tensor.dtype, int(tensor.storage_offset())
        self._shape, self._stride = tensor.shape, tensor.stride()

    def is_in(self, storage: torch.UntypedStorage) -> bool:
        """Whether the place is in this storage."""
        return self._storage() is storage

    def write(self, value: Tensor) -> None:
        """Put the result there, unless the memory is gone: the detector has reported that as an early free."""
        storage = self._storage()
        if storage is None or storage.nbytes() < (self._offset + self._shape.numel()) * self._dtype.itemsize:
            return
        found = torch.empty(0, dtype=self._dtype).set_(storage, self._offset, self._shape, self._stride)
        found.copy_(value.view(self._shape))
