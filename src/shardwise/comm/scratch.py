"""Buffers into which sums receive what their peers send, kept from one sum to the next."""

from __future__ import annotations

import bisect

import torch
from torch import Tensor


class Scratch:
    """The receive buffers of one Comm that are free, by dtype, smallest first.

    A buffer serves every sum that it is large enough for. As reductions follow one another, one buffer per dtype is
    left, as large as the largest sum (``spec.memory.footprint`` counts on that).
    """

    def __init__(self) -> None:
        self._free: dict[torch.dtype, list[Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The smallest free buffer of at least ``numel`` elements; else a new one, in the place of the largest."""
        free = self._free.setdefault(dtype, [])
        index = bisect.bisect_left(free, numel, key=Tensor.numel)
        if index < len(free):
            return free.pop(index)
        if free:
            free.pop()
        return torch.empty(numel, dtype=dtype, device=device)

    def give(self, buffer: Tensor) -> None:
        """Return a buffer that :meth:`take` gave out."""
        bisect.insort(self._free[buffer.dtype], buffer, key=Tensor.numel)

    def clear(self) -> None:
        """Forget all buffers."""
        self._free.clear()

    @property
    def free(self) -> list[Tensor]:
        """The buffers that are free now."""
        return [buffer for buffers in self._free.values() for buffer in buffers]

    @property
    def num_bytes(self) -> int:
        """Bytes of those."""
        return sum(buffer.nbytes for buffer in self.free)


def is_apart(out: Tensor, own: Tensor) -> bool:
    """A sum goes to ``out``, which is not this rank's own term: a peer's slice can be received there."""
    return _place(out) != _place(own)


def _place(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage._cdata, int(tensor.storage_offset())  # noqa: SLF001 - addresses of meta tensors are all 0
