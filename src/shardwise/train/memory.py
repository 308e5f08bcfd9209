"""The most bytes of tensors that a process holds at once.

CUDA counts them. On CPU nothing does, so while a :class:`PeakTensorBytes` is open every operation is seen by a dispatch
mode: storages are counted when they first appear and taken off when they are freed. Two views of a storage count once;
meta tensors count nothing. This slows a step by about half, so the loop opens it for the first steps only, which reach
the peak: allocations are the same in every later step.
"""

from __future__ import annotations

import gc
import weakref
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class PeakTensorBytes:
    """Measure the peak of tensor bytes between entry and exit.

    Attributes:
        peak_bytes: The most that was held at once, what was held at entry included.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = 0
        self._mode: StorageCount | None = None

    def __enter__(self) -> Self:
        """Begin to count."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._mode = StorageCount(self.device.type)
            self._mode.see_all_objects()
            self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop counting."""
        if self._mode is None:
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device)
            return
        self._mode.__exit__(kind, error, trace)
        self.peak_bytes = self._mode.peak_bytes
        self._mode.forget()
        self._mode = None


class StorageCount(TorchDispatchMode):
    """Counts distinct live storages of one device type."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._watches: dict[int, weakref.finalize] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tree in (args, result):
            for value in tree_iter(tree):
                if isinstance(value, torch.Tensor):
                    self.see(value)
        return result

    def see_all_objects(self) -> None:
        """Count what lives already, as far as Python holds it."""
        for held in gc.get_objects():
            if issubclass(type(held), torch.Tensor):  # isinstance would ask, and so wake, lazy proxies
                self.see(held)

    def see(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor`` once."""
        if tensor.device.type != self.device_type:
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # sparse and other tensors without a storage
        key, size = storage._cdata, storage.nbytes()  # noqa: SLF001  the storage's identity; it has no public name
        known = self._sizes.get(key)
        if known is None:
            self._watches[key] = weakref.finalize(storage, self._freed, key)
        if known != size:
            self._sizes[key] = size
            self.live_bytes += size - (known or 0)
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def forget(self) -> None:
        """Stop watching storages."""
        for watch in self._watches.values():
            watch.detach()
        self._watches.clear()
        self._sizes.clear()

    def _freed(self, key: int) -> None:
        self._watches.pop(key, None)
        self.live_bytes -= self._sizes.pop(key, 0)
