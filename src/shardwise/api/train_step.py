"""The forward and backward of a training step, and the forward of an evaluation: the same calls for every plan."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.api.model import gradient_sync
from shardwise.engine.engine import Engine
from shardwise.engine.storage.attachment import engine_of
from shardwise.launch import heartbeat
from shardwise.optim.scaler import GradScaler
from shardwise.parallel.pipeline.batch import Forward, LossFn, call_model, fitting_count, forward_loss, split_batch
from shardwise.parallel.pipeline.pipelined import pipelined_of
from shardwise.spec.errors import StateError


def train_step(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn | None = None,
    num_microbatches: int | None = None,
    *,
    scaler: GradScaler | None = None,
    forward: Forward | None = None,
    losses: list[Tensor] | None = None,
) -> Tensor:
    """Run forward and backward on this rank's ``batch``; afterwards ``.grad`` of the parameters is set.

    A dict is called ``model(**batch)``, a tuple or list ``model(*batch)``, anything else ``model(batch)``. The loss is
    ``loss_fn(output, batch)``, else ``output.loss``, else an output without dimensions.

    Args:
        model: A parallelized model.
        batch: This rank's samples; tensors are split on dim 0 into microbatches. Tensors without dimensions, or with
            one row if others have several, go into every microbatch unsplit. ``num_items_in_batch``, by which models of
            transformers divide the sum of their losses, counts the whole batch: the loss does not depend on the split.
            An iterator yields the microbatches, and is advanced only when the next one is needed.
        loss_fn: Returns a scalar from the output and the (micro)batch.
        num_microbatches: ``None``: one, or with ``pp`` the number in ``plan.pipeline``. Microbatch losses are averaged
            unweighted. Without ``pp`` all but the last backward run under ``gradient_sync(model, False)``; with ``pp``
            gradients are added up and reduced once.
        scaler: For fp16: scales the loss and so its gradients. The caller runs ``scaler.step(optimizer)`` and
            ``update()``.
        forward: Calls the model: ``forward(model, batch)`` returns the output.
        losses: A list to which the losses of this rank's microbatches are appended, detached. The mean over ranks is
            then not computed, and the host waits for nothing: for loops that read losses only every few steps.

    Returns:
        The mean loss over microbatches and ranks, detached, the same value on every rank. With ``losses``, the mean
        over this rank's microbatches (0 on a rank without the last stage of a pipeline).

    Collective:
        The collectives of forward and backward, and one all-reduce of a float64 for the loss, unless ``losses`` is
        given. All ranks must call. With ``pp`` also the messages of its schedule, and a second all-reduce of two
        float64. Ranks that differ only on ``pp``, ``cp`` or ``tp`` must have the same batch.

    Raises:
        StateError: The batch cannot be split, an iterator ends early, or there is no scalar loss with a gradient.
    """
    engine = engine_of(model, "sw.train_step")
    scale = (lambda loss: loss) if scaler is None else scaler.scale
    loss_of = functools.partial(forward_loss, loss_fn=loss_fn, forward=forward)
    pipelined = pipelined_of(model)
    if pipelined is not None:
        count = pipelined.num_microbatches if num_microbatches is None else num_microbatches
        parts = list(_microbatches(batch, count))
        found = pipelined.losses(model, parts, forward or call_model, loss_of, scale=scale)
        return pipelined.mean_loss(engine, found) if losses is None else _append_losses(found, losses, engine)
    count = 1 if num_microbatches is None else num_microbatches
    synchronizes = engine.window.syncs  # false inside the caller's own gradient_sync(model, False)
    total = torch.zeros((), dtype=torch.float64, device=engine.comms.control.device)
    dtype = torch.float32
    for index, part in enumerate(_microbatches(batch, count)):
        with gradient_sync(model, synchronizes and index == count - 1):
            loss = loss_of(model, part)
            if not loss.requires_grad:
                raise StateError(
                    f"the loss of microbatch {index} depends on no trained parameter, and has no gradient.\n"
                    "  Let every microbatch use one (with a frozen language model: give it a picture), or train more."
                )
            scale(loss / count if count > 1 else loss).backward()
            total += loss.detach().double()
            dtype = loss.dtype
            if losses is not None:
                losses.append(loss.detach())
    mean = (total / count).reshape(1)
    if losses is None:
        engine.comms.control.all_reduce(mean, unit="loss", divisor=engine.num_ranks_with_data).wait()
    return mean.squeeze(0).to(dtype)


def eval_step(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn | None = None,
    num_microbatches: int | None = None,
    *,
    forward: Forward | None = None,
    losses: list[Tensor] | None = None,
) -> Tensor:
    """Compute the loss of :func:`train_step` without gradients. The caller sets ``model.eval()``.

    The arguments are those of :func:`train_step`. With ``pp`` and ``num_microbatches=None`` the number of microbatches
    is the largest, up to that of ``plan.pipeline``, that divides the batch, so that the last batch may be smaller.

    Returns:
        The mean loss as :func:`train_step` gives it.

    Collective:
        The collectives of forward, and of the loss as in :func:`train_step`. All ranks must call. A rank whose batch
        does not use some units (an image encoder without images) gathers them with the others.

    Raises:
        StateError: As :func:`train_step`.
    """
    engine = engine_of(model, "sw.eval_step")
    loss_of = functools.partial(forward_loss, loss_fn=loss_fn, forward=forward)
    pipelined = pipelined_of(model)
    with torch.no_grad(), engine.evaluating():
        if pipelined is not None:
            default = pipelined.num_microbatches
            count = fitting_count(batch, default) if num_microbatches is None else num_microbatches
            parts = list(_microbatches(batch, count))
            found = pipelined.losses(model, parts, forward or call_model, loss_of)
            return pipelined.mean_loss(engine, found) if losses is None else _append_losses(found, losses, engine)
        found = [
            loss_of(model, part) for part in _microbatches(batch, 1 if num_microbatches is None else num_microbatches)
        ]
        mean = torch.stack([loss.double() for loss in found]).mean().reshape(1)
    if losses is None:
        engine.comms.control.all_reduce(mean, unit="loss", divisor=engine.num_ranks_with_data).wait()
    else:
        losses += found
    return mean.squeeze(0).to(found[0].dtype)


def _microbatches(batch: Any, count: int) -> Iterable[Any]:
    heartbeat.record_progress()  # so that the watchdog does not take a long evaluation for a hang
    return _next_microbatches(batch, count) if isinstance(batch, Iterator) else split_batch(batch, count)


def _next_microbatches(batches: Iterator[Any], count: int) -> Iterator[Any]:
    for index in range(count):
        try:
            yield next(batches)
        except StopIteration:
            raise StateError(
                f"the iterator gave {index} microbatches, but num_microbatches={count}.\n"
                "  Give it as many, or pass num_microbatches=..."
            ) from None


def _append_losses(found: list[Tensor], losses: list[Tensor], engine: Engine) -> Tensor:
    """Append this rank's losses to ``losses`` and return their mean."""
    losses += found
    return torch.stack(found).mean() if found else torch.zeros((), device=engine.comms.control.device)
