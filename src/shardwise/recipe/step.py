"""One training step's forward and backward, the same call for every plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.fsdp import attach
from shardwise.fsdp.api import gradient_sync
from shardwise.spec.errors import StateError

LossFn = Callable[[Any, Any], Tensor]


def train_step(
    model: nn.Module, batch: Any, loss_fn: LossFn | None = None, num_microbatches: int | None = None
) -> Tensor:
    """Forward and backward on this rank's ``batch``; afterwards gradients are on the parameters.

    A dict is called ``model(**batch)``, a tuple or list ``model(*batch)``, anything else ``model(batch)``. The loss is
    ``loss_fn(output, batch)``, else ``output.loss``, else an output without dimensions.

    Args:
        model: A parallelized model.
        batch: This rank's samples; tensors are split on dim 0 into microbatches.
        loss_fn: Gives a scalar from the output and the (micro)batch.
        num_microbatches: ``None``: one. Microbatch losses are averaged unweighted; all but the last backward run under
            ``gradient_sync(model, False)``.

    Returns:
        The mean loss over microbatches and ranks, detached, the same value on every rank.

    Collective:
        Those of forward and backward, and one all-reduce of a float64 for the loss. All ranks must call.

    Raises:
        StateError: The batch cannot be split, or there is no scalar loss.
    """
    runtime = attach.runtime_of(model, "sw.train_step")
    count = 1 if num_microbatches is None else num_microbatches
    parts = split_batch(batch, count)
    synchronises = runtime.syncs_gradients  # false inside the caller's own gradient_sync(model, False)
    total = torch.zeros((), dtype=torch.float64, device=runtime.comms.control.device)
    dtype = torch.float32
    for index, part in enumerate(parts):
        with gradient_sync(model, synchronises and index == count - 1):
            loss = forward_loss(model, part, loss_fn)
            (loss / count if count > 1 else loss).backward()
            total += loss.detach().double()
            dtype = loss.dtype
    mean = (total / count).reshape(1)
    num_ranks = runtime.comms.num_ranks if runtime.join is None else runtime.join.count_for_loss()
    runtime.comms.control.all_reduce(mean, unit="loss", divisor=num_ranks).wait()
    return mean.squeeze(0).to(dtype)


def forward_loss(model: nn.Module, batch: Any, loss_fn: LossFn | None = None) -> Tensor:
    """The scalar loss of ``model`` on ``batch``, as :func:`train_step` finds it.

    Raises:
        StateError: There is none.
    """
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, (tuple, list)):
        output = model(*batch)
    else:
        output = model(batch)
    loss = loss_fn(output, batch) if loss_fn is not None else getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        shown = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss).__name__}"
        raise StateError(
            f"{type(model).__name__} gave {shown} where a scalar loss was expected.\n"
            "  Pass loss_fn=lambda output, batch: ..., or let the model return its loss."
        )
    return loss


def split_batch(batch: Any, count: int) -> list[Any]:
    """``count`` parts of a batch, every tensor in it cut evenly on dim 0.

    Raises:
        StateError: A tensor's dim 0 is not divisible by ``count``.
    """
    if count < 1:
        raise StateError(f"num_microbatches={count}: expected at least 1.")
    if count == 1:
        return [batch]
    if isinstance(batch, Tensor):
        if batch.dim() == 0 or batch.shape[0] % count:
            raise StateError(
                f"a batch tensor of shape {list(batch.shape)} cannot be cut into {count} equal parts on dim 0.\n"
                "  Choose a batch size that is a multiple of it."
            )
        return list(batch.chunk(count))
    if isinstance(batch, Mapping):
        parts = {key: split_batch(value, count) for key, value in batch.items()}
        return [{key: part[index] for key, part in parts.items()} for index in range(count)]
    if isinstance(batch, (tuple, list)):
        columns = [split_batch(value, count) for value in batch]
        rows = [[column[index] for column in columns] for index in range(count)]
        return [type(batch)(*row) if hasattr(batch, "_fields") else type(batch)(row) for row in rows]
    return [batch] * count
