"""Dropout of tensors that are divided over the ranks of ``tp``.

GPT-2, BERT, ViT and T5 of transformers and our GPT need it: their default configurations drop attention weights or
features (T5) of layers that ``tp`` divides. All ranks of ``tp`` must have the same random state, as for dropout of
replicated tensors, and keep it equal. Each rank draws the mask of its part with a different seed (:func:`rank_rng`).
The seed is derived from the common state, so that recomputation and resumed runs repeat the mask.
"""

from __future__ import annotations

import contextlib
import ctypes
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shardwise.comm.base import Comm
from shardwise.parallel.tensor.layer import ReplacedForward

#: Attributes of attention modules with a dropout rate, or an ``nn.Dropout``.
_RATES = ("dropout", "attention_dropout", "attn_dropout")
#: An odd number without pattern. Adding 1 would give the seeds of neighbouring data-parallel ranks.
_GOLDEN = 0x9E3779B97F4A7C15


class FeatureDropout(ReplacedForward):
    """An ``nn.Dropout`` of features that are divided over the ranks."""

    def __call__(self, x: Tensor) -> Tensor:
        """Drop elements of this rank's part."""
        module = self.module
        if not module.training or not module.p:
            return x
        with rank_rng(self.comm.rank, x.device):
            return F.dropout(x, module.p)


class SequenceDropout(FeatureDropout):
    """An ``nn.Dropout`` of positions that are divided over the ranks."""


class HeadDropout(ReplacedForward):
    """An attention module of which this rank computes some heads."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the class's forward, with this rank's dropout of attention weights."""
        module = self.module
        if not module.training:
            return type(module).forward(module, *args, **kwargs)
        with _RankDropout(self.comm):
            return type(module).forward(module, *args, **kwargs)


def has_attention_dropout(module: nn.Module) -> bool:
    """Whether an attention module has dropout of attention weights."""
    values = [getattr(module, name, 0.0) for name in _RATES]
    rates = [value.p if isinstance(value, nn.Dropout) else value for value in values]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


class _RankDropout(TorchFunctionMode):
    """Makes attention draw dropout masks of this rank's heads (dimension 1) with the rank's seed."""

    def __init__(self, comm: Comm) -> None:
        super().__init__()
        self._comm = comm

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first: Any = next(iter((*args, *kwargs.values())), None)
        if func is F.scaled_dot_product_attention or (func is F.dropout and first.dim() == 4):
            with rank_rng(self._comm.rank, first.device):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


@contextlib.contextmanager
def rank_rng(rank: int, device: torch.device) -> Iterator[None]:
    """Draw random numbers with a seed of this rank inside; afterwards the common state has advanced on all ranks.

    A GPU's generator has a seed and an offset; only the seed is replaced. The CPU's generator has neither: the seed is
    a digest of its state, and one number is drawn afterwards.
    """
    if device.type == "cuda":
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
    elif device.type == "cpu":
        state = torch.get_rng_state()
        digest = zlib.crc32(ctypes.string_at(state.data_ptr(), state.nbytes))  # no torch operations: modes may be on
        torch.default_generator.manual_seed((digest + (rank + 1) * _GOLDEN) % 2**63)
        try:
            yield
        finally:
            torch.set_rng_state(state)
            torch.rand(())
    else:
        yield
