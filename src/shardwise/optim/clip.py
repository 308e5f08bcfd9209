"""The global gradient norm, and clipping by it."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from shardwise import torch_private
from shardwise.comm.base import Comm
from shardwise.comm.dtype import as_real, memory_order
from shardwise.engine.engine import Engine
from shardwise.engine.storage import part
from shardwise.engine.storage.attachment import attachment_of, engine_around, engine_of, engine_of_unit
from shardwise.engine.storage.flat_parameters import group_of
from shardwise.engine.storage.ignored import ignored_of
from shardwise.engine.storage.waiting import refuse_sums
from shardwise.optim.checks import engines_ignoring
from shardwise.optim.in_backward import refuse
from shardwise.spec.errors import StateError

#: Number of elements that the CPU casts to float64 at a time, so that they stay in the cache. CUDA casts in registers.
_CHUNK_NUMEL = 1 << 16


@torch_private.on_plain_tensors
def clip_grad_norm(
    model: nn.Module | Tensor | Iterable[nn.Module | Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients so that their global norm is at most ``max_norm``; returns the norm before scaling.

    The powers of all elements are added in float64; the root is rounded to float32 (to float64 for float64 models).
    Every gradient is multiplied by ``clamp(max_norm / (norm + 1e-6), max=1)`` in that dtype. In float32 the norm does
    not depend on the sharding of the parameters. inf and nan pass through, as in ``torch.nn.utils.clip_grad_norm_``.

    Ignored parameters (``ParallelPlan.ignored``) are not part of the norm and are not scaled; row-sharded embeddings
    (``ParallelPlan.row_sharded``) are.

    Args:
        model: A parallelized model after ``backward()``; or a module in it, parameters of it, or several of these, also
            of several models, such as ``optimizer.param_groups[0]["params"]``. Only the gradients of these modules and
            parameters count and are scaled. Every rank must pass the same. Under ``pp`` pass modules: a list of a
            stage's parameters is empty on other ranks, which then do not take part.
        max_norm: The largest norm, at least 0.
        norm_type: The order of the norm: above 0, ``float("inf")`` for the largest element.
        error_if_nonfinite: Raise on all ranks if the norm is inf or nan, before anything is scaled. The host waits for
            the norm.

    Returns:
        The norm, a scalar tensor with the same value on every rank.

    Collective:
        For each model one all-reduce (for the infinity norm all-gather) of one float64 on each of ``ep``, ``dp_shard``
        (if gradients are sharded), ``tp`` and ``pp`` that the mesh has, and one over all ranks if embeddings are
        row-sharded. All ranks must call.

    Raises:
        StateError: ``max_norm`` or ``norm_type`` is invalid; the model, or a parameter, is not parallelized, or is
            updated in backward; sums of accumulated microbatches have not been reduced; called for less than a model
            inside ``sw.join``; or the norm is not finite, with ``error_if_nonfinite``.
    """
    if not (max_norm >= 0 and norm_type > 0):
        raise StateError(
            f"clip_grad_norm(max_norm={max_norm}, norm_type={norm_type}): expected a number of at least 0, and one"
            " above 0."
        )
    chosen = _selected(model)
    if not chosen:
        return torch.zeros(())  # as torch's function without parameters
    grads: list[Tensor] = []
    for engine, below in chosen.items():
        refuse(engine, "sw.clip_grad_norm()")
        refuse_sums(engine, "sw.clip_grad_norm()")
        shards = (shard for group in engine.groups for shard in group.shards)
        row_sharded = ignored_of(engine).row_sharded_parameters.values()
        found = ((p, p.grad) for p in (*shards, *row_sharded))
        plain = (part.plain_of(grad) for p, grad in found if grad is not None and _is_in(below, p))
        grads += [grad for grad in plain if grad.numel()]
    norm = _norm(chosen, norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise StateError(
            f"clip_grad_norm(): the norm of the gradients is {norm.item()}; nothing was scaled.\n"
            "  Leave error_if_nonfinite out to go on, and skip the step or call optimizer.zero_grad()."
        )
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for device in {grad.device for grad in grads}:  # some may be on the host
        torch._foreach_mul_([grad for grad in grads if grad.device == device], coefficient.to(device))
    return norm


#: Identities of the chosen parameters of a model; ``None``: all of them.
_Below = Collection[int] | None


def _selected(selected: nn.Module | Tensor | Iterable[nn.Module | Tensor]) -> dict[Engine, _Below]:
    """Group the given parameters by model, in the order in which they were passed."""
    found: dict[Engine, set[int]] = {}
    complete: set[Engine] = set()
    for each in [selected] if isinstance(selected, (nn.Module, Tensor)) else selected:
        attachment = attachment_of(each) if isinstance(each, nn.Module) else None
        if attachment is not None and attachment.unit is attachment.engine.units[0]:
            found.setdefault(attachment.engine, set())
            complete.add(attachment.engine)
            continue
        parameters = list(each.parameters() if isinstance(each, nn.Module) else getattr(each, "shards", (each,)))
        groups = [group for parameter in parameters if (group := group_of(parameter)) is not None]
        engines = [engine for group in groups if (engine := engine_of_unit(group.unit)) is not None]
        engines += engines_ignoring(parameters) if len(groups) < len(parameters) else ()
        if isinstance(each, nn.Module) and (engine := engine_around(each)) is not None:
            engines.append(engine)
        elif not engines and isinstance(each, nn.Module):
            engine_of(each, "sw.clip_grad_norm")  # refuses
        elif not engines:
            raise StateError(
                f"sw.clip_grad_norm() got a parameter of shape {list(parameters[0].shape)} that is in no parallelized"
                " model.\n"
                "  Pass parameters of models that sw.parallelize() has returned, and clip other parameters separately."
            )
        for engine in engines:
            found.setdefault(engine, set()).update(map(id, parameters))
    for engine in found:
        root = engine.units[0].members[0].module()
        assert root is not None
        engine_of(root, "sw.clip_grad_norm")  # refuses a model inside sw.full_parameters
    return {engine: None if engine in complete else below for engine, below in found.items()}


def _is_in(below: _Below, parameter: Tensor) -> bool:
    return below is None or id(parameter) in below


def grad_norm(engine: Engine) -> Tensor:
    """Compute the global 2-norm of the gradients on the shards.

    Collective:
        As :func:`clip_grad_norm`.
    """
    return _norm({engine: None}, 2.0)


@torch_private.on_plain_tensors
def _norm(chosen: Mapping[Engine, _Below], order: float) -> Tensor:
    """Compute the norm of the chosen gradients of several models; communicates as :func:`clip_grad_norm`."""
    powers: list[Tensor] = []
    dtypes: set[torch.dtype] = set()
    for engine, below in chosen.items():
        powers.append(_power(engine, below, order, dtypes))
    total = functools.reduce(lambda a, b: _merge(a, b.to(a.device), order), powers)
    root = total if order == math.inf else total.sqrt() if order == 2 else total ** (1 / order)
    return root.to(torch.float64 if dtypes & {torch.float64, torch.complex128} else torch.float32).squeeze(0)


def _power(engine: Engine, below: _Below, order: float, dtypes: set[torch.dtype]) -> Tensor:
    """Sum the powers of elements over all ranks (for inf: the maximum), in float64; adds their dtypes to ``dtypes``."""
    comms, device = engine.comms, engine.comms.control.device
    sharded: list[Tensor] = []
    replicated: list[Tensor] = []
    experts: list[Tensor] = []  # replicated over fewer ranks
    found: set[torch.dtype] = set()
    for group in engine.groups:
        grads = sharded if group.placements.shards_optimizer else replicated if group.comms is comms else experts
        for spec, shard in zip(group.layout.params, group.shards, strict=True):
            grad = shard.grad
            if grad is not None and comms.counts(spec.slice) and _is_in(below, shard):
                found.add(group.dtype)
                grads.append(part.plain_of(grad))
    total = _local_power(experts, device, order)
    if comms.ep is not None:
        _over_ranks(total, comms.ep, order)
    of_shards = _local_power(sharded, device, order)
    if engine.placements.shards_optimizer:
        _over_ranks(of_shards, comms.reduce, order)
    total = _merge(total, _merge(of_shards, _local_power(replicated, device, order), order), order)
    for comm in comms.model_parallel:
        _over_ranks(total, comm, order)
    if ignored_of(engine).row_sharded:
        row_sharded = ignored_of(engine).row_sharded_parameters.values()
        rows = _local_power((p.grad for p in row_sharded if p.grad is not None and _is_in(below, p)), device, order)
        _over_ranks(rows, comms.world, order)
        total = _merge(total, rows, order)
    # A stage without gradients uses the dtypes of its parameters.
    dtypes |= found or {group.dtype for group in engine.groups}
    return total


def _merge(a: Tensor, b: Tensor, order: float) -> Tensor:
    return torch.maximum(a, b) if order == math.inf else a + b


def _over_ranks(total: Tensor, comm: Comm, order: float) -> None:
    """Sum one number over ranks, or take the maximum, in place.

    Collective:
        All-reduce of ``total``; for the infinity norm all-gather.
    """
    if order != math.inf:
        comm.all_reduce(total, unit="grad_norm").wait()
        return
    found = total.new_zeros(comm.size)
    found[comm.rank] = total[0]
    comm.all_gather(found, unit="grad_norm").wait()
    total.copy_(found.max())


@torch.no_grad()
def _local_power(grads: Iterable[Tensor], device: torch.device, order: float) -> Tensor:
    """Sum the powers of all elements on this rank (for inf: the maximum), as one float64 on ``device``."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        real = as_real(grad) if order == 2 else grad.abs() if grad.is_complex() else grad
        if real.numel():
            alike.setdefault((real.device, real.dtype), []).extend(_pieces(real))
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for pieces in alike.values():
        norms = torch.stack(torch_private.norms(pieces, torch.float64, order))
        found = norms.max() if order == math.inf else torch.dot(norms, norms) if order == 2 else (norms**order).sum()
        total = _merge(total, found.to(device, non_blocking=True), order)
    return total


def _pieces(grad: Tensor) -> Sequence[Tensor]:
    if grad.device.type != "cpu" or grad.numel() <= _CHUNK_NUMEL:
        return (grad,)
    return memory_order(grad).split(_CHUNK_NUMEL)
