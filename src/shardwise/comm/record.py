"""A Comm without peers, which records the collectives of a rank and moves nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.base import Bounds, Chain, Comm, Done, Handle
from shardwise.comm.gloo import ScratchBuffers, is_other_memory
from shardwise.comm.stall import Stamp
from shardwise.spec.errors import CommError


class RecordComm(Comm):
    """Simulates rank ``rank`` of ``size`` on the axis, for dry runs and expected traces.

    Receive buffers keep their content; sums are this rank's contribution alone. With ``receives`` it allocates the
    receive buffers of sums as ``GlooComm`` does.
    """

    has_peers = False

    def __init__(
        self, axis: str, *, rank: int, size: int, device: torch.device | str = "cpu", receives: bool = False
    ) -> None:
        if not 0 <= rank < size:
            raise CommError(f"rank {rank} is not one of 0 to {size - 1}.\n  Choose a rank below the number of ranks.")
        super().__init__(axis, rank, size, torch.device(device))
        self.is_in_order = not receives
        self._is_local = receives and size == 1
        self._receives = receives
        self._scratch = ScratchBuffers()

    @property
    def device_type(self) -> str:
        """As :attr:`Comm.device_type`; on meta, a Comm with receive buffers simulates the CPU."""
        if self.device.type != "meta":
            return self.device.type
        return "cpu" if self._receives else "cuda"

    @property
    def held_bytes(self) -> int:
        """As :attr:`Comm.held_bytes`."""
        return self._scratch.num_bytes

    def _start(
        self, kind: str, unit: str, buffer: Tensor, numel: int, sent_numel: int, *, direction: str | None = None
    ) -> Stamp:
        """As :meth:`Comm._start`, but not in the history: the stall watch must not count it as a real collective."""
        del direction
        if self._listeners:
            self._record_event(kind, unit, buffer.dtype, sent_numel * buffer.element_size())
        return Stamp(self.channel, 0, kind, unit, numel, buffer.dtype)

    def _do_all_gather(self, stamp: Stamp, buffer: Tensor, bounds: Bounds) -> Handle:
        return _RecordedHandle(buffer)

    def _do_reduce_scatter(self, stamp: Stamp, buffer: Tensor, out: Tensor, divisor: float, bounds: Bounds) -> Handle:
        own = self._own_slice(buffer, bounds)
        if is_other_memory(out, own):
            out.copy_(own)
        return self._reduce(buffer, own, out)

    def _do_all_reduce(self, stamp: Stamp, buffer: Tensor, out: Tensor | None, divisor: float) -> Handle:
        own = (self.rank + 1) * buffer.numel() // self.size - self.rank * buffer.numel() // self.size
        if out is not None:
            out.copy_(buffer)
        # Over Gloo an all-reduce has a second phase, which finishes one reduction later.
        reduced = self._reduce(buffer, buffer[:own], (buffer if out is None else out)[:own])
        return Chain(reduced, Done) if self._receives else reduced

    def _do_all_to_all(self, stamp: Stamp, buffer: Tensor, out: Tensor, bounds: Bounds, out_bounds: Bounds) -> Handle:
        return _RecordedHandle(buffer)

    def _do_broadcast(self, stamp: Stamp, buffer: Tensor, root: int) -> Handle:
        return _RecordedHandle(buffer)

    def _do_send(self, stamp: Stamp, buffer: Tensor, to: int) -> Handle:
        return _RecordedHandle(buffer)

    def _do_receive(self, stamp: Stamp, buffer: Tensor, source: int) -> Handle:
        return _RecordedHandle(buffer)

    def _own_slice(self, buffer: Tensor, bounds: Bounds) -> Tensor:
        each = buffer.numel() // self.size
        start, stop = (
            (self.rank * each, (self.rank + 1) * each) if bounds is None else bounds[self.rank : self.rank + 2]
        )
        return buffer[start:stop]

    def _reduce(self, buffer: Tensor, own: Tensor, out: Tensor) -> Handle:
        """Keep the sent buffer and the receive buffers of the peers' slices until the handle is waited for."""
        num_received = self.size - 1 - is_other_memory(out, own)
        if not self._receives or num_received < 1:
            return _RecordedHandle(buffer)
        received = self._scratch.allocate(own.numel() * num_received, own.dtype, own.device)
        return _RecordedHandle(buffer, lambda: self._scratch.release(received))


class _RecordedHandle(Handle):
    """A simulated message under way, which keeps the sent buffer alive."""

    def __init__(self, sent: Tensor, finish: Callable[[], Any] | None = None) -> None:
        self._sent: Tensor | None = sent
        self._finish = finish

    def wait(self) -> None:
        self._sent = None
        if self._finish is not None:
            self._finish()
            self._finish = None
