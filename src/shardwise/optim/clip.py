"""The global gradient norm, and clipping by it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from shardwise import torch_private
from shardwise.engine.engine import Engine
from shardwise.forms.attachment import attachment_of, engine_of
from shardwise.forms.ignored import ignored_of
from shardwise.forms.waiting import refuse_sums
from shardwise.optim import partial
from shardwise.optim.in_backward import refuse
from shardwise.spec.errors import StateError

#: On the CPU, elements that are cast to float64 at a time, so that they stay in the cache. CUDA casts in registers.
_CHUNK_NUMEL = 1 << 16


def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients so that their global 2-norm is at most ``max_norm``; returns the norm before that.

    The squares of all elements are added in float64; the root is rounded to float32 (to float64 for float64 models).
    Every gradient is multiplied by ``clamp(max_norm / (norm + 1e-6), max=1)`` in that dtype. In float32 the norm does
    not depend on how the parameters are sharded. inf and nan pass through, as in ``torch.nn.utils.clip_grad_norm_``.

    Ignored parameters (``ParallelPlan.ignored``) are not part of the norm and are not scaled; spread rows
    (``ParallelPlan.row_sharded``) are.

    Args:
        model: A parallelized model after ``backward()``. If it is one of the units of such a model, only the gradients
            below that module count and are scaled; every rank must have it.
        max_norm: At least 0.

    Returns:
        The norm, a scalar tensor with the same value on every rank.

    Collective:
        One all-reduce of one float64 on ``ep``, on ``dp_shard`` (where gradients are sharded), on ``tp`` and on ``pp``,
        as far as the mesh has them, and one over all ranks where rows are spread. All ranks must call.

    Raises:
        StateError: ``max_norm`` is negative or not a number; the model is not parallelized, or is updated in backward;
            sums of accumulated microbatches have not been reduced; called on a unit inside ``sw.join``.
    """
    if not max_norm >= 0:
        raise StateError(f"clip_grad_norm(max_norm={max_norm}): expected a number of at least 0.")
    engine = engine_of(model, "sw.clip_grad_norm")
    refuse(engine, "sw.clip_grad_norm()")
    refuse_sums(engine, "sw.clip_grad_norm()")
    part = _part_of(engine, model)
    for tell in engine.observers.before_norm:
        tell(engine, max_norm, is_of_part=part is not None)
    shards = (shard for group in engine.groups for shard in group.shards)
    spread = ignored_of(engine).spread_parameters.values()
    grads = [partial.plain_of(p.grad) for p in (*shards, *spread) if p.grad is not None and _is_in(part, p)]
    norm = grad_norm(engine, part)
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for device in {grad.device for grad in grads}:  # some may be on the host
        torch._foreach_mul_([grad for grad in grads if grad.device == device], coefficient.to(device))
    return norm


def _part_of(engine: Engine, module: nn.Module) -> frozenset[int] | None:
    """Identities of the parameters below ``module``; ``None`` for the whole model."""
    attachment = attachment_of(module)
    if attachment is None or attachment.unit is engine.units[0]:
        return None
    return frozenset(map(id, module.parameters()))


def _is_in(part: Collection[int] | None, parameter: Tensor) -> bool:
    return part is None or id(parameter) in part


@partial.allowed()
def grad_norm(engine: Engine, part: Collection[int] | None = None) -> Tensor:
    """The global 2-norm of the gradients on the shards.

    Collective:
        As :func:`clip_grad_norm`.
    """
    comms, device = engine.comms, engine.comms.control.device
    sharded: list[Tensor] = []
    replicated: list[Tensor] = []
    experts: list[Tensor] = []  # replicated over fewer ranks
    dtypes: set[torch.dtype] = set()
    for group in engine.groups:
        grads = sharded if group.row.shards_optimizer else replicated if group.comms is comms else experts
        for spec, shard in zip(group.layout.params, group.shards, strict=True):
            if shard.grad is not None and comms.counts(spec.slice) and _is_in(part, shard):
                dtypes.add(group.dtype)
                grads.append(partial.plain_of(shard.grad))
    total = _sum_of_squares(experts, device)
    if comms.ep is not None:
        comms.ep.all_reduce(total, unit="grad_norm").wait()
    of_shards = _sum_of_squares(sharded, device)
    if engine.row.shards_optimizer:
        comms.reduce.all_reduce(of_shards, unit="grad_norm").wait()
    total += of_shards + _sum_of_squares(replicated, device)
    for comm in comms.across:
        comm.all_reduce(total, unit="grad_norm").wait()
    if ignored_of(engine).spread:
        spread = ignored_of(engine).spread_parameters.values()
        rows = _sum_of_squares((p.grad for p in spread if p.grad is not None and _is_in(part, p)), device)
        comms.world.all_reduce(rows, unit="grad_norm").wait()
        total += rows
    dtypes = dtypes or {group.dtype for group in engine.groups}  # a stage without gradients goes by what it holds
    return total.sqrt().to(torch.float64 if torch.float64 in dtypes else torch.float32).squeeze(0)


@torch.no_grad()
def _sum_of_squares(grads: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of the squares of all elements, as one float64 on ``device``."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        real = torch.view_as_real(grad) if grad.is_complex() else grad
        if real.numel():
            alike.setdefault((real.device, real.dtype), []).extend(_pieces(real))
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for pieces in alike.values():
        norms = torch.stack(torch_private.norms(pieces, torch.float64))
        total += torch.dot(norms, norms).to(device)
    return total


def _pieces(grad: Tensor) -> Sequence[Tensor]:
    if grad.device.type != "cpu" or grad.numel() <= _CHUNK_NUMEL:
        return (grad,)
    flat = grad.view(-1) if grad.is_contiguous() else grad.as_strided((grad.numel(),), (1,))
    return flat.split(_CHUNK_NUMEL)
