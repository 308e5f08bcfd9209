"""Buffers that a model stores in another dtype than the dtype in which they are saved."""

from __future__ import annotations

import torch
from torch import nn

#: Name of a module's attribute with the dtypes that its buffers had before they were cast.
_BUFFER_DTYPES = "_shardwise_buffer_dtypes"


def cast_buffer(module: nn.Module, key: str, dtype: torch.dtype) -> None:
    """Cast a buffer to ``dtype``; state dicts and checkpoints keep the dtype that it had before its first cast."""
    buffer = module.get_buffer(key)
    module.__dict__.setdefault(_BUFFER_DTYPES, {}).setdefault(key, buffer.dtype)
    setattr(module, key, buffer.to(dtype))


def saved_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """The dtypes of buffers in state dicts and checkpoints, by name, where ``buffer_dtype`` has cast the buffers."""
    return {
        f"{path}.{key}" if path else key: dtype
        for path, module in model.named_modules(remove_duplicate=False)
        for key, dtype in module.__dict__.get(_BUFFER_DTYPES, {}).items()
    }
