"""Ring attention over a sequence of which every rank has a part: keys and values are sent around, queries stay.

In hop ``h`` rank ``r`` has the block of rank ``r - h``. It sends the block to rank ``r + 1`` and receives the next one
while it computes, so that communication overlaps with computation. Partial outputs are joined after each hop, by their
log-sum-exp (Liu, Zaharia and Abbeel, "Ring Attention", arXiv 2310.01889). A rank never stores more than two blocks of
keys and values, and for backward only its own.

Backward sends keys and values around again. The rank after the owner of a block starts the block's gradient. The
gradient follows the block, every rank adds its term, and it reaches the owner after the last hop.

Shape suffixes: ``B`` batch, ``H`` heads, ``T`` positions of this rank, ``D`` head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.comm.base import Comm
from shardwise.parallel.context.kernel import attend, attend_backward, sum_dtype
from shardwise.spec.traffic.context import ring_part


@dataclass(frozen=True)
class Ring:
    """Ring attention of one module.

    Attributes:
        comm: Comm of ``cp``.
        unit: Path of the module, for traces.
    """

    comm: Comm
    unit: str

    def __call__(
        self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, *, scale: float | None = None, is_causal: bool = True
    ) -> Tensor:
        """Compute attention of this rank's queries to the full sequence, (B, H, T, D).

        Args:
            q_BHTD: Queries of this rank's positions, as ``spec.traffic.context`` divides them.
            k_BHTD: Keys; their number of heads divides that of the queries.
            v_BHTD: Values.
            scale: Factor of the scores; ``None``: one over the square root of the head width.
            is_causal: Whether a position attends only to itself and earlier positions.

        Collective:
            ``size - 1`` messages to the next rank of ``cp``, each a block of keys and values; twice as many in
            backward. All ranks must call.
        """
        scale = q_BHTD.shape[-1] ** -0.5 if scale is None else scale
        return _Attention.apply(q_BHTD, k_BHTD, v_BHTD, self, scale, is_causal)

    def start_rotation(self, block: Tensor) -> Callable[[], Tensor]:
        """Start to send ``block`` to the next rank, and to receive a block of that size from the previous one.

        Returns:
            A function that waits, and returns the received block. After that, ``block`` may be written again.
        """
        rank, size = self.comm.rank, self.comm.size
        received = torch.empty_like(block)
        sends = [(block, (rank + 1) % size, self.unit)]
        handle = self.comm.exchange(sends, [(received, (rank - 1) % size, self.unit)])

        def wait() -> Tensor:
            handle.wait()
            return received

        return wait


class _KeyValue:
    """Keys and values, or their gradients, in one flat buffer, so that they are sent in one message."""

    def __init__(self, k: Tensor, v: Tensor, flat: Tensor) -> None:
        self.flat = flat
        self._shapes = k, v
        self.k = flat[: k.numel()].view(k.shape)
        self.v = flat[k.numel() :].view(v.shape)

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> _KeyValue:
        """Make a copy of keys and values."""
        pair = cls(k, v, k.new_empty(k.numel() + v.numel()))
        pair.k.copy_(k)
        pair.v.copy_(v)
        return pair

    @classmethod
    def zeros(cls, k: Tensor, v: Tensor, dtype: torch.dtype) -> _KeyValue:
        """Make zeros in the shapes of keys and values, for sums."""
        return cls(k, v, k.new_zeros(k.numel() + v.numel(), dtype=dtype))

    def with_content(self, flat: Tensor) -> _KeyValue:
        """Make a pair of the same shapes over the memory of ``flat``."""
        return _KeyValue(*self._shapes, flat)


class _Attention(torch.autograd.Function):
    """See the module's docstring. Saves this rank's queries, keys, values and outputs, and one number per query."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, scale: float, is_causal: bool) -> Tensor:  # noqa: FBT001, PLR0917 - autograd passes by position
        rank, size = ring.comm.rank, ring.comm.size
        block = _KeyValue.of(k, v)
        out = lse = torch.empty(0)
        for hop in range(size):
            next_block = ring.start_rotation(block.flat) if hop < size - 1 else None
            rows, columns, diagonal = ring_part(rank, (rank - hop) % size, q.shape[2], is_causal=is_causal)
            partial, log_sum = attend(
                q[:, :, rows], block.k[:, :, columns], block.v[:, :, columns], scale, is_causal=diagonal
            )
            if hop == 0:
                # Copies: selective recomputation keeps what was computed, unless it is written to.
                out, lse = partial.to(sum_dtype(q.dtype), copy=True), log_sum.clone()
            else:
                _join(out[:, :, rows], lse[:, :, rows], partial, log_sum)
            if next_block is not None:
                block = block.with_content(next_block())
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = ring, scale, is_causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        ring, scale, is_causal = ctx.options
        rank, size = ring.comm.rank, ring.comm.size
        grad = grad.contiguous()
        block = _KeyValue.of(k, v)
        dq = torch.zeros_like(q, dtype=sum_dtype(q.dtype))
        own = total = _KeyValue.zeros(k, v, sum_dtype(k.dtype))
        next_total: Callable[[], Tensor] | None = None
        for hop in range(size):
            next_block = ring.start_rotation(block.flat) if hop < size - 1 else None
            rows, columns, diagonal = ring_part(rank, (rank - hop) % size, q.shape[2], is_causal=is_causal)
            dq_rows, dk, dv = attend_backward(
                grad[:, :, rows],
                (q[:, :, rows], block.k[:, :, columns], block.v[:, :, columns]),
                (out[:, :, rows], lse[:, :, rows]),
                scale,
                is_causal=diagonal,
            )
            dq[:, :, rows].add_(dq_rows)  # `+=` would also copy the sum onto itself
            if hop:
                total = (
                    _KeyValue.zeros(k, v, sum_dtype(k.dtype)) if next_total is None else own.with_content(next_total())
                )
            total.k[:, :, columns].add_(dk)
            total.v[:, :, columns].add_(dv)
            if hop:
                next_total = ring.start_rotation(total.flat)
            if next_block is not None:
                block = block.with_content(next_block())
        if next_total is not None:
            own.flat.add_(next_total())
        return dq.to(q.dtype), own.k.to(k.dtype), own.v.to(v.dtype), None, None, None


def _join(out: Tensor, lse: Tensor, partial: Tensor, log_sum: Tensor) -> None:
    """Join one more block to ``out`` and ``lse``, in place."""
    total = torch.logaddexp(lse, log_sum)
    out.mul_((lse - total).exp_().unsqueeze(-1)).add_(partial * (log_sum - total).exp_().unsqueeze(-1))
    lse.copy_(total)
