"""A Comm with no peers: it records what a rank would send, and moves nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.comm.base import Chain, Comm, Done, Handle
from shardwise.comm.gloo import Scratch, is_apart
from shardwise.spec.errors import CommError


class RecordComm(Comm):
    """Stands for rank ``rank`` of ``size`` on the axis, for dry runs and expected traces.

    Received slices keep whatever content they had; sums are this rank's contribution alone.

    Args:
        axis: Name of the mesh axis.
        rank: Coordinate on it.
        size: Ranks along it.
        device: Of the buffers; ``meta`` for dry runs.
        receives: Hold the buffers into which sums over Gloo receive, as ``GlooComm`` does.
    """

    def __init__(
        self, axis: str, *, rank: int, size: int, device: torch.device | str = "cpu", receives: bool = False
    ) -> None:
        if not 0 <= rank < size:
            raise CommError(f"rank {rank} is not one of 0 to {size - 1}.\n  Choose a rank below the number of ranks.")
        super().__init__(axis, rank, size, torch.device(device))
        self.is_in_order = not receives
        self._receives = receives
        self._scratch = Scratch()

    @property
    def device_type(self) -> str:
        """As :attr:`Comm.device_type`: sums that receive are those of the CPU."""
        if self.device.type != "meta":
            return self.device.type
        return "cpu" if self._receives else "cuda"

    @property
    def held_bytes(self) -> int:
        """As :attr:`Comm.held_bytes`."""
        return self._scratch.num_bytes

    def _note(self, kind: str, unit: str, buffer: Tensor, sent_numel: int) -> Handle:
        self._event(kind, unit, buffer).sent_bytes = sent_numel * buffer.element_size()
        return _Under(buffer)

    def _cut(self, numel: int, index: int) -> int:
        return (index + 1) * numel // self.size - index * numel // self.size

    def _own(self, buffer: Tensor, cuts: Sequence[int] | None) -> Tensor:
        each = buffer.numel() // self.size
        start, stop = (self.rank * each, (self.rank + 1) * each) if cuts is None else cuts[self.rank : self.rank + 2]
        return buffer[start:stop]

    def all_gather(self, buffer: Tensor, *, unit: str, cuts: Sequence[int] | None = None) -> Handle:
        """As :meth:`Comm.all_gather`."""
        return self._note("all_gather", unit, buffer, self._own(buffer, cuts).numel() * (self.size - 1))

    def reduce_scatter(
        self, buffer: Tensor, out: Tensor, *, unit: str, divisor: float = 1, cuts: Sequence[int] | None = None
    ) -> Handle:
        """As :meth:`Comm.reduce_scatter`."""
        del divisor
        own = self._own(buffer, cuts)
        if is_apart(out, own):
            out.copy_(own)
        self._note("reduce_scatter", unit, buffer, buffer.numel() - own.numel())
        return self._reduce(buffer, own, out)

    def all_reduce(self, buffer: Tensor, *, unit: str, divisor: float = 1, out: Tensor | None = None) -> Handle:
        """As :meth:`Comm.all_reduce`."""
        del divisor
        own = self._cut(buffer.numel(), self.rank)
        self._note("all_reduce", unit, buffer, buffer.numel() - own + own * (self.size - 1))
        if out is not None:
            out.copy_(buffer)
        # With Gloo it has a second phase, which finishes one reduction later.
        reduced = self._reduce(buffer, buffer[:own], (buffer if out is None else out)[:own])
        return Chain(reduced, Done) if self._receives else reduced

    def all_to_all(
        self,
        buffer: Tensor,
        out: Tensor,
        *,
        unit: str,
        cuts: Sequence[int] | None = None,
        out_cuts: Sequence[int] | None = None,
    ) -> Handle:
        """As :meth:`Comm.all_to_all`."""
        del out, out_cuts
        return self._note("all_to_all", unit, buffer, buffer.numel() - self._own(buffer, cuts).numel())

    def broadcast(self, buffer: Tensor, *, root: int, unit: str) -> Handle:
        """As :meth:`Comm.broadcast`."""
        return self._note("broadcast", unit, buffer, buffer.numel() * (self.size - 1) if self.rank == root else 0)

    def gather(
        self, shard: Tensor, out: Tensor | None, *, root: int, unit: str, cuts: Sequence[int] | None = None
    ) -> Handle:
        """As :meth:`Comm.gather`."""
        if out is not None:
            self._own(out, cuts).copy_(shard)
        return self._note("gather", unit, shard, 0 if self.rank == root else shard.numel())

    def scatter(
        self, buffer: Tensor | None, out: Tensor, *, root: int, unit: str, cuts: Sequence[int] | None = None
    ) -> Handle:
        """As :meth:`Comm.scatter`."""
        is_root = buffer is not None and self.rank == root
        if is_root:
            out.copy_(self._own(buffer, cuts))
        return self._note("scatter", unit, out, buffer.numel() - out.numel() if is_root else 0)

    def send(self, buffer: Tensor, *, to: int, unit: str) -> Handle:
        """As :meth:`Comm.send`."""
        del to
        return self._note("send", unit, buffer, buffer.numel())

    def receive(self, buffer: Tensor, *, source: int, unit: str) -> Handle:
        """As :meth:`Comm.receive`; the buffer keeps whatever content it had."""
        del source
        return self._note("receive", unit, buffer, 0)

    def _reduce(self, buffer: Tensor, own: Tensor, out: Tensor) -> Handle:
        """Hold what is sent, and what the peers' slices would be received into, until the handle is waited for."""
        num_received = self.size - 1 - is_apart(out, own)
        if not self._receives or num_received < 1:
            return _Under(buffer)
        received = self._scratch.take(own.numel() * num_received, own.dtype, own.device)
        return _Under(buffer, lambda: self._scratch.give(received))


class _Under(Handle):
    """Holds what is sent, as a message under way does."""

    def __init__(self, sent: Tensor, finish: Callable[[], None] | None = None) -> None:
        self._sent: Tensor | None = sent
        self._finish = finish

    def wait(self) -> None:
        self._sent = None
        if self._finish is not None:
            self._finish()
            self._finish = None
