"""Counting the storages that tensors live in, from outside: every operation is seen by a dispatch mode."""

from __future__ import annotations

import gc
import weakref
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class StorageCount(TorchDispatchMode):
    """Bytes of tensors that live inside a ``with`` block, and the most of them at once.

    Every operation is seen by a dispatch mode. A storage counts once, however many tensors show it, from when it is
    first seen until it is freed, and with its new size where it is resized in place::

        count = StorageCount("cpu")
        count.see_all_objects()  # what lives already; else only what the block touches is counted
        before = count.live_bytes
        with count:
            model(x).sum().backward()
        print(count.live_bytes - before, count.peak_bytes - before)
        count.forget()

    What is allocated below torch's dispatcher is not seen. Operations take about half as long again.

    Args:
        device_type: Of the tensors that count.
        sees_arguments: Also look at what operations are given. Not needed where everything that lived before was shown
            by :meth:`see_all_objects`: whatever comes later is the result of an operation.

    Attributes:
        live_bytes: What lives now.
        peak_bytes: The most since the count or :meth:`begin_peak` began.
    """

    def __init__(self, device_type: str, *, sees_arguments: bool = True) -> None:
        super().__init__()
        self._sees_arguments = sees_arguments
        self.device_type = device_type
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._watches: dict[int, weakref.finalize] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tree in (args, result) if self._sees_arguments else (result,):
            for value in tree_iter(tree):
                if isinstance(value, torch.Tensor):
                    self.see(value)
        return result

    def __enter__(self) -> Self:
        """Begin to count."""
        self._resize = resize = torch.UntypedStorage.resize_  # it does not pass through the dispatcher

        def resize_and_see(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage.device.type == self.device_type:
                self._note(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_see  # pyrefly: ignore[bad-assignment]
        return super().__enter__()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        """Stop counting."""
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(exc_type, exc_val, exc_tb)

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
        self._note(storage)

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()  # noqa: SLF001  the storage's identity; it has no public name
        known = self._sizes.get(key)
        if known is None:
            self._watches[key] = weakref.finalize(storage, self._freed, key)
        if known != size:
            self._sizes[key] = size
            self.live_bytes += size - (known or 0)
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def begin_peak(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes = self.live_bytes

    def forget(self) -> None:
        """Stop watching storages."""
        for watch in self._watches.values():
            watch.detach()
        self._watches.clear()
        self._sizes.clear()

    def _freed(self, key: int) -> None:
        self._watches.pop(key, None)
        self.live_bytes -= self._sizes.pop(key, 0)
