"""Bytes of tensors that an engine holds, counted from outside, by what passes through the dispatcher.

Counting begins before the model is built, so that every storage is known, and takes the peak over steps of the steady
state. What a backend allocates below the dispatcher (Gloo's own temporaries) is not seen; resident memory has it.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, is_traceable_wrapper_subclass_type

from shardwise.recipe.storage import StorageCount


class TensorCount(StorageCount):
    """Also looks inside tensor subclasses (DTensor), and follows storages that are resized in place (FSDP)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # the subclass computes with plain tensors, and those come here
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __enter__(self) -> Self:
        """Begin to count."""
        self._resize = torch.UntypedStorage.resize_
        count, resize = self, self._resize

        def resize_and_see(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            count._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_see  # pyrefly: ignore[bad-assignment]
        super().__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        """Stop counting."""
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(exc_type, exc_val, exc_tb)

    def see(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor`` once, or those of the tensors that it is made of."""
        if is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                self.see(getattr(tensor, name))
            return
        super().see(tensor)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == self.device_type:
            self.see(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
