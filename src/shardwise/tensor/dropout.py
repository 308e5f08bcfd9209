"""Dropout of tensors that are divided over the ranks of ``tp``.

GPT-2, BERT, ViT and T5 of transformers and our GPT need it: their default configurations drop attention weights or
features (T5) inside of what ``tp`` divides. All ranks of ``tp`` must have the same random state, as for dropout of
replicated tensors, and keep the same state.

* On the CPU each rank draws the plain model's whole mask and takes its part: ranks drop what one process drops.
* On CUDA, where a fused attention draws inside of its kernel, each rank draws under a seed of its own
  (:func:`drawing_own`). Recomputation and resumed runs repeat it, because the seed follows from the common state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shardwise.comm.base import Comm
from shardwise.tensor.layer import ReplacedForward

#: Attributes of attention modules that hold a rate, or an ``nn.Dropout``.
_RATES = ("dropout", "attention_dropout", "attn_dropout")


class FeatureDropout(ReplacedForward):
    """An ``nn.Dropout`` of features that are divided over the ranks."""

    dim = -1

    def __call__(self, x: Tensor) -> Tensor:
        """This rank's part, to the same."""
        module = self.module
        return _dropped(x, self.dim, module.p, self.comm) if module.training and module.p else x


class SequenceDropout(FeatureDropout):
    """An ``nn.Dropout`` of positions that are divided over the ranks."""

    dim = 1


class HeadDropout(ReplacedForward):
    """An attention module of whose heads this rank computes some."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The class's forward."""
        module = self.module
        if not module.training:
            return type(module).forward(module, *args, **kwargs)
        with _OwnHeads(self.comm):
            return type(module).forward(module, *args, **kwargs)


def drops(module: nn.Module) -> bool:
    """Whether an attention module drops weights."""
    values = [getattr(module, name, 0.0) for name in _RATES]
    rates = [value.p if isinstance(value, nn.Dropout) else value for value in values]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


class _OwnHeads(TorchFunctionMode):
    """Lets attention drop what the plain model drops of this rank's heads, which are dimension 1."""

    def __init__(self, comm: Comm) -> None:
        super().__init__()
        self._comm = comm

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: FBT001, FBT002 - torch's signature
        if not training or p == 0 or x.dim() != 4:
            return F.dropout(x, p, training, inplace)
        return _dropped(x, 1, p, self._comm)

    def _attention(  # noqa: PLR0917 - torch's signature
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002
        **kwargs: Any,
    ) -> Tensor:
        if dropout_p == 0:
            return F.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, **kwargs)
        if q.device.type != "cpu":
            with drawing_own(self._comm.rank, q.device):
                return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, **kwargs)
        scale = kwargs.get("scale") or q.shape[-1] ** -0.5
        groups = q.shape[1] // k.shape[1]  # of query heads, for each of keys and values
        k, v = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (k, v))
        scores = (q * scale) @ k.transpose(-2, -1)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask
        return (scores.softmax(-1) * _own_noise(scores, 1, dropout_p, self._comm)) @ v


@contextlib.contextmanager
def drawing_own(rank: int, device: torch.device) -> Iterator[None]:
    """Inside, draws on a GPU have a seed of this rank; afterwards the state is as if it had drawn in the common one."""
    if device.type != "cuda":
        yield
        return
    common = torch.cuda.default_generators[device.index or 0]
    seed, offset = common.initial_seed(), common.get_offset()
    common.manual_seed((seed + (rank + 1) * _GOLDEN) % 2**63)
    common.set_offset(offset)
    try:
        yield
    finally:
        offset = common.get_offset()
        common.manual_seed(seed)
        common.set_offset(offset)


#: An odd number without pattern: neighbouring seeds are those of neighbouring data-parallel ranks.
_GOLDEN = 0x9E3779B97F4A7C15


def _dropped(x: Tensor, dim: int, p: float, comm: Comm) -> Tensor:
    """Dropout of this rank's part in ``dim``."""
    if x.device.type == "cpu":
        return x * _own_noise(x, dim, p, comm)
    with drawing_own(comm.rank, x.device):
        return F.dropout(x, p)


def _own_noise(like: Tensor, dim: int, p: float, comm: Comm) -> Tensor:
    """This rank's part of the noise that dropout multiplies the whole tensor by; ``like`` is its part in ``dim``."""
    shape = list(like.shape)
    own = shape[dim]
    shape[dim] *= comm.size
    noise = torch.empty(shape, dtype=like.dtype, device=like.device).bernoulli_(1 - p).div_(1 - p)
    return noise.narrow(dim, comm.rank * own, own)
