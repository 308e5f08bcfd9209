"""Replacement of the model's forward: divides a batch by positions over the ranks, and joins the loss or logits.

Nothing changes for the engine: a model is called, computes a loss, and its parameters get gradients. Only this file and
``ring`` know that these are gradients of some positions.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.base import Comm
from shardwise.comm.control import check_same
from shardwise.comm.record import RecordComm
from shardwise.spec.replacement import Replacement
from shardwise.spec.traffic.context import own_ranges, padded_length


class Root(Replacement):
    """Base class of forwards that replace a model's own."""

    def __init__(self, model: nn.Module, comm: Comm, multiple: int) -> None:
        super().__init__(model)
        self._comm = comm
        self._multiple = multiple
        self.is_dry_run = isinstance(comm, RecordComm)  # a dry run: no peers, and no values
        self._has_compared = self.is_dry_run

    def divide(self, whole_BT: Tensor, targets_BT: Tensor | None = None) -> Division:
        """Divide sequences of the shape of ``whole_BT``. The first call compares tokens and targets between the ranks.

        Collective:
            In the first call an all-gather of one integer on ``cp``.
        """
        if not self._has_compared:
            self._has_compared = True
            batch = [t.tolist() for t in (whole_BT, targets_BT) if t is not None]
            digest = zlib.crc32(repr(batch).encode())
            check_same(
                self._comm,
                digest,
                f"cp: the {self._comm.size} ranks that divide each sequence were called with different tokens, or"
                " targets",
                "Give all ranks of a cp group the same batch: only ranks that differ on a data-parallel axis read other"
                " samples.",
            )
        return Division(whole_BT.shape[1], self._comm, multiple=self._multiple, device=whole_BT.device)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on full sequences.

        Collective:
            As :class:`~shardwise.parallel.context.ring.Ring`, and :meth:`Division.mean_loss` or, without targets,
            :meth:`Division.join`. With a key-value cache none, because every rank computes full sequences.
        """


class GPTRoot(Root):
    """The forward of our GPT."""

    def __call__(self, tokens: Tensor, targets: Tensor | None = None, *, cache: Any = None) -> Tensor:
        """Return the mean loss over full sequences, or without targets all logits."""
        if cache is not None:
            return self.original(tokens, targets, cache=cache)
        self.module.check(tokens, targets)
        division = self.divide(tokens, targets)
        own_BT, positions_T = division.own_positions(tokens), division.positions_T
        if targets is None:
            return division.join(self.original(own_BT, positions=positions_T), "logits")
        own_targets_BT = division.own_targets(targets)
        loss = self.original(own_BT, own_targets_BT, positions=positions_T)
        return division.mean_loss(loss, own_targets_BT, targets)


#: The target of ignored positions, as in ``F.cross_entropy``.
IGNORED = -100


class Division:
    """The division of sequences of one length over the ranks.

    Sequences that cannot be divided evenly are padded with their last token, and with ignored targets. Under causal
    attention no other position sees the padding.
    """

    def __init__(self, length: int, comm: Comm, *, multiple: int, device: torch.device) -> None:
        self.length = length
        self.comm = comm
        self.padded = padded_length(length, comm.size, multiple)
        ranges = own_ranges(self.padded, comm.size, comm.rank)
        places_T = torch.cat([torch.arange(start, stop, device=device) for start, stop in ranges])
        self.positions_T = places_T.clamp(max=length - 1)
        self._is_padding_T = places_T >= length

    def own_positions(self, whole_BT: Tensor) -> Tensor:
        """Return this rank's positions, (B, own T, ...) of (B, T, ...)."""
        return whole_BT.index_select(1, self.positions_T)

    def own_targets(self, whole_BT: Tensor) -> Tensor:
        """Return this rank's targets, with padding ignored."""
        own_BT = self.own_positions(whole_BT)
        return own_BT if self.padded == self.length else own_BT.masked_fill(self._is_padding_T, IGNORED)

    def join(self, own_BTV: Tensor, unit: str) -> Tensor:
        """Join every rank's positions to the full sequence, (B, T, V).

        Collective:
            All-gather on ``cp``; in backward a reduce-scatter of the gradient.
        """
        return _GatherPositions.apply(own_BTV, self, unit)

    def mean_loss(self, loss: Tensor, own_BT: Tensor, whole_BT: Tensor, divisor: Any = None) -> Tensor:
        """Return the mean loss over the targets of full sequences that are not ignored, the same on every rank.

        Collective:
            All-reduce of one float64 on ``cp``.
        """
        num_all = (whole_BT != IGNORED).sum() if divisor is None else divisor
        return _MeanLoss.apply(loss, (own_BT != IGNORED).sum(), num_all, self.comm)


class _MeanLoss(torch.autograd.Function):
    """The mean loss. Backward multiplies a rank's gradient by the number of ranks, over which the engine averages."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, num_own: Tensor, num_all: Any, comm: Comm) -> Tensor:
        # A mean over no targets is NaN.
        total = torch.where(num_own > 0, loss.double() * num_own, 0.0).reshape(1)
        comm.all_reduce(total, unit="loss").wait()
        ctx.weight = num_own.double() * comm.size / num_all
        return (total / num_all).to(loss.dtype).squeeze(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return (grad * ctx.weight).to(grad.dtype), None, None, None


class _GatherPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_BTV: Tensor, division: Division, unit: str) -> Tensor:
        ctx.division, ctx.unit = division, unit
        comm = division.comm
        buffer = own_BTV.new_empty(comm.size, *own_BTV.shape)
        buffer[comm.rank].copy_(own_BTV)
        comm.all_gather(buffer.view(-1), unit=unit).wait()
        return reorder_positions(buffer.unbind(0))[:, : division.length]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        division, comm = ctx.division, ctx.division.comm
        whole = grad.new_zeros(grad.shape[0], division.padded, *grad.shape[2:])
        whole[:, : division.length] = grad
        parts = [
            torch.cat([whole[:, start:stop] for start, stop in own_ranges(division.padded, comm.size, rank)], dim=1)
            for rank in range(comm.size)
        ]
        own = torch.empty_like(parts[0])
        comm.reduce_scatter(torch.stack(parts).view(-1), own.view(-1), unit=ctx.unit).wait()
        return own, None, None


def reorder_positions(parts: Sequence[Tensor]) -> Tensor:
    """Join the ranks' positions (dimension 1) in the order of the sequence."""
    halves = [part.chunk(2, dim=1) for part in parts]
    return torch.cat([early for early, _ in halves] + [late for _, late in reversed(halves)], dim=1)
