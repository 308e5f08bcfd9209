"""One training step's forward and backward, the same call for every plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.api.model import gradient_sync
from shardwise.engine.unit import engine_of
from shardwise.optim.scaler import GradScaler
from shardwise.pipeline.batch import LossFn, forward_loss, split_batch
from shardwise.pipeline.pipelined import pipelined_of


def train_step(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn | None = None,
    num_microbatches: int | None = None,
    *,
    scaler: GradScaler | None = None,
) -> Tensor:
    """Forward and backward on this rank's ``batch``; afterwards gradients are on the parameters.

    A dict is called ``model(**batch)``, a tuple or list ``model(*batch)``, anything else ``model(batch)``. The loss is
    ``loss_fn(output, batch)``, else ``output.loss``, else an output without dimensions.

    Args:
        model: A parallelized model.
        batch: This rank's samples; tensors are split on dim 0 into microbatches. Those without dimensions, or with one
            row beside others of several, go into every microbatch whole. ``num_items_in_batch``, by which models of
            transformers divide the sum of their losses, counts the whole batch: the loss is what it is in one piece.
        loss_fn: Gives a scalar from the output and the (micro)batch.
        num_microbatches: ``None``: one; with ``pp`` those of ``plan.pipeline``. Microbatch losses are averaged
            unweighted. Without ``pp`` all but the last backward run under ``gradient_sync(model, False)``; with ``pp``
            gradients are added up and reduced once.
        scaler: For fp16: gradients are those of the scaled loss. ``scaler.step(optimizer)`` and ``scaler.update()`` are
            the caller's.

    Returns:
        The mean loss over microbatches and ranks, detached, the same value on every rank.

    Collective:
        Those of forward and backward, and one all-reduce of a float64 for the loss. All ranks must call. With ``pp``
        also the messages of its schedule, and a second all-reduce of two float64. Ranks that differ on ``pp``, ``cp``
        or ``tp`` only must have the same batch.

    Raises:
        StateError: The batch cannot be split, or there is no scalar loss.
    """
    engine = engine_of(model, "sw.train_step")
    pipelined = pipelined_of(model)
    if pipelined is not None:
        if scaler is None:
            return pipelined.step(model, batch, loss_fn, num_microbatches)
        return pipelined.step(model, batch, loss_fn, num_microbatches, scaler.scale)
    count = 1 if num_microbatches is None else num_microbatches
    parts = split_batch(batch, count)
    synchronises = engine.syncs_gradients  # false inside the caller's own gradient_sync(model, False)
    total = torch.zeros((), dtype=torch.float64, device=engine.comms.control.device)
    dtype = torch.float32
    for index, part in enumerate(parts):
        with gradient_sync(model, synchronises and index == count - 1):
            loss = forward_loss(model, part, loss_fn)
            part_loss = loss / count if count > 1 else loss
            (part_loss if scaler is None else scaler.scale(part_loss)).backward()
            total += loss.detach().double()
            dtype = loss.dtype
    mean = (total / count).reshape(1)
    for observer in engine.observers:
        observer.before_mean(engine)
    engine.comms.control.all_reduce(mean, unit="loss", divisor=engine.num_terms).wait()
    return mean.squeeze(0).to(dtype)


def eval_step(
    model: nn.Module, batch: Any, loss_fn: LossFn | None = None, num_microbatches: int | None = None
) -> Tensor:
    """The loss of :func:`train_step`, computed without gradients. ``model.eval()`` is the caller's.

    Args:
        model: A parallelized model.
        batch: As for :func:`train_step`.
        loss_fn: As for :func:`train_step`.
        num_microbatches: As for :func:`train_step`; with ``pp`` ``None`` takes as many, up to those of
            ``plan.pipeline``, as divide the batch, so that the last batch may be smaller.

    Returns:
        The mean loss over microbatches and ranks, the same value on every rank.

    Collective:
        Those of forward, and of the loss as in :func:`train_step`. All ranks must call.

    Raises:
        StateError: As :func:`train_step`.
    """
    engine = engine_of(model, "sw.eval_step")
    pipelined = pipelined_of(model)
    with torch.no_grad():
        if pipelined is not None:
            return pipelined.step(model, batch, loss_fn, num_microbatches)
        losses = [forward_loss(model, part, loss_fn) for part in split_batch(batch, num_microbatches or 1)]
        mean = torch.stack([loss.double() for loss in losses]).mean().reshape(1)
    engine.comms.control.all_reduce(mean, unit="loss", divisor=engine.comms.num_ranks).wait()
    return mean.squeeze(0).to(losses[0].dtype)
