"""A batch: how a model is called with it, what its loss is, and how it is cut into microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from shardwise.spec.errors import StateError

LossFn = Callable[[Any, Any], Tensor]


def forward_loss(model: nn.Module, batch: Any, loss_fn: LossFn | None = None) -> Tensor:
    """The scalar loss of ``model`` on ``batch``, as ``sw.train_step`` finds it.

    Raises:
        StateError: There is none.
    """
    output = call_model(model, batch)
    loss = loss_fn(output, batch) if loss_fn is not None else getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        shown = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss).__name__}"
        raise StateError(
            f"{type(model).__name__} gave {shown} where a scalar loss was expected.\n"
            "  Pass loss_fn=lambda output, batch: ..., or let the model return its loss."
        )
    return loss


def call_model(model: nn.Module, batch: Any) -> Any:
    """``model(**batch)``, ``model(*batch)`` or ``model(batch)``."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


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
