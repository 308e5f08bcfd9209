"""The second half of a split backward: gradients of weights, computed after those of a stage's inputs.

A linear layer computes the gradient of its input at once, for which the stage before waits. The gradients of its weight
and bias need the layer's input and the gradient of its output: both are kept until the schedule has time. All other
parameters (norms, embeddings) get their gradients in the first half.
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

from shardwise.tensor.linear import linear_transposed


class WeightGradients:
    """The gradients of weights of one microbatch on one stage that are still to be computed."""

    def __init__(self) -> None:
        self._terms: dict[int, tuple[Tensor, list[tuple[Tensor, Tensor | None]]]] = {}

    def keep(self, parameter: Tensor, left: Tensor, right: Tensor | None = None) -> None:
        """Add a term to the gradient of ``parameter``: ``left @ right``, or the sum of the rows of ``left``."""
        self._terms.setdefault(id(parameter), (parameter, []))[1].append((left, right))

    def compute(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Add gradients to ``.grad`` of ``parameters`` (``None``: all that are left), in autograd's order of terms."""
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
    """Computes linear layers, and defers their weights' gradients while :attr:`current` is set.

    Attributes:
        current: Takes the gradients of the stage and microbatch that computes now; ``None``: autograd computes them.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.current: WeightGradients | None = None
        for module in modules:
            if "forward" not in module.__dict__ and (_is_linear(module) or _is_transposed(module)):
                module.__dict__["forward"] = _LinearForward(self, module)

    @contextlib.contextmanager
    def to(self, collects: WeightGradients | None) -> Iterator[None]:
        """Defer the gradients of what is computed inside to ``collects``."""
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
        """``output`` with a bias added in place, after the layer's sum over ranks."""
        collects = self._collects(bias, output.device)
        return output.add_(bias) if collects is None else _Add.apply(output, bias, collects)

    def _collects(self, parameter: Tensor, device: torch.device) -> WeightGradients | None:
        """What takes the gradient of ``parameter``; ``None``: autograd, as for a weight computed from other tensors."""
        is_ready = torch.is_grad_enabled() and parameter.requires_grad and parameter.is_leaf
        return self.current if is_ready and not _is_autocast(device) else None


def _linear(given: Tensor, weight: Tensor, bias: Tensor | None, is_transposed: bool) -> Tensor:  # noqa: FBT001 - private
    return linear_transposed(given, weight, bias) if is_transposed else F.linear(given, weight, bias)


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward


def _is_transposed(module: nn.Module) -> bool:
    """Transformers' ``Conv1D``, which holds the transpose of a linear layer's weight."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def _is_autocast(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


class _LinearForward:
    """Replaces the ``forward`` of a linear layer."""

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
    """A linear layer whose weight and bias have deferred gradients."""

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
    """The sum with a bias whose gradient is deferred. It saves nothing: a recomputation stops before it."""

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
