"""Reusable storage: slots for gathered parameters, buffers for gradients on their way to a reduction.

Nothing here is freed or allocated in the steady state, unless the plan says ``keep_buffers=False``: then the memory of
a slot or buffer that nobody uses is given back to torch's allocator, and allocated again for its next use. A unit keeps
its slot as long as a backward of it is to come: a tensor that autograd saved in forward finds its own data again.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.spec.memory.footprint import slots_per_class as default_slots

if TYPE_CHECKING:
    from shardwise.engine.group import Group


class Slot:
    """Storage for one gathered group at a time.

    Attributes:
        numel: Its elements: those of the largest group.
        buffer: The storage. Where it is not kept, it has memory for its owner alone.
        members: Groups that share it; 0 where it belongs to one.
        is_kept: It stays allocated; else only while it has an owner. Views of it stay good.
    """

    __slots__ = ("_owner", "buffer", "is_kept", "members", "numel")

    def __init__(self, *, is_kept: bool = True) -> None:
        self.numel = 0
        self.is_kept = is_kept
        self._owner: weakref.ref[Group] | None = None
        self.buffer: Tensor | None = None
        self.members = 0

    @property
    def owner(self) -> Group | None:
        """The group whose parameters lie in it now."""
        return self._owner() if self._owner is not None else None

    @owner.setter
    def owner(self, group: Group | None) -> None:
        self._owner = weakref.ref(group) if group is not None else None
        if self.is_kept or self.buffer is None:
            return
        if group is None:
            free(self.buffer)
        else:
            restore(self.buffer, group.layout.numel)

    def allocate(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The storage, allocated at the first call; its first gather touches it."""
        if self.buffer is None:
            self.buffer = torch.empty(self.numel, dtype=dtype, device=device)
        return self.buffer


def free(buffer: Tensor) -> None:
    """Give the memory of ``buffer`` back to torch's allocator. The tensor and its views stay, without content."""
    buffer.untyped_storage().resize_(0)


def restore(buffer: Tensor, numel: int) -> None:
    """Have memory for ``numel`` elements of ``buffer`` again, with any content, where it was freed."""
    storage, num_bytes = buffer.untyped_storage(), numel * buffer.itemsize
    if storage.nbytes() < num_bytes:
        storage.resize_(num_bytes)


class SlotPool:
    """The slots of a model: ``slots_per_class`` for each class of groups, dealt out in turn.

    Depth, size class, dtype, trainability and whether they are experts make a class (``build``); with a number of slots
    in the plan sizes do not, and a slot is as large as the largest of its groups. Depth is in it so that
    a unit never shares a slot with one that encloses it: both are live at once. So are units in a recomputed module:
    a class has at least as many slots as such a module has groups of it.
    """

    def __init__(self, slots_per_class: int = default_slots(), *, keeps: bool = True) -> None:
        self.slots_per_class = slots_per_class
        self._keeps = keeps
        self.slots: list[Slot] = []
        self.num_grown = 0
        self.num_wrong_prefetches = 0
        self._classes: dict[Hashable, list[Slot]] = {}
        self._limits: dict[Hashable, int] = {}
        self._dealt: dict[Hashable, int] = {}

    def reserve(self, key: Hashable, count: int) -> None:
        """See to it that ``count`` groups that are assigned one after the other have slots of their own."""
        self._limits[key] = max(count, self._limits.get(key, self.slots_per_class))

    def assign(self, key: Hashable, numel: int, *, is_shared: bool) -> Slot:
        """The slot for a group of ``numel`` gathered elements; its own one unless ``is_shared``."""
        if not is_shared:
            return self._new(numel)
        turn = self._dealt.get(key, 0)
        self._dealt[key] = turn + 1
        slots = self._classes.setdefault(key, [])
        limit = self._limits.get(key, self.slots_per_class)
        if len(slots) < limit:
            slots.append(self._new(0))
        slot = slots[turn % limit]
        slot.numel = max(slot.numel, numel)
        slot.members += 1
        return slot

    def hold(self, buffer: Tensor) -> Slot:
        """A slot that is storage which is there anyway."""
        slot = self._new(buffer.numel())
        slot.is_kept = True
        slot.buffer = buffer
        return slot

    def grow(self, numel: int) -> Slot:
        """A further slot, because more units turned out to be live at once than the class has slots."""
        self.num_grown += 1
        return self._new(numel)

    def _new(self, numel: int) -> Slot:
        slot = Slot(is_kept=self._keeps)
        slot.numel = numel
        self.slots.append(slot)
        return slot


class GradientPool:
    """Full-size gradient buffers that groups borrow from their first gradient until their reduction is done.

    Args:
        limit: Buffers of one key (size class, dtype, experts or not). A group that needs one while all are on their way
            waits for the oldest reduction; if none is on its way (an enclosing unit, or local accumulation, holds them)
            the pool grows.
        drain: Finishes the oldest reduction under way; returns False if there is none.
        keeps: Buffers that nobody uses stay allocated.
    """

    def __init__(self, limit: int, drain: Callable[[], bool], *, keeps: bool = True) -> None:
        self.limit = limit
        self.keeps = keeps
        self._drain = weakref.WeakMethod(drain)  # it is a method of whoever holds this pool
        self._sizes: dict[Hashable, int] = {}
        self._free: dict[Hashable, deque[Tensor]] = {}
        self._constants: dict[Hashable, Tensor | None] = {}
        self.num_buffers: dict[Hashable, int] = {}

    def constant(self, key: Hashable, make: Callable[[], Tensor | None]) -> Tensor | None:
        """A small tensor that never changes, made at the first call and shared by all who name the same key."""
        if key not in self._constants:
            self._constants[key] = make()
        return self._constants[key]

    def announce(self, key: Hashable, numel: int) -> None:
        """Tell the pool, before the first step, that a group of this class needs buffers of ``numel`` elements."""
        self._sizes[key] = max(self._sizes.get(key, 0), numel)

    def take(self, key: Hashable, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of at least the announced number of elements. Its content is whatever the last user left."""
        unused = self._free.setdefault(key, deque())
        drain = self._drain()
        while not unused and self.num_buffers.get(key, 0) >= self.limit and drain is not None and drain():
            pass
        if unused:
            buffer = unused.popleft()
            restore(buffer, buffer.numel())
            return buffer
        self.num_buffers[key] = self.num_buffers.get(key, 0) + 1
        return torch.zeros(self._sizes[key], dtype=dtype, device=device)

    def give(self, key: Hashable, buffer: Tensor) -> None:
        """Return a buffer. The newest comes out first: it is the one that the caches hold."""
        if not self.keeps:
            free(buffer)
        self._free[key].appendleft(buffer)

    @property
    def total_bytes(self) -> int:
        """Bytes of the buffers that lie in the pool now."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self.unused)

    @property
    def unused(self) -> list[Tensor]:
        """The buffers that lie in the pool now."""
        return [buffer for buffers in self._free.values() for buffer in buffers]
