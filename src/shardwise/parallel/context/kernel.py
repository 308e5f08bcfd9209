"""Attention of some queries to one block of keys, with the log-sum-exp that joins blocks.

``torch.nn.functional.scaled_dot_product_attention`` returns no log-sum-exp, and its backward does not accept that of
several blocks. So the operators that it calls are used directly (``torch.ops.aten``; their schemas are public, the
names have a leading underscore). A public function with both would replace this file.

Shape suffixes: ``B`` batch, ``H`` heads, ``Q`` queries, ``K`` keys, ``D`` head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_aten = torch.ops.aten

Triple = tuple[Tensor, Tensor, Tensor]


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over blocks."""
    return torch.float32 if dtype in {torch.float16, torch.bfloat16} else dtype


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Compute attention to one block, (B, H, Q, D), and the log-sum-exp of the scores of each query, (B, H, Q).

    Args:
        q: Queries (B, H, Q, D).
        k: Keys (B, H or a divisor of it, K, D).
        v: Values, in the shape of the keys, or narrower.
        scale: Factor of the scores.
        is_causal: Whether query ``i`` attends only to keys ``0`` to ``i``.
    """
    width = v.shape[-1]
    k, v = (_for_all_heads(t, q) for t in (k, _widened(v, q)))
    if is_fused(q, k, v, is_causal=is_causal):
        if q.device.type == "cuda":
            out, lse = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[:2]  # noqa: SLF001
        else:
            out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)  # noqa: SLF001
        return out[..., :width], lse
    scores = _scores(q, k, scale, is_causal=is_causal)
    lse = scores.logsumexp(-1)
    return ((scores - lse.unsqueeze(-1)).exp() @ v.to(scores.dtype))[..., :width].to(q.dtype), lse


def attend_backward(
    grad: Tensor, block: Triple, result: tuple[Tensor, Tensor], scale: float, *, is_causal: bool
) -> Triple:
    """Compute the gradients of queries, keys and values of one block."""
    (q, k, v), (out, lse) = block, result
    num_heads, width = k.shape[1], v.shape[-1]
    grad, out, v = (_widened(t, q) for t in (grad, out, v))
    k, v = (_for_all_heads(t, q) for t in (k, v))
    if is_fused(q, k, v, is_causal=is_causal):
        dq, dk, dv = _fused_backward(grad, (q, k, v), (out, lse), scale, is_causal=is_causal)
    else:
        weights = (_scores(q, k, scale, is_causal=is_causal) - lse.unsqueeze(-1)).exp()
        grad, out, q, k, v = (t.to(weights.dtype) for t in (grad, out, q, k, v))
        delta = (grad * out).sum(-1, keepdim=True)
        dscores = weights * (grad @ v.transpose(-2, -1) - delta) * scale
        dq, dk, dv = dscores @ k, dscores.transpose(-2, -1) @ q, weights.transpose(-2, -1) @ grad
    return dq, _of_own_heads(dk, num_heads), _of_own_heads(dv, num_heads)[..., :width]


def _fused_backward(
    grad: Tensor, block: Triple, result: tuple[Tensor, Tensor], scale: float, *, is_causal: bool
) -> Any:
    (q, k, v), (out, lse) = block, result
    if q.device.type != "cuda":
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001
        return backward(grad, q, k, v, out, lse, 0.0, is_causal, scale=scale)
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)  # random state, and lengths of packed sequences
    lengths = q.shape[2], k.shape[2]
    backward = _aten._scaled_dot_product_flash_attention_backward  # noqa: SLF001
    return backward(
        grad, q, k, v, out, lse.contiguous(), None, None, *lengths, 0.0, is_causal, unused, unused, scale=scale
    )


def is_fused(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> bool:
    """Whether a fused operator exists, which does not store the block's scores. Meta tensors count as CPU tensors.

    CUDA's needs head widths that are multiples of 8. Other widths, which no known model has, are computed unfused.
    """
    if q.device.type == "cuda":
        case = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, is_causal, False)  # noqa: FBT003
        return q.shape[-1] % 8 == 0 and torch.backends.cuda.can_use_flash_attention(case)
    return q.device.type in {"cpu", "meta"} and q.shape[-1] == v.shape[-1]


def _scores(q: Tensor, k: Tensor, scale: float, *, is_causal: bool) -> Tensor:
    scores = (q.to(sum_dtype(q.dtype)) * scale) @ k.to(sum_dtype(q.dtype)).transpose(-2, -1)
    if not is_causal:
        return scores
    is_past = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~is_past, float("-inf"))


def _widened(t: Tensor, q: Tensor) -> Tensor:
    """Append zeros to rows that are narrower than the queries' (latent attention); fused operators need one width."""
    return t if t.shape[-1] >= q.shape[-1] else F.pad(t, (0, q.shape[-1] - t.shape[-1]))


def _for_all_heads(t: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values for every query head."""
    return t if t.shape[1] == q.shape[1] else t.repeat_interleave(q.shape[1] // t.shape[1], 1)


def _of_own_heads(grad: Tensor, num_heads: int) -> Tensor:
    """Undo :func:`_for_all_heads` for gradients: sum those of query heads that share a key-value head."""
    return grad if grad.shape[1] == num_heads else grad.unflatten(1, (num_heads, -1)).sum(2)
