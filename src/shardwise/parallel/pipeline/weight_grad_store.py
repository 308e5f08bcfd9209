"""The second half of a split backward: gradients of weights, computed after those of a stage's inputs.

A linear layer computes the gradient of its input at once, because the previous stage waits for it. The gradients of its
weight and bias need the layer's input and the gradient of its output. Both are kept until the schedule computes them.
All other parameters (norms, embeddings) get their gradients in the first half.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardwise.parallel.tensor.linear import linear_transposed

#: A stage and a microbatch.
Key = tuple[int, int]


class WeightGradStore:
    """Computes linear layers, and stores the terms of their weights' gradients until :meth:`compute`.

    Terms are stored by key, the stage and microbatch given to :meth:`store_for`.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._key: Key | None = None  # key of the present computation; None: autograd computes gradients
        self._terms: dict[Key, dict[int, tuple[Tensor, list[tuple[Tensor, Tensor | None]]]]] = {}
        for module in modules:
            if "forward" not in module.__dict__ and (_is_linear(module) or _is_transposed(module)):
                module.__dict__["forward"] = _LinearForward(self, module)

    @contextlib.contextmanager
    def store_for(self, key: Key | None) -> Iterator[None]:
        """Store the weight gradients of computations inside under ``key``; ``None``: do not store them."""
        self._key = key
        try:
            yield
        finally:
            self._key = None

    def add_term(self, key: Key, parameter: Tensor, left: Tensor, right: Tensor | None = None) -> None:
        """Add a term to the gradient of ``parameter``: ``left @ right``, or the sum of the rows of ``left``."""
        self._terms.setdefault(key, {}).setdefault(id(parameter), (parameter, []))[1].append((left, right))

    def compute(self, key: Key, parameters: Iterable[Tensor] | None = None) -> None:
        """Compute stored gradients into ``.grad`` of ``parameters`` (``None``: all), in autograd's order of terms."""
        terms = self._terms.setdefault(key, {})
        for each in [*reversed(terms)] if parameters is None else [id(parameter) for parameter in parameters]:
            if each not in terms:
                continue
            parameter, pairs = terms.pop(each)
            total = _term(*pairs[0])
            for pair in pairs[1:]:
                total += _term(*pair)
            parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)
        if not terms:
            del self._terms[key]

    def clear(self) -> None:
        """Drop all terms."""
        self._terms.clear()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, is_transposed: bool) -> Tensor:
        """Compute a linear layer; ``weight`` is (outputs, inputs), or (inputs, outputs) if transposed."""
        key = self._key_of(weight, x.device)
        if key is None or not (bias is None or bias.is_leaf):
            return _linear(x, weight, bias, is_transposed)
        return _Linear.apply(x, weight, bias, (self, key), is_transposed)

    def add(self, output: Tensor, bias: Tensor) -> Tensor:
        """Add a bias to ``output`` in place, after the layer's sum over ranks."""
        key = self._key_of(bias, output.device)
        return output.add_(bias) if key is None else _Add.apply(output, bias, (self, key))

    def _key_of(self, parameter: Tensor, device: torch.device) -> Key | None:
        """Return the key for the gradient of ``parameter``; ``None``: autograd computes it, as of computed weights."""
        is_ready = torch.is_grad_enabled() and parameter.requires_grad and parameter.is_leaf
        return self._key if is_ready and not _is_autocast(device) else None


def _term(left: Tensor, right: Tensor | None) -> Tensor:
    return left.sum(0) if right is None else left.mm(right)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, is_transposed: bool) -> Tensor:  # noqa: FBT001 - private
    return linear_transposed(x, weight, bias) if is_transposed else F.linear(x, weight, bias)


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward


def _is_transposed(module: nn.Module) -> bool:
    """Whether a module is transformers' ``Conv1D``, whose weight is the transpose of a linear layer's."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def _is_autocast(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


_Place = tuple[WeightGradStore, Key]


class _LinearForward:
    """Replaces the ``forward`` of a linear layer."""

    def __init__(self, store: WeightGradStore, module: nn.Module) -> None:
        self._store = store
        self._module = weakref.ref(module)
        self._is_transposed = _is_transposed(module)
        self.__signature__ = inspect.signature(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        module: Any = self._module()
        (x,) = self.__signature__.bind(*args, **kwargs).args if kwargs or len(args) != 1 else args
        return self._store.linear(x, module.weight, module.bias, is_transposed=self._is_transposed)


class _Linear(torch.autograd.Function):
    """A linear layer whose weight's gradient is stored."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd calls it by position
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        store: _Place,
        is_transposed: bool,  # noqa: FBT001 - the same
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.bias, ctx.store, ctx.is_transposed = weight, bias, store, is_transposed
        return _linear(x, weight, bias, is_transposed).detach()  # not a view: a model may write to it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (grad,), (store, key) = grad_outputs, ctx.store
        x, weight = ctx.saved_tensors
        # Detached, because a view keeps its base alive, and with that the graph, the input and its gradient.
        rows, grads = x.detach().reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        input_grad = None
        if ctx.needs_input_grad[0]:
            input_grad = grads.mm(weight.t() if ctx.is_transposed else weight).view(x.shape)
        store.add_term(key, ctx.weight, *((rows.t(), grads) if ctx.is_transposed else (grads.t(), rows)))
        if ctx.needs_input_grad[2]:
            store.add_term(key, ctx.bias, grads)
        return input_grad, None, None, None, None


class _Add(torch.autograd.Function):
    """The sum with a bias whose gradient is stored. It saves no tensor, so that a recomputation stops before it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, bias: Tensor, store: _Place) -> Tensor:
        ctx.mark_dirty(output)
        ctx.bias, ctx.store = bias, store
        return output.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (grad,), (store, key) = grad_outputs, ctx.store
        store.add_term(key, ctx.bias, grad.reshape(-1, grad.shape[-1]))
        return grad, None, None
