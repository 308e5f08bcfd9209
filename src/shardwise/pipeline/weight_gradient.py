"""The second half of a backward: gradients of weights that are computed after those of a stage's inputs.

Of every linear layer the gradient of its input is given at once, for the stage before waits for it. The gradient of its
weight needs only what went into the layer and the gradient of what came out: both are kept until a schedule has time.
Whatever else has parameters (norms, embeddings, biases) is done with the input.
"""

from __future__ import annotations

import contextlib
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
        self._terms: dict[int, tuple[Tensor, list[tuple[Tensor, Tensor]]]] = {}

    def keep(self, weight: Tensor, left: Tensor, right: Tensor) -> None:
        """The gradient of ``weight`` has the term ``left @ right``."""
        self._terms.setdefault(id(weight), (weight, []))[1].append((left, right))

    def compute(self) -> None:
        """Add every gradient to the weight's ``.grad``: terms of one weight first, as autograd adds them."""
        terms, self._terms = self._terms, {}
        while terms:
            _, (weight, products) = terms.popitem()
            left, right = products[0]
            total = left.mm(right)
            for left, right in products[1:]:
                total += left.mm(right)
            weight.grad = total if weight.grad is None else weight.grad.add_(total)


class Deferral:
    """Switches the linear layers among ``modules`` over to :class:`WeightGradients`, where some are being collected.

    Attributes:
        current: Of the microbatch and stage that computes now; ``None``: gradients are autograd's.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.current: WeightGradients | None = None
        me: weakref.ref[Deferral] = weakref.ref(self)
        for module in modules:
            if "forward" in module.__dict__ or not (_is_linear(module) or _is_transposed(module)):
                continue
            module.__dict__["forward"] = _LinearForward(me, module)

    @contextlib.contextmanager
    def to(self, collects: WeightGradients | None) -> Iterator[None]:
        """Have what is computed inside collect there."""
        self.current = collects
        try:
            yield
        finally:
            self.current = None


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward


def _is_transposed(module: nn.Module) -> bool:
    """Transformers' ``Conv1D``, which holds the transpose of a linear layer's weight."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def _is_autocast(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


class _LinearForward:
    """Stands for the ``forward`` of a linear layer."""

    def __init__(self, deferral: weakref.ref[Deferral], module: nn.Module) -> None:
        self._deferral = deferral
        self._module = weakref.ref(module)
        self._is_transposed = _is_transposed(module)

    def __call__(self, given: Tensor) -> Tensor:
        module, deferral = self._module(), self._deferral()
        assert module is not None
        weight: Any = module.weight
        collects = deferral.current if deferral is not None and torch.is_grad_enabled() else None
        if collects is None or not weight.requires_grad or _is_autocast(given.device):
            return type(module).forward(module, given)
        return _Linear.apply(given, weight, module.bias, _How(collects, self._is_transposed))


@dataclass(frozen=True)
class _How:
    collects: WeightGradients
    is_transposed: bool


class _Linear(torch.autograd.Function):
    """A linear layer whose weight gets its gradient later."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.weight, ctx.how = weight, how
        if not how.is_transposed:
            return F.linear(given, weight, bias)
        assert bias is not None
        return torch.addmm(bias, given.view(-1, given.shape[-1]), weight).view(*given.shape[:-1], weight.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (grad,), how = grad_outputs, ctx.how
        given, weight = ctx.saved_tensors
        # Detached: a view would hold what it is a view of, and with that the graph, the input and its gradient.
        rows, grads = given.detach().reshape(-1, given.shape[-1]), grad.reshape(-1, grad.shape[-1])
        to_given = to_bias = None
        if ctx.needs_input_grad[0]:
            to_given = grads.mm(weight.t() if how.is_transposed else weight).view(given.shape)
        if ctx.needs_input_grad[2]:
            to_bias = grads.sum(0)
        if how.is_transposed:
            how.collects.keep(ctx.weight, rows.t(), grads)
        else:
            how.collects.keep(ctx.weight, grads.t(), rows)
        return to_given, None, to_bias, None
