"""The global gradient norm, and clipping by it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.fsdp import attach
from shardwise.fsdp.in_backward import refuse
from shardwise.fsdp.runtime import Runtime
from shardwise.spec.errors import StateError

#: Elements that are cast and squared at a time: no full-size temporary.
_CHUNK_NUMEL = 1 << 16


def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients so that their global 2-norm is at most ``max_norm``; returns the norm before that.

    Every gradient element is cast to float64, squared and added; the root is rounded to float32 (float64 models keep
    float64). The coefficient is ``clamp(max_norm / (norm + 1e-6), max=1)`` in that dtype, and every gradient is
    multiplied by it. In float32 neither depends on how the parameters are sharded. inf and nan pass through, as with
    ``torch.nn.utils.clip_grad_norm_``.

    Parameters that are left alone (``ParallelPlan.ignored``) are not part of the norm and are not scaled; rows that are
    spread over the ranks (``ParallelPlan.row_sharded``) are.

    Args:
        model: A parallelized model after ``backward()``.
        max_norm: At least 0.

    Returns:
        The norm, a scalar tensor with the same value on every rank.

    Collective:
        With ``ep`` one all-reduce of one float64 there, one on ``dp_shard`` where gradients are sharded (replicas hold
        the same), then one on ``tp`` and one on ``pp`` where there are any, and one over all ranks where rows are
        spread. All ranks must call.

    Raises:
        StateError: ``max_norm`` is negative or not a number, the model is not parallelized or updated in
            backward.
    """
    if not max_norm >= 0:
        raise StateError(f"clip_grad_norm(max_norm={max_norm}): expected a number of at least 0.")
    runtime = attach.runtime_of(model, "sw.clip_grad_norm")
    refuse(runtime, "sw.clip_grad_norm()")
    if runtime.join is not None:
        runtime.join.clips(max_norm)
    grads = [shard.grad for group in runtime.groups for shard in group.shards if shard.grad is not None]
    grads += runtime.ignored.spread_gradients
    norm = grad_norm(runtime)
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for device in {grad.device for grad in grads}:  # some may be on the host
        torch._foreach_mul_([grad for grad in grads if grad.device == device], coefficient.to(device))
    return norm


def grad_norm(runtime: Runtime) -> Tensor:
    """The global 2-norm of the gradients on the shards.

    Collective:
        As :func:`clip_grad_norm`.
    """
    device = runtime.comms.control.device
    sharded = torch.zeros(1, dtype=torch.float64, device=device)
    replicated = torch.zeros(1, dtype=torch.float64, device=device)
    experts = torch.zeros(1, dtype=torch.float64, device=device)  # replicated over fewer ranks
    dtypes: set[torch.dtype] = set()
    for group in runtime.groups:
        total = sharded if group.row.shards_optimizer else replicated if group.comms is runtime.comms else experts
        for spec, shard in zip(group.layout.params, group.shards, strict=True):
            if shard.grad is None or not runtime.comms.counts(spec.slice):
                continue
            dtypes.add(group.dtype)
            _add_squares(total, shard.grad)
    comms = runtime.comms
    if comms.ep is not None:
        comms.ep.all_reduce(experts, unit="grad_norm").wait()
    if runtime.row.shards_optimizer:
        comms.reduce.all_reduce(sharded, unit="grad_norm").wait()
    total = sharded + replicated + experts
    for comm in runtime.comms.across:
        comm.all_reduce(total, unit="grad_norm").wait()
    if runtime.ignored.spread:
        rows = torch.zeros_like(total)
        for grad in runtime.ignored.spread_gradients:
            _add_squares(rows, grad)
        runtime.comms.world.all_reduce(rows, unit="grad_norm").wait()
        total += rows
    dtypes = dtypes or {group.dtype for group in runtime.groups}  # a stage without gradients goes by what it holds
    return total.sqrt().to(torch.float64 if torch.float64 in dtypes else torch.float32).squeeze(0)


def _add_squares(total: Tensor, grad: Tensor) -> None:
    for chunk in _chunks(grad):
        wide = chunk.double()
        total += torch.dot(wide, wide)


def _chunks(grad: Tensor) -> tuple[Tensor, ...]:
    grad = torch.view_as_real(grad) if grad.is_complex() else grad
    flat = grad.detach().reshape(-1) if grad.is_contiguous() else grad.detach().as_strided((grad.numel(),), (1,))
    return flat.split(_CHUNK_NUMEL)
