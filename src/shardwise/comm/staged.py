"""Collectives for tensors on a GPU over a transport for host memory: a process group of Gloo, and no NCCL.

Several ranks can so share one GPU, which NCCL refuses, and machines without NCCL can train on theirs. What is sent is
copied to pinned host memory when a collective is issued, and what has arrived is copied back when it is waited for.
Sums are those of :class:`~shardwise.comm.gloo.GlooComm`: on the host, in rank order, the same bits as on the CPU.

Host memory is allocated for each collective. For CUDA it comes from torch's caching host allocator, which keeps what is
freed, and hands it out again only when the copies that were enqueued from or to it are done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardwise.comm.base import CollectiveEvent, Comm, Handle, Message

#: Where a received part goes, and where it lies on the host.
_Delivery = tuple[Tensor, Tensor]


class StagedComm(Comm):
    """A Comm for tensors of ``device`` that moves them by another for the host.

    The host waits at every collective that sends until the compute stream has come to it: this is a way to train where
    there is no other, not a fast one.

    Args:
        inner: Moves CPU tensors. Events, tags and disagreements are its.
        device: Of the tensors. The CPU too, which stages for the tests' sake.
    """

    def __init__(self, inner: Comm, device: torch.device) -> None:
        super().__init__(inner.axis, inner.rank, inner.size, device)
        self._inner = inner

    def all_gather(self, buffer: Tensor, *, unit: str, cuts: Sequence[int] | None = None) -> Handle:
        """As :meth:`Comm.all_gather`."""
        if self.size == 1:
            return self._inner.all_gather(buffer, unit=unit, cuts=cuts)
        host = self._empty(buffer)
        mine, here = self._slices(buffer, cuts), self._slices(host, cuts)
        self._send((here[self.rank], mine[self.rank]))
        handle = self._inner.all_gather(host, unit=unit, cuts=cuts)
        return _Staged(handle, self._of_others(mine, here))

    def reduce_scatter(
        self, buffer: Tensor, out: Tensor, *, unit: str, divisor: float = 1, cuts: Sequence[int] | None = None
    ) -> Handle:
        """As :meth:`Comm.reduce_scatter`."""
        if self.size == 1 and divisor == 1:
            return self._inner.reduce_scatter(buffer, out, unit=unit, cuts=cuts)
        host = self._copy(buffer)
        own = self._slices(host, cuts)[self.rank]
        return _Staged(self._inner.reduce_scatter(host, own, unit=unit, divisor=divisor, cuts=cuts), [(out, own)])

    def all_reduce(self, buffer: Tensor, *, unit: str, divisor: float = 1, out: Tensor | None = None) -> Handle:
        """As :meth:`Comm.all_reduce`."""
        if self.size == 1 and divisor == 1:
            return self._inner.all_reduce(buffer, unit=unit, out=out)
        host = self._copy(buffer)
        handle = self._inner.all_reduce(host, unit=unit, divisor=divisor)
        return _Staged(handle, [(buffer if out is None else out, host)])

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
        if self.size == 1:
            return self._inner.all_to_all(buffer, out, unit=unit, cuts=cuts, out_cuts=out_cuts)
        host, received = self._copy(buffer), self._empty(out)
        handle = self._inner.all_to_all(host, received, unit=unit, cuts=cuts, out_cuts=out_cuts)
        deliveries = self._of_others(self._slices(out, out_cuts), self._slices(received, out_cuts))
        return _Staged(handle, deliveries)

    def broadcast(self, buffer: Tensor, *, root: int, unit: str) -> Handle:
        """As :meth:`Comm.broadcast`."""
        if self.size == 1:
            return self._inner.broadcast(buffer, root=root, unit=unit)
        is_root = self.rank == root
        host = self._copy(buffer) if is_root else self._empty(buffer)
        handle = self._inner.broadcast(host, root=root, unit=unit)
        return _Staged(handle, [] if is_root else [(buffer, host)])

    def gather(
        self, shard: Tensor, out: Tensor | None, *, root: int, unit: str, cuts: Sequence[int] | None = None
    ) -> Handle:
        """As :meth:`Comm.gather`."""
        host, received = self._copy(shard), None if out is None else self._empty(out)
        handle = self._inner.gather(host, received, root=root, unit=unit, cuts=cuts)
        return _Staged(handle, [] if out is None or received is None else [(out, received)])

    def scatter(
        self, buffer: Tensor | None, out: Tensor, *, root: int, unit: str, cuts: Sequence[int] | None = None
    ) -> Handle:
        """As :meth:`Comm.scatter`."""
        host, received = None if buffer is None else self._copy(buffer), self._empty(out)
        handle = self._inner.scatter(host, received, root=root, unit=unit, cuts=cuts)
        return _Staged(handle, [(out, received)])

    def send(self, buffer: Tensor, *, to: int, unit: str) -> Handle:
        """As :meth:`Comm.send`."""
        return _Staged(self._inner.send(self._copy(buffer), to=to, unit=unit), [])

    def receive(self, buffer: Tensor, *, source: int, unit: str) -> Handle:
        """As :meth:`Comm.receive`."""
        host = self._empty(buffer)
        return _Staged(self._inner.receive(host, source=source, unit=unit), [(buffer, host)])

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Handle:
        """As :meth:`Comm.exchange`."""
        sent = [(self._copy(buffer), to, unit) for buffer, to, unit in sends]
        received = [(self._empty(buffer), source, unit) for buffer, source, unit in receives]
        deliveries = [(target[0], host[0]) for target, host in zip(receives, received, strict=True)]
        return _Staged(self._inner.exchange(sent, received), deliveries)

    @property
    def host(self) -> Comm:
        """The other one."""
        return self._inner

    def close(self) -> None:
        """Close the other one."""
        self._inner.close()

    @contextlib.contextmanager
    def record(self, events: list[CollectiveEvent] | None = None) -> Iterator[list[CollectiveEvent]]:
        """As :meth:`Comm.record`: of what the other one sends."""
        with self._inner.record(events) as found:
            yield found

    # -- between device and host

    def _empty(self, like: Tensor) -> Tensor:
        return torch.empty(like.numel(), dtype=like.dtype, pin_memory=self.device.type == "cuda")

    def _copy(self, tensor: Tensor) -> Tensor:
        host = self._empty(tensor)
        self._send((host, tensor.view(-1)))
        return host

    def _send(self, *pairs: tuple[Tensor, Tensor]) -> None:
        """Copy to the host, and wait: the transport reads the memory, not a stream."""
        for host, tensor in pairs:
            host.copy_(tensor, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _of_others(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> list[_Delivery]:
        """The slices that are not this rank's, which stay as they are."""
        pairs = enumerate(zip(targets, sources, strict=True))
        return [pair for rank, pair in pairs if rank != self.rank and pair[0].numel()]


class _Staged(Handle):
    """A collective under way on the host, and what is to be copied to the device when it is done.

    What was sent from the device has been copied; the other handle keeps the copy alive.
    """

    __slots__ = ("_deliveries", "_inner")

    def __init__(self, inner: Handle, deliveries: list[_Delivery]) -> None:
        self._inner = inner
        self._deliveries = deliveries

    def advance(self) -> bool:
        if self._inner.advance():
            return True
        self._deliver()
        return False

    def wait(self) -> None:
        self._inner.wait()
        self._deliver()

    def _deliver(self) -> None:
        """Enqueue the copies on the current stream; whatever is enqueued there afterwards may read the result."""
        for target, source in self._deliveries:
            target.view(-1).copy_(source, non_blocking=True)
        self._deliveries = []
