"""Memory in the detector: ranges of bytes, with their last reads and writes."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from shardwise.testing.streams.clocks import Agent
from shardwise.testing.streams.stacks import Stack


class Side(Enum):
    """The location of memory: device, or pinned or pageable host memory."""

    DEVICE = "device memory"
    PINNED = "pinned host memory"
    HOST = "pageable host memory"


@dataclass(slots=True)
class Access:
    """One read or write of the bytes from ``low`` to ``high``.

    Attributes:
        agent: The stream or thread that made the access.
        time: The agent's time.
        operation: Name of the operation.
        where: The stack.
    """

    agent: Agent
    time: int
    is_write: bool
    low: int
    high: int
    operation: str
    where: Stack

    def conflicts(self, other: Access) -> bool:
        """Whether the order of the two accesses matters: they overlap, and one of them is a write."""
        return (self.is_write or other.is_write) and other.low < self.high and self.low < other.high

    def covers(self, other: Access) -> bool:
        """Whether this access includes all bytes of ``other``."""
        return self.low <= other.low and other.high <= self.high


class Owner(Protocol):
    """An object that is notified when memory is freed."""

    def on_deletion(self, memory: Memory) -> None:
        """Note that the memory's storage was deleted."""


class Memory:
    """One allocation, the memory of a storage.

    The storage has the only reference to this object, so its deletion shows that the memory is freed.

    Attributes:
        side: Location of the memory.
        home: The stream on which the memory was allocated; ``None`` on the host.
        num_bytes: Size in bytes.
        made: Stack of the allocation.
        owner: Notified when the memory is freed; ``None``: no notification.
        accesses: The accesses that may conflict with a later one.
        recorded: Streams passed to ``Tensor.record_stream``.
    """

    __slots__ = ("__weakref__", "accesses", "home", "made", "num_bytes", "owner", "recorded", "side")

    def __init__(self, side: Side, home: Agent | None, num_bytes: int, made: Stack, owner: Owner | None) -> None:
        self.side, self.home, self.num_bytes, self.made, self.owner = side, home, num_bytes, made, owner
        self.accesses: list[Access] = []
        self.recorded: set[Agent] = set()

    def __del__(self) -> None:
        if self.owner is not None:
            self.owner.on_deletion(self)

    def add(self, access: Access) -> list[Access]:
        """Note an access, and return earlier accesses that conflict with it and may run at the same time.

        An access that a later, ordered write covers is dropped, because work after the write is also after the access.
        """
        agent, found, remaining = access.agent, [], []
        for other in self.accesses:
            is_same_range = (other.low, other.high) == (access.low, access.high)
            if access.conflicts(other):
                if not agent.has_seen(other.agent, other.time):
                    found.append(other)
                elif access.is_write and access.covers(other):
                    continue
            if other.agent is agent and other.is_write == access.is_write and is_same_range:
                continue
            remaining.append(other)
        remaining.append(access)
        self.accesses = remaining
        return found


def extent(tensor: Tensor) -> tuple[int, int]:
    """The range of bytes in the storage from the first to the last element of a non-empty tensor."""
    width = tensor.element_size()
    low = int(tensor.storage_offset()) * width
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + (last + 1) * width


class Target:
    """A place for a later result. It does not keep the memory alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._dtype, self._offset = tensor.dtype, int(tensor.storage_offset())
        self._shape, self._stride = tensor.shape, tensor.stride()

    def is_in(self, storage: torch.UntypedStorage) -> bool:
        """Whether the place is in this storage."""
        return self._storage() is storage

    def write(self, value: Tensor) -> None:
        """Write the result, unless the memory was freed, which the detector has reported as an early free."""
        storage = self._storage()
        if storage is None or storage.nbytes() < (self._offset + self._shape.numel()) * self._dtype.itemsize:
            return
        found = torch.empty(0, dtype=self._dtype).set_(storage, self._offset, self._shape, self._stride)
        found.copy_(value.view(self._shape))
