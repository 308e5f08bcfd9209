"""Cross entropy of logits of which every rank has the columns of some ids. No rank ever has all logits.

Each rank reduces its logits of a position to three numbers: their maximum, the sum of their exponentials above the
maximum, and the target's logit if the rank has it. These are gathered, and every rank computes the same loss from them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.comm.base import Comm
from shardwise.parallel.tensor.layer import Column, ReplacedForward, check_ids
from shardwise.parallel.tensor.mappings import gather_from_tp


class Vocabulary:
    """The division of ids over the ranks."""

    def __init__(self, sizes: Sequence[int], comm: Comm) -> None:
        self.sizes = tuple(sizes)
        self.start = sum(sizes[: comm.rank])
        self.stop = self.start + sizes[comm.rank]
        self.comm = comm

    def cross_entropy(
        self, logits: Tensor, targets: Tensor, unit: str, *, ignored: int = -100, num_items: Any = None
    ) -> Tensor:
        """As ``F.cross_entropy`` of all logits, in fp32 or wider.

        Args:
            logits: (positions, ids of this rank).
            targets: (positions,).
            unit: Path of the module, for traces.
            ignored: The target of ignored positions.
            num_items: Divisor of the sum; ``None``: the number of positions that are not ignored.

        Collective:
            All-gather on ``tp`` of three numbers for each position.
        """
        check_ids(targets, sum(self.sizes), f"{unit!r}: a target", ignored=ignored)
        is_counted = targets != ignored
        losses = _CrossEntropy.apply(logits, targets, self, unit).masked_fill(~is_counted, 0)
        return losses.sum() / (is_counted.sum() if num_items is None else num_items)


class GPTLoss(ReplacedForward):
    """The loss of our GPT, computed from this rank's logits; ``sizes`` are the numbers of ids by rank."""

    def __init__(self, module: nn.Module, name: str, comm: Comm, *, sizes: Sequence[int]) -> None:
        super().__init__(module, name, comm)
        self._vocabulary = Vocabulary(sizes, comm)

    def __call__(self, logits_BTV: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the loss, or without targets all logits."""
        if targets is None:
            return gather_from_tp(logits_BTV, self._vocabulary.sizes, self.comm, self.name)
        return self._vocabulary.cross_entropy(logits_BTV.flatten(0, 1), targets.flatten().long(), self.name)


class VocabularyHead(Column):
    """An output projection to all logits, or to this rank's logits while its model computes a loss (``CausalLoss``)."""

    is_local = False
    has_returned_part = False  # whether it has returned this rank's logits in the present forward

    def __init__(self, module: nn.Module, name: str, comm: Comm, *, sizes: Sequence[int]) -> None:
        super().__init__(module, name, comm)
        self.vocabulary = Vocabulary(sizes, comm)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Map (..., inputs), replicated, to (..., all ids) or (..., ids of this rank)."""
        y = super().__call__(*args, **kwargs)
        self.has_returned_part = self.is_local
        return y if self.is_local else gather_from_tp(y, self.vocabulary.sizes, self.comm, self.name)


class CausalLoss:
    """The ``loss_function`` of a causal language model of transformers.

    A call of the model with labels computes the loss from each rank's logits, and its output has no ``logits``.
    """

    def __init__(self, head: VocabularyHead, original: Callable[..., Tensor]) -> None:
        self._head = head
        self._original = original

    def install(self, model: nn.Module) -> None:
        """Replace the model's loss."""
        model.__dict__["_loss_function"] = self  # read by the property ``loss_function``
        position = [*inspect.signature(type(model).forward).parameters].index("labels") - 1
        head = self._head

        def begin(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            labels = args[position] if len(args) > position else kwargs.get("labels")
            head.is_local, head.has_returned_part = labels is not None, False

        def end(_module: nn.Module, _args: object, output: Any) -> Any:
            head.is_local = False  # a stage of a pipeline may not have run the head
            return without_logits(output) if head.has_returned_part and output is not None else None

        model.register_forward_pre_hook(begin, with_kwargs=True)
        model.register_forward_hook(end, always_call=True)

    def __call__(self, logits: Tensor, labels: Tensor, vocab_size: int, *args: Any, **kwargs: Any) -> Tensor:
        """Return the mean cross entropy of each position's next label, as transformers' ``ForCausalLMLoss``."""
        if not self._head.is_local:
            return self._original(logits, labels, vocab_size, *args, **kwargs)
        return self._local(logits, labels, *args, **kwargs)

    def _local(
        self,
        logits: Tensor,
        labels: Tensor,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_kwargs: Any,
    ) -> Tensor:
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        return self._head.vocabulary.cross_entropy(
            logits.flatten(0, -2),
            shift_labels.flatten().to(logits.device),
            self._head.name,
            ignored=ignore_index,
            num_items=num_items_in_batch,
        )


def loss_of(model: nn.Module) -> Any:
    """The ``loss_function`` of a transformers model; ``None`` if it has none."""
    return getattr(model, "loss_function", None)


def has_loss(model: nn.Module) -> bool:
    """Whether ``model`` computes a loss that :class:`CausalLoss` can replace."""
    forward = inspect.unwrap(type(model).forward)
    return (
        getattr(loss_of(model), "__name__", "") == "ForCausalLMLoss"
        and "loss_function" in forward.__code__.co_names
        and "labels" in inspect.signature(forward).parameters
    )


def has_divided_logits(model: nn.Module) -> bool:
    """Whether :class:`CausalLoss` is installed: called with labels, no rank gathers all logits."""
    return isinstance(model.__dict__.get("_loss_function"), CausalLoss)


def without_logits(output: Any) -> Any:
    """Return an output of a transformers model without its logits."""
    if isinstance(output, tuple):
        return (output[0], None, *output[2:])
    return type(output)(**{name: value for name, value in output.items() if name != "logits"})


class _CrossEntropy(torch.autograd.Function):
    """The loss of each position. Saves this rank's part of the softmax for backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocabulary: Vocabulary, unit: str) -> Tensor:
        comm = vocabulary.comm
        wide = torch.float32 if logits.dtype in {torch.float16, torch.bfloat16} else logits.dtype
        x = logits.to(wide, copy=True)
        is_own = (targets >= vocabulary.start) & (targets < vocabulary.stop)
        local = (targets - vocabulary.start).masked_fill(~is_own, 0).unsqueeze(1)
        found = x.new_empty(comm.size, 3, x.shape[0])
        largest, total, chosen = found[comm.rank]
        torch.amax(x, dim=1, out=largest)
        largest.clamp_(min=torch.finfo(wide).min)  # if all are -inf, differences are -inf instead of NaN
        chosen.copy_(x.gather(1, local).squeeze(1).masked_fill_(~is_own, 0))
        torch.sum(x.sub_(largest.unsqueeze(1)).exp_(), dim=1, out=total)
        comm.all_gather(found.view(-1), unit=unit).wait()
        top = found[:, 0].amax(dim=0)
        sum_of_all = (found[:, 1] * (found[:, 0] - top).exp()).sum(dim=0)
        x.mul_(((largest - top).exp() / sum_of_all).unsqueeze(1))
        ctx.save_for_backward(x, local, is_own)
        ctx.dtype = logits.dtype
        return sum_of_all.log() + top - found[:, 2].sum(dim=0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        softmax, local, is_own = ctx.saved_tensors
        dlogits = softmax * grad.unsqueeze(1)
        dlogits.scatter_add_(1, local, (-grad).masked_fill(~is_own, 0).unsqueeze(1))
        return dlogits.to(ctx.dtype), None, None, None
