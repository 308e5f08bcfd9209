"""Counts the bytes that operators write: work that is done twice changes no number, and no other test sees it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shardwise.torch_private import TorchDispatchMode

#: Operators that only make or move a tensor's description.
_FREE = ("empty", "new_empty", "set_", "detach", "view", "_unsafe_view", "resize_")


class Written(TorchDispatchMode):
    """Counts calls, and bytes of floating point that they write, by the operator's name without its overload."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        name = operator._schema.name.removeprefix("aten::")
        if operator.is_view or name.startswith(_FREE):
            return result
        changed = args[0] if result is None and args else result  # lists are changed in place
        tensors = [t for t in tree_leaves(changed) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        if tensors:
            self.calls[name] += 1
            self.bytes[name] += sum(tensor.nbytes for tensor in tensors)
        return result
