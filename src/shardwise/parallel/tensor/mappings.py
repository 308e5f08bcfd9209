"""Collectives on ``tp`` as autograd functions, each with its transpose in backward, named as in Megatron-LM.

=============================  =======================  =======================
function                       forward                  backward
=============================  =======================  =======================
:func:`copy_to_tp`             identity                 all-reduce
:func:`reduce_from_tp`         all-reduce               identity
:func:`gather_from_tp`         all-gather, last dim     this rank's part
:func:`scatter_to_tp`          this rank's part         all-gather, last dim
:func:`gather_from_seq`        all-gather, dim 1        reduce-scatter, dim 1
:func:`reduce_scatter_to_seq`  reduce-scatter, dim 1    all-gather, dim 1
:func:`scatter_to_seq`         this rank's part         all-gather, dim 1
:func:`gather_whole_seq`       all-gather, dim 1        this rank's part
=============================  =======================  =======================

The last four are for sequence parallelism: activations between the layers are divided by positions (dimension 1).

``copy_to_tp`` begins a computation in which each rank uses a *replicated* tensor (the same on every rank) for one term
of a sum, and ``reduce_from_tp`` adds these terms. Sums run in rank order, so a replicated tensor is bitwise equal on
every rank.

In all functions ``comm`` is the Comm of ``tp`` and ``unit`` the path of the module, for traces.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.base import Comm, Handle
from shardwise.spec.errors import StateError


def copy_to_tp(x: Tensor, comm: Comm, unit: str) -> Tensor:
    """Return ``x``, replicated, for a computation of which each rank does a part.

    Collective:
        In backward an all-reduce of the gradient on ``tp``, if ``x`` needs one.
    """
    return _CopyToTp.apply(x, comm, unit) if comm.size > 1 and torch.is_grad_enabled() else x


def copy_part_to_tp(parameter: Tensor, place: tuple[int, int, int], comm: Comm, unit: str) -> Tensor:
    """Return ``parameter``, a part of a tensor of which some other ranks have copies, for a part of the computation.

    ``place`` is the dimension in which the tensor is divided, its full size there, and the offset of the part.

    Collective:
        In backward an all-reduce on ``tp`` of the gradient of the full tensor, to which every rank adds its part.
    """
    return _CopyPartToTp.apply(parameter, place, comm, unit) if comm.size > 1 else parameter


def reduce_from_tp(x: Tensor, comm: Comm, unit: str, bias: Tensor | None = None) -> Tensor:
    """Return the sum of every rank's ``x``, plus a replicated ``bias``.

    Collective:
        All-reduce on ``tp``.
    """
    return _ReduceFromTp.apply(x, bias, comm, unit) if torch.is_grad_enabled() else _reduce(x, bias, comm, unit)


def gather_from_tp(x: Tensor, sizes: Sequence[int], comm: Comm, unit: str) -> Tensor:
    """Concatenate every rank's ``x`` in the last dimension (``sizes`` by rank), for a computation on every rank.

    Collective:
        All-gather on ``tp``.
    """
    if comm.size == 1:
        return x
    return (
        _GatherFromTp.apply(x, tuple(sizes), comm, unit)
        if torch.is_grad_enabled()
        else all_gather_last(x, sizes, comm, unit)
    )


def scatter_to_tp(x: Tensor, sizes: Sequence[int], comm: Comm, unit: str) -> Tensor:
    """Return this rank's part of a replicated ``x``, divided in the last dimension.

    Collective:
        In backward an all-gather of the gradient on ``tp``, if ``x`` needs one.
    """
    return _ScatterToTp.apply(x, tuple(sizes), comm, unit) if comm.size > 1 else x


def gather_from_seq(x: Tensor, comm: Comm, unit: str) -> Tensor:
    """Gather all positions, for a computation of which each rank does a part.

    Collective:
        All-gather on ``tp``; in backward a reduce-scatter of the gradient.
    """
    return _GatherFromSeq.apply(x, comm, unit) if comm.size > 1 else x


def reduce_scatter_to_seq(x: Tensor, comm: Comm, unit: str, bias: Tensor | None = None) -> Tensor:
    """Return this rank's positions of the sum of every rank's ``x``, plus a replicated ``bias``.

    Collective:
        Reduce-scatter on ``tp``; in backward an all-reduce of the bias's gradient and an all-gather.
    """
    return _ReduceScatterToSeq.apply(x, bias, comm, unit)


def scatter_to_seq(x: Tensor, comm: Comm, unit: str) -> Tensor:
    """Return this rank's positions of a replicated ``x``.

    Collective:
        In backward an all-gather of the gradient on ``tp``, if ``x`` needs one.
    """
    if x.shape[1] % comm.size:
        raise StateError(
            f"sequence_parallel: {x.shape[1]} positions cannot be divided evenly over tp={comm.size}:"
            f" {x.shape[1]} / {comm.size} = {x.shape[1] / comm.size:.4g}.\n"
            f"  Pad the sequences to a multiple of {comm.size}, or set sequence_parallel=False."
        )
    return _ScatterToSeq.apply(x, comm, unit) if comm.size > 1 else x


def gather_whole_seq(x: Tensor, comm: Comm, unit: str) -> Tensor:
    """Gather all positions, for a computation that every rank does fully.

    Collective:
        All-gather on ``tp``.
    """
    return _GatherWholeSeq.apply(x, comm, unit) if comm.size > 1 else x


def all_gather_seq(x: Tensor, comm: Comm, unit: str) -> Tensor:
    """Return a new tensor with every rank's positions.

    Collective:
        All-gather on ``tp``.
    """
    buffer = x.new_empty(comm.size, *x.shape)
    buffer[comm.rank].copy_(x)
    comm.all_gather(buffer.view(-1), unit=unit).wait()
    return buffer.transpose(0, 1).flatten(1, 2)


def reduce_scatter_seq(x: Tensor, comm: Comm, unit: str) -> Tensor:
    """Return a new tensor with this rank's positions of the sum of every rank's ``x``.

    Collective:
        Reduce-scatter on ``tp``.
    """
    total, handle = start_reduce_scatter_seq(x, comm, unit)
    handle.wait()
    return total


def start_reduce_scatter_seq(x: Tensor, comm: Comm, unit: str) -> tuple[Tensor, Handle]:
    """Start :func:`reduce_scatter_seq`. Before the wait, do not read the result, nor write ``x``."""
    terms = x.unflatten(1, (comm.size, -1)).transpose(0, 1).contiguous()
    total = torch.empty_like(terms[0])
    return total, comm.reduce_scatter(terms.view(-1), total.view(-1), unit=unit)


def all_reduce(x: Tensor, comm: Comm, unit: str) -> Tensor:
    """Return a new tensor with the sum of every rank's ``x``.

    Collective:
        All-reduce on ``tp``.
    """
    total, handle = start_all_reduce(x, comm, unit)
    handle.wait()
    return total


def start_all_reduce(x: Tensor, comm: Comm, unit: str) -> tuple[Tensor, Handle]:
    """Start :func:`all_reduce`. Until the handle has been waited for, do not read the result, nor write ``x``."""
    x = x.contiguous()
    total = torch.empty_like(x)
    return total, comm.all_reduce(x.view(-1), unit=unit, out=total.view(-1))


def all_gather_last(x: Tensor, sizes: Sequence[int], comm: Comm, unit: str) -> Tensor:
    """Return a new tensor with every rank's ``x``, concatenated in the last dimension.

    Collective:
        All-gather on ``tp``.
    """
    rows = x.shape[:-1].numel()
    cuts = [0, *itertools.accumulate(rows * size for size in sizes)]
    buffer = x.new_empty(cuts[-1])
    slices = [buffer[start:stop] for start, stop in itertools.pairwise(cuts)]
    slices[comm.rank].view(x.shape).copy_(x)
    comm.all_gather(buffer, unit=unit, bounds=cuts).wait()
    parts = [part.view(*x.shape[:-1], size) for part, size in zip(slices, sizes, strict=True)]
    return torch.cat(parts, dim=-1)


def _own_features(x: Tensor, sizes: Sequence[int], rank: int) -> Tensor:
    return x.narrow(-1, sum(sizes[:rank]), sizes[rank])


def _own_positions(x: Tensor, comm: Comm) -> Tensor:
    return x.unflatten(1, (comm.size, -1))[:, comm.rank].clone(memory_format=torch.contiguous_format)


def _reduce(x: Tensor, bias: Tensor | None, comm: Comm, unit: str) -> Tensor:
    y = all_reduce(x, comm, unit)
    return y if bias is None else y.add_(bias)


class _CopyToTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, unit: str) -> Tensor:
        ctx.place = comm, unit
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return all_reduce(grad, *ctx.place), None, None


class _CopyPartToTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, place: tuple[int, int, int], comm: Comm, unit: str) -> Tensor:
        ctx.place = place, comm, unit
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (dim, size, start), comm, unit = ctx.place
        shape = list(grad.shape)
        shape[dim] = size
        whole = grad.new_zeros(shape)
        own = whole.narrow(dim, start, grad.shape[dim])
        own.copy_(grad)
        comm.all_reduce(whole.view(-1), unit=unit).wait()
        return own.contiguous(), None, None, None


class _ReduceFromTp(torch.autograd.Function):
    # It saves no tensor for backward, so that a recomputation stops before it.
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, comm: Comm, unit: str) -> Tensor:
        del ctx
        return _reduce(x, bias, comm, unit)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:  # type: ignore[override]
        return grad, grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None, None, None


class _GatherFromTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], comm: Comm, unit: str) -> Tensor:
        ctx.part = sizes, comm.rank
        return all_gather_last(x, sizes, comm, unit)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _own_features(grad, *ctx.part), None, None, None


class _ScatterToTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], comm: Comm, unit: str) -> Tensor:
        ctx.place = sizes, comm, unit
        return _own_features(x, sizes, comm.rank).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return all_gather_last(grad, *ctx.place), None, None, None


class _GatherFromSeq(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, unit: str) -> Tensor:
        ctx.place = comm, unit
        return all_gather_seq(x, comm, unit)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return reduce_scatter_seq(grad, *ctx.place), None, None


class _ReduceScatterToSeq(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, comm: Comm, unit: str) -> Tensor:
        ctx.place = comm, unit
        y = reduce_scatter_seq(x, comm, unit)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:  # type: ignore[override]
        to_bias = all_reduce(grad.flatten(0, -2).sum(0), *ctx.place) if ctx.needs_input_grad[1] else None
        return all_gather_seq(grad, *ctx.place), to_bias, None, None


class _ScatterToSeq(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, unit: str) -> Tensor:
        ctx.place = comm, unit
        return _own_positions(x, comm)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return all_gather_seq(grad, *ctx.place), None, None


class _GatherWholeSeq(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, unit: str) -> Tensor:
        ctx.comm = comm
        return all_gather_seq(x, comm, unit)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _own_positions(grad, ctx.comm), None, None
