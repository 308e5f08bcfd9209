"""The second half of a backward: gradients of weights that are computed after those of a stage's inputs.

Of every linear layer the gradient of its input is given at once, for the stage before waits for it. The gradients of
its weight and bias need only what went into the layer and the gradient of what came out: both are kept until a schedule
has time. Whatever else has parameters (norms, embeddings) is done with the input.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class WeightGradients:
    """What is left to be done of one microbatch on one stage."""

    def __init__(self) -> None:
        self._terms: dict[int, tuple[Tensor, list[tuple[Tensor, Tensor | None]]]] = {}

    def keep(self, parameter: Tensor, left: Tensor, right: Tensor | None = None) -> None:
        """The gradient of ``parameter`` has the term ``left @ right``, or the sum of the rows of ``left`` alone."""
        self._terms.setdefault(id(parameter), (parameter, []))[1].append((left, right))

    def compute(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Add gradients to the parameters' ``.grad``: terms of one first, as autograd adds them.

        Args:
            parameters: Whose; ``None``: of all that are left.
        """
        keys = [*reversed(self._terms)] if parameters is None else [id(parameter) for parameter in parameters]
        for key in keys:
            if key not in self._terms:
                continue
            parameter, pairs = self._terms.pop(key)
            total = _term(*pairs[0])
            for pair in pairs[1:]:
                total += _term(*pair)
            parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)


def _term(left: Tensor, right: Tensor | None) -> Tensor:
    return left.sum(0) if right is None else left.mm(right)


class Deferral:
    """Computes linear layers, and leaves what it can to :class:`WeightGradients` where some are being collected.

    Args:
        modules: The linear layers among them compute by it from now on.

    Attributes:
        current: Of the microbatch and stage that computes now; ``None``: gradients are autograd's.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.current: WeightGradients | None = None
        for module in modules:
            if "forward" not in module.__dict__ and (_is_linear(module) or _is_transposed(module)):
                module.__dict__["forward"] = _LinearForward(self, module)

    @contextlib.contextmanager
    def to(self, collects: WeightGradients | None) -> Iterator[None]:
        """Have what is computed inside collect there."""
        self.current = collects
        try:
            yield
        finally:
            self.current = None

    def linear(self, given: Tensor, weight: Tensor, bias: Tensor | None, *, is_transposed: bool) -> Tensor:
        """A linear layer: ``weight`` is (outputs, inputs), or (inputs, outputs)."""
        collects = self._collects(weight, given.device)
        if collects is None or not (bias is None or bias.is_leaf):
            return _linear(given, weight, bias, is_transposed)
        return _Linear.apply(given, weight, bias, _How(collects, is_transposed))

    def add(self, output: Tensor, bias: Tensor) -> Tensor:
        """A bias that is added after the layer, in place."""
        collects = self._collects(bias, output.device)
        return output.add_(bias) if collects is None else _Add.apply(output, bias, collects)

    def _collects(self, parameter: Tensor, device: torch.device) -> WeightGradients | None:
        """What takes the gradient of ``parameter``; ``None``: autograd, which knows what is computed from others."""
        is_ready = torch.is_grad_enabled() and parameter.requires_grad and parameter.is_leaf
        return self.current if is_ready and not _is_autocast(device) else None


def _linear(given: Tensor, weight: Tensor, bias: Tensor | None, is_transposed: bool) -> Tensor:  # noqa: FBT001 - private
    if not is_transposed:
        return F.linear(given, weight, bias)
    rows = given.reshape(-1, given.shape[-1])
    made = rows.mm(weight) if bias is None else torch.addmm(bias, rows, weight)
    return made.view(*given.shape[:-1], weight.shape[1])


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward


def _is_transposed(module: nn.Module) -> bool:
    """Transformers' ``Conv1D``, which holds the transpose of a linear layer's weight."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def _is_autocast(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


class _LinearForward:
    """Stands for the ``forward`` of a linear layer."""

    def __init__(self, deferral: Deferral, module: nn.Module) -> None:
        self._deferral = deferral
        self._module = weakref.ref(module)
        self._is_transposed = _is_transposed(module)
        self.__signature__ = inspect.signature(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        module: Any = self._module()
        (given,) = self.__signature__.bind(*args, **kwargs).args if kwargs or len(args) != 1 else args
        return self._deferral.linear(given, module.weight, module.bias, is_transposed=self._is_transposed)


@dataclass(frozen=True)
class _How:
    collects: WeightGradients
    is_transposed: bool


class _Linear(torch.autograd.Function):
    """A linear layer whose weight and bias get their gradients later."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.weight, ctx.bias, ctx.how = weight, bias, how
        return _linear(given, weight, bias, how.is_transposed).data  # no view: a model may write to it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (grad,), how = grad_outputs, ctx.how
        given, weight = ctx.saved_tensors
        # Detached: a view would hold what it is a view of, and with that the graph, the input and its gradient.
        rows, grads = given.detach().reshape(-1, given.shape[-1]), grad.reshape(-1, grad.shape[-1])
        to_given = None
        if ctx.needs_input_grad[0]:
            to_given = grads.mm(weight.t() if how.is_transposed else weight).view(given.shape)
        if how.is_transposed:
            how.collects.keep(ctx.weight, rows.t(), grads)
        else:
            how.collects.keep(ctx.weight, grads.t(), rows)
        if ctx.needs_input_grad[2]:
            how.collects.keep(ctx.bias, grads)
        return to_given, None, None, None


class _Add(torch.autograd.Function):
    """The sum with a bias that gets its gradient later. It saves nothing: a recomputation stops before it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, bias: Tensor, collects: WeightGradients) -> Tensor:
        ctx.mark_dirty(output)
        ctx.bias, ctx.collects = bias, collects
        return output.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (grad,) = grad_outputs
        ctx.collects.keep(ctx.bias, grad.reshape(-1, grad.shape[-1]))
        return grad, None, None
