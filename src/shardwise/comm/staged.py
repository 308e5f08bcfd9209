"""Collectives for tensors on a GPU over a transport for host memory: Gloo without NCCL.

So several ranks can share one GPU, which NCCL refuses, and machines without NCCL can train on GPUs. Sent data is copied
to pinned host memory when a collective is issued, and received data is copied back when it is waited for. Sums are
those of :class:`~shardwise.comm.gloo.GlooComm`: on the host, in rank order, bitwise as on the CPU.

Host memory is allocated for each collective. For CUDA it comes from torch's caching host allocator, which reuses freed
memory only after the copies that were enqueued from or to it have finished.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.comm.base import Bounds, Comm, Handle, Stamped, Wrapper
from shardwise.comm.stall import Stamp

#: Target on the device and source on the host of a received part.
_Delivery = tuple[Tensor, Tensor]


class StagedComm(Wrapper):
    """A Comm for tensors of ``device`` that moves them through a Comm for host memory.

    At every collective that sends, the host waits for the compute stream. So this is slow: use it only where there is
    no other transport.
    """

    def __init__(self, inner: Comm, device: torch.device) -> None:
        super().__init__(inner, device)

    @property
    def host(self) -> Comm:
        """The Comm for host memory."""
        return self._inner

    def _do_all_gather(self, stamp: Stamp, buffer: Tensor, bounds: Bounds) -> Handle:
        host = self._empty(buffer)
        own_slices, host_slices = self._slices(buffer, bounds), self._slices(host, bounds)
        self._send((host_slices[self.rank], own_slices[self.rank]))
        return _Staged(self._inner._do_all_gather(stamp, host, bounds), self._peer_slices(own_slices, host_slices))

    def _do_reduce_scatter(self, stamp: Stamp, buffer: Tensor, out: Tensor, divisor: float, bounds: Bounds) -> Handle:
        host = self._copy(buffer)
        own = self._slices(host, bounds)[self.rank]
        return _Staged(self._inner._do_reduce_scatter(stamp, host, own, divisor, bounds), [(out, own)])

    def _do_all_reduce(self, stamp: Stamp, buffer: Tensor, out: Tensor | None, divisor: float) -> Handle:
        host = self._copy(buffer)
        handle = self._inner._do_all_reduce(stamp, host, None, divisor)
        return _Staged(handle, [(buffer if out is None else out, host)])

    def _do_all_to_all(self, stamp: Stamp, buffer: Tensor, out: Tensor, bounds: Bounds, out_bounds: Bounds) -> Handle:
        host, received = self._copy(buffer), self._empty(out)
        handle = self._inner._do_all_to_all(stamp, host, received, bounds, out_bounds)
        return _Staged(handle, self._peer_slices(self._slices(out, out_bounds), self._slices(received, out_bounds)))

    def _do_broadcast(self, stamp: Stamp, buffer: Tensor, root: int) -> Handle:
        is_root = self.rank == root
        host = self._copy(buffer) if is_root else self._empty(buffer)
        return _Staged(self._inner._do_broadcast(stamp, host, root), [] if is_root else [(buffer, host)])

    def _do_send(self, stamp: Stamp, buffer: Tensor, to: int) -> Handle:
        return _Staged(self._inner._do_send(stamp, self._copy(buffer), to), [])

    def _do_receive(self, stamp: Stamp, buffer: Tensor, source: int) -> Handle:
        host = self._empty(buffer)
        return _Staged(self._inner._do_receive(stamp, host, source), [(buffer, host)])

    def _do_exchange(self, sends: Sequence[Stamped], receives: Sequence[Stamped]) -> Handle:
        sent = [(stamp, self._copy(buffer), to) for stamp, buffer, to in sends]
        received = [(stamp, self._empty(buffer), source) for stamp, buffer, source in receives]
        deliveries = [(target, host) for (_, target, _), (_, host, _) in zip(receives, received, strict=True)]
        return _Staged(self._inner._do_exchange(sent, received), deliveries)

    # -- between device and host

    def _empty(self, like: Tensor) -> Tensor:
        return torch.empty(like.numel(), dtype=like.dtype, pin_memory=self.device.type == "cuda")

    def _copy(self, tensor: Tensor) -> Tensor:
        host = self._empty(tensor)
        self._send((host, tensor.view(-1)))
        return host

    def _send(self, *pairs: tuple[Tensor, Tensor]) -> None:
        """Copy to the host, and wait, because the transport reads the memory without regard to streams."""
        for host, tensor in pairs:
            host.copy_(tensor, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _peer_slices(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> list[_Delivery]:
        """Return the pairs of slices that belong to other ranks."""
        pairs = enumerate(zip(targets, sources, strict=True))
        return [pair for rank, pair in pairs if rank != self.rank and pair[0].numel()]


class _Staged(Handle):
    """A collective under way on the host, with the copies to the device that follow it."""

    __slots__ = ("_deliveries", "_inner")

    def __init__(self, inner: Handle, deliveries: list[_Delivery]) -> None:
        self._inner = inner
        self._deliveries = deliveries

    def start_next_phase(self) -> bool:
        if self._inner.start_next_phase():
            return True
        self._deliver()
        return False

    def wait(self) -> None:
        self._inner.wait()
        self._deliver()

    def _deliver(self) -> None:
        """Enqueue the copies on the current stream; work enqueued there afterwards may read the result."""
        for target, source in self._deliveries:
            target.view(-1).copy_(source, non_blocking=True)
        self._deliveries = []
