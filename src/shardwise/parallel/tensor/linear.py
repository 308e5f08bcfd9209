"""A column-parallel linear layer that overlaps communication with computation.

In backward it starts the all-reduce of its input's gradient, computes the gradients of weight and bias, and then waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardwise.comm.base import Comm, Handle
from shardwise.parallel.tensor.mappings import all_gather_seq, start_all_reduce, start_reduce_scatter_seq


class GradStore(Protocol):
    """Computes with weights and biases whose gradients it may defer (``parallel.pipeline.weight_grad_store``)."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, is_transposed: bool) -> Tensor:
        """As :meth:`ColumnPlan.forward`."""
        ...

    def add(self, output: Tensor, bias: Tensor) -> Tensor:
        """Add ``bias`` to ``output`` in place."""
        ...


@dataclass(frozen=True)
class ColumnPlan:
    """The computation and communication of a column-parallel layer.

    Attributes:
        comm: Comm of ``tp``.
        unit: Path of the layer, for traces.
        is_transposed: Whether the weight is (inputs, outputs).
        divides_sequence: Whether the input is divided by positions, instead of replicated.
    """

    comm: Comm
    unit: str
    is_transposed: bool
    divides_sequence: bool = False

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute this rank's features."""
        return linear_transposed(x, weight, bias) if self.is_transposed else F.linear(x, weight, bias)

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Compute the gradient of the input, (..., inputs)."""
        grad_x = grad.reshape(-1, grad.shape[-1]).mm(weight.t() if self.is_transposed else weight)
        return grad_x.view(*grad.shape[:-1], grad_x.shape[-1])  # not -1, which is ambiguous without tokens

    def weight_grad(self, grad: Tensor, x: Tensor) -> Tensor:
        """Compute the gradient of the weight."""
        grads, rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        return rows.t().mm(grads) if self.is_transposed else grads.t().mm(rows)


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, plan: ColumnPlan) -> Tensor:
    """Compute this rank's features of a replicated input.

    Collective:
        In backward an all-reduce of the input's gradient on ``tp``, if it needs one. With positions divided, an
        all-gather of the input and in backward a reduce-scatter.
    """
    if torch.is_grad_enabled():
        return _ColumnLinear.apply(*_cast(x, weight, bias), plan)
    return plan.forward(all_gather_seq(x, plan.comm, plan.unit) if plan.divides_sequence else x, weight, bias)


def linear_of(module: nn.Module) -> Any:
    """Return ``F.linear``, or :func:`linear_transposed` for transformers' Conv1D."""
    return linear_transposed if is_transposed(module) else F.linear


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is (inputs, outputs), as in transformers' Conv1D."""
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)


def linear_transposed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``F.linear`` for a weight (inputs, outputs)."""
    flat = x.reshape(-1, x.shape[-1])
    y = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return y.view(*x.shape[:-1], weight.shape[1])


def _cast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Cast as autocast does, because autocast's casts inside an autograd function would have no gradient."""
    assert tensors[0] is not None
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t is None or t.dtype is torch.float64 else t.to(dtype) for t in tensors)


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: ColumnPlan) -> Tensor:
        x = all_gather_seq(x, plan.comm, plan.unit) if plan.divides_sequence else x
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.plan = plan
        return plan.forward(x, weight, bias).detach()  # not a view, because a model may write to it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (grad,), plan, (x, weight) = grads, ctx.plan, ctx.saved_tensors
        input_grad = weight_grad = bias_grad = None
        handle: Handle | None = None
        if ctx.needs_input_grad[0]:
            start = start_reduce_scatter_seq if plan.divides_sequence else start_all_reduce
            input_grad, handle = start(plan.input_grad(grad, weight), plan.comm, plan.unit)
        if ctx.needs_input_grad[1]:
            weight_grad = plan.weight_grad(grad, x)
        if ctx.needs_input_grad[2]:
            bias_grad = grad.flatten(0, -2).sum(0)
        if handle is not None:
            handle.wait()
        return input_grad, weight_grad, bias_grad, None
