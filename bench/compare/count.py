"""Bytes of tensors that an engine holds, counted from outside, by what passes through the dispatcher.

Counting begins before the model is built, so that every storage is known, and takes the peak over steps of the steady
state. What a backend allocates below the dispatcher (Gloo's own temporaries) is not seen; resident memory has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, is_traceable_wrapper_subclass_type

from shardwise.measure.storage import StorageCount


class TensorCount(StorageCount):
    """Also looks inside tensor subclasses (DTensor)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # the subclass computes with plain tensors, and those come here
        return super().__torch_dispatch__(func, types, args, kwargs)

    def see(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor`` once, or those of the tensors that it is made of."""
        if is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                self.see(getattr(tensor, name))
            return
        super().see(tensor)
