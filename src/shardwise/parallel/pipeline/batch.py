"""Batches: calling a model with one, computing its loss, and splitting it into microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.spec.errors import StateError

#: Name of the argument in transformers' trainer.
_NUM_ITEMS = "num_items_in_batch"

#: In the ``__dict__`` of a pipeline's model until its first loss with a gradient: names of this rank's own weights.
UNCHECKED_KEY = "_shardwise_unchecked"
#: ``loss_fn(output, batch)``.
LossFn = Callable[[Any, Any], Tensor]
#: ``forward(model, batch)`` returns the model's output.
Forward = Callable[[nn.Module, Any], Any]


def forward_loss(model: nn.Module, batch: Any, loss_fn: LossFn | None = None, forward: Forward | None = None) -> Tensor:
    """Compute the scalar loss of ``model`` on ``batch``, as ``sw.train_step`` does."""
    output = (forward or call_model)(model, batch)
    if loss_fn is not None:
        loss = scalar_loss(loss_fn(output, batch), "the loss function", "Return the mean over the batch")
        if loss.requires_grad and (names := model.__dict__.pop(UNCHECKED_KEY, None)):
            weights = {name: p for name, p in model.named_parameters() if name in names}
            _refuse_read_weights(loss, [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)], weights)
        return loss
    return scalar_loss(getattr(output, "loss", output), type(model).__name__)


def _refuse_read_weights(loss: Tensor, outputs: Sequence[Tensor], weights: Mapping[str, Tensor]) -> None:
    """Refuse a loss that reads a stage's weights by itself, not only by the model's outputs."""
    forward = {node for output in outputs for node in _nodes(output.grad_fn, set())}
    operations = {node for node in forward if not hasattr(node, "variable")}
    leaves = {id(node.variable) for node in _nodes(loss.grad_fn, operations) if hasattr(node, "variable")}
    read = [name for name, weight in weights.items() if id(weight) in leaves]
    if read:
        raise StateError(
            f"the loss function reads {read[0]!r}. It runs on the last stage of the pipeline, where model.parameters()"
            " are those of this rank alone.\n"
            "  Use weight_decay of the optimizer for a penalty on weights, and call a head in the model's forward."
        )


def _nodes(node: Any, seen: set[Any]) -> Iterator[Any]:
    """Yield the autograd nodes below ``node``, itself included, that are not in ``seen``, once each."""
    nodes, seen = [node], {None, *seen}
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            yield node
            nodes += [before for before, _ in node.next_functions]


def scalar_loss(loss: Any, what: str, advice: str = "Pass loss_fn=lambda output, batch: ...") -> Tensor:
    """Return ``loss`` if it is a tensor without dimensions; otherwise raise ``StateError`` about ``what``."""
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        shown = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss).__name__}"
        raise StateError(
            f"{what} gave {shown} where a scalar loss was expected.\n  {advice}, or let the model return its loss."
        )
    return loss


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call ``model(**batch)``, ``model(*batch)`` or ``model(batch)``, by the type of ``batch``."""
    args, kwargs = arguments_of(batch)
    return model(*args, **kwargs)


def arguments_of(batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments by position and by name with which a model is called for ``batch``."""
    if isinstance(batch, Mapping):
        return (), batch
    return (batch if isinstance(batch, (tuple, list)) else (batch,)), {}


def split_batch(batch: Any, count: int) -> list[Any]:
    """Split a batch into ``count`` parts: every tensor in it is split evenly on dim 0.

    A tensor without dimensions, and one of a single row if others have several, is repeated in every part. The number
    of items by which transformers' models divide the sum of their losses is divided by ``count``, because the losses
    of parts are averaged.
    """
    if count < 1:
        raise StateError(f"num_microbatches={count}: expected at least 1.")
    return [batch] if count == 1 else _split(batch, count, num_rows(batch))


def num_rows(batch: Any) -> int:
    """Number of samples in a batch: the longest dim 0 of its tensors; 0 without tensors."""
    return max((leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), default=0)


def fitting_count(batch: Any, count: int) -> int:
    """The largest number of parts, up to ``count``, into which the samples of a batch can be split evenly."""
    rows = num_rows(batch)
    return next(fewer for fewer in range(max(1, min(count, rows)), 0, -1) if rows % fewer == 0)


def _split(batch: Any, count: int, rows: int) -> list[Any]:
    if isinstance(batch, Tensor):
        if rows and (batch.dim() == 0 or (batch.shape[0] == 1 and rows > 1)):
            return [batch] * count
        if batch.dim() == 0 or batch.shape[0] % count:
            raise StateError(
                f"a batch tensor of shape {list(batch.shape)} cannot be cut into {count} equal parts on dim 0.\n"
                "  Choose a batch size that is a multiple of it."
            )
        return list(batch.chunk(count))
    if isinstance(batch, Mapping):
        parts = {key: _split(value, count, rows) for key, value in batch.items()}
        if _NUM_ITEMS in batch and batch[_NUM_ITEMS] is not None:
            parts[_NUM_ITEMS] = [batch[_NUM_ITEMS] / count] * count
        return [{key: part[index] for key, part in parts.items()} for index in range(count)]
    if isinstance(batch, (tuple, list)):
        columns = [_split(value, count, rows) for value in batch]
        lines = [[column[index] for column in columns] for index in range(count)]
        return [type(batch)(*row) if hasattr(batch, "_fields") else type(batch)(row) for row in lines]
    return [batch] * count
