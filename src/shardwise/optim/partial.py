"""The gradient of a shard, which refuses calls that would return one rank's number: norms, checks for inf and nan.

Torch has no hook before ``torch.nn.utils.clip_grad_norm_`` or ``torch.amp.GradScaler`` read a gradient. So every
gradient of which this rank has a part is a :class:`PartialGradient`. It computes as a plain tensor does, and raises
when it is an argument of such a call. ``docs/adr/0011`` has the alternatives.

A call on it costs about a microsecond more than on a plain tensor. So optimizers, which call once or more for each
parameter, see the plain tensors during their step (:func:`uncover`, :func:`cover`).
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise import torch_private
from shardwise.forms.flat_parameters import FlatParameter
from shardwise.spec.errors import StateError

_NORMS = frozenset(
    {
        torch.norm,
        torch.linalg.norm,
        torch.linalg.vector_norm,
        torch.linalg.matrix_norm,
        torch.Tensor.norm,
        torch_private.foreach_norm,
    }
)
_CHECKS = frozenset({torch_private.unscale_gradients})

_is_allowed: Callable[[], bool] | None = None


def allow(is_allowed: Callable[[], bool] | None) -> Callable[[], bool] | None:
    """Take norms of one rank's part for what is wanted while ``is_allowed()``; returns what was given before."""
    global _is_allowed
    before, _is_allowed = _is_allowed, is_allowed
    return before


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Inside, norms of one rank's part are what the caller wants: they are added up over the ranks."""
    before = allow(lambda: True)
    try:
        yield
    finally:
        allow(before)


class PartialGradient(Tensor):
    """A part of a gradient. Results computed from it are plain tensors.

    Attributes:
        plain: The plain tensor that it shares its memory with.
    """

    is_sparse = False  # asked by optimizers that see it (with a closure); found here, the question costs nothing
    plain: Tensor

    @classmethod
    def of(cls, gradient: Tensor) -> Tensor:
        """The same memory."""
        made = gradient.as_subclass(cls)
        made.plain = gradient
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuse what needs the other parts as well."""
        if (func in _NORMS or func in _CHECKS) and not (_is_allowed is not None and _is_allowed()):
            raise StateError(_refusal(func))
        return torch_private.as_plain(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(proto)


def plain_of(gradient: Tensor) -> Tensor:
    """The plain tensor of a part of a gradient; any other tensor as it is."""
    return gradient.plain if type(gradient) is PartialGradient else gradient


#: What :func:`uncover` has replaced, by optimizer: parameter, plain tensor, part.
_covered: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[tuple[Tensor, Tensor, Tensor]]] = (
    weakref.WeakKeyDictionary()
)


def uncover(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer see plain tensors in place of its parameters' partial gradients."""
    found = _covered[optimizer] = []
    for settings in optimizer.param_groups:
        for parameter in settings["params"]:
            if isinstance(parameter, FlatParameter):
                continue  # one for many parameters, and setting its gradient would copy
            grad = parameter.grad
            if type(grad) is PartialGradient:
                parameter.grad = grad.plain
                found.append((parameter, grad.plain, grad))


def cover(optimizer: torch.optim.Optimizer) -> None:
    """Undo :func:`uncover`, where the gradients are still those."""
    for parameter, plain, part in _covered.pop(optimizer, ()):
        if parameter.grad is plain:
            parameter.grad = part


def _refusal(func: Callable[..., Any]) -> str:
    if func in _CHECKS:
        return (
            "torch.amp.GradScaler on a parallelized model: each rank would look for inf and nan in its own part of the"
            " gradients, and ranks that find none would step while others skip.\n"
            "  Use sw.GradScaler(), which takes the same arguments."
        )
    return (
        "the norm of a gradient (torch.nn.utils.clip_grad_norm_, p.grad.norm()) on a parallelized model: this rank"
        " holds a part of the gradients, so every rank would get a number of its own.\n"
        "  Call norm = sw.clip_grad_norm(model, max_norm); with max_norm=float('inf') it changes nothing. Where a"
        " trainer clips by itself, switch that off and call it before optimizer.step()."
    )
