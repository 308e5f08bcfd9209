"""What ``.grad`` is while sums of accumulated microbatches wait for their reduction: a tensor without memory.

torch calls nobody when a gradient is zeroed. So while the sum of a parameter waits elsewhere, its ``.grad`` is a
:class:`WaitingGradient`. Where another object, or ``None``, has taken its place by the next backward, ``zero_grad()``
was called, and the sum is dropped. Whatever reads a :class:`WaitingGradient` raises: the true value is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from shardwise import torch_private
from shardwise.spec.errors import StateError


class WaitingGradient(Tensor):
    """The gradient of a parameter whose sum is not there yet. It can be zeroed, replaced or removed, but not read."""

    __torch_function__ = torch_private.disabled_torch_function
    zero: Callable[[], None]

    @classmethod
    def of(cls, parameter: Tensor, zero: Callable[[], None]) -> WaitingGradient:
        """A gradient of the parameter's shape, dtype and device, without memory.

        Args:
            parameter: The parameter. The result does not keep it alive.
            zero: Called when the gradient is zeroed in place. It must not keep the parameter alive.
        """
        made: WaitingGradient = torch_private.empty_subclass(cls, parameter)
        made.zero = zero
        return made

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override] - torch's own stub has no defaults
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        """Let the gradient be zeroed, also through ``.data``, and refuse all else.

        Raises:
            StateError: Something else is called.
        """
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.zero_.default or func is torch_private.foreach_zero:
            for gradient in [args[0]] if isinstance(args[0], Tensor) else args[0]:
                if isinstance(gradient, WaitingGradient):
                    gradient.zero()
                else:
                    gradient.zero_()
            return args[0]
        raise StateError(
            f"{func} of a gradient that is not there yet: sums of accumulated microbatches wait for their reduction"
            " over the ranks.\n"
            "  Use .grad after a backward outside of sw.gradient_sync(model, False); zero_grad() drops the sums."
        )

    def __repr__(self) -> str:  # pyrefly: ignore[bad-override]
        return f"WaitingGradient(shape={list(self.shape)}, dtype={self.dtype})"
