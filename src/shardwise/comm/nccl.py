"""Collectives over NCCL, in place on the flat buffers, on a separate stream.

A collective starts after everything that was enqueued on the compute stream when it was issued. ``wait`` makes the
compute stream wait for it; the host never waits. A handle keeps its tensors until then, so no ``record_stream`` is
needed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.base import Bounds, Chain, CollectiveEvent, Comm, Handle, Stamped
from shardwise.comm.stall import Ledger, Stamp


class NcclComm(Comm):
    """Collectives over the ranks of an NCCL process group."""

    is_in_order = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        axis: str,
        device: torch.device,
        *,
        channel: str | None = None,
        ledger: Ledger | None = None,
        host: Comm | None = None,
        record_order: Callable[[Stamp], None] | None = None,
        stream: torch.cuda.Stream | None = None,
        calls: Any = dist,
    ) -> None:
        super().__init__(axis, group.rank(), group.size(), device, channel)
        self._is_local = False
        self._ledger = ledger or Ledger((), None)
        self._host = host
        self._record_order = record_order
        self._group = group
        self._stream = stream or torch.cuda.Stream(device, priority=-1)
        self._calls = calls  # torch.distributed, or a replacement in tests
        # torch 2.13 renamed the in-place calls and deprecates the old names.
        self._gather = getattr(calls, "all_gather_single", None) or calls.all_gather_into_tensor
        self._reduce_scatter = getattr(calls, "reduce_scatter_single", None) or calls.reduce_scatter_tensor

    def _do_all_gather(self, stamp: Stamp, buffer: Tensor, bounds: Bounds) -> Handle:
        """As :meth:`Comm.all_gather`; for unequal slices torch issues one NCCL group of broadcasts."""
        with self._on_stream(stamp, buffer) as handle:
            slices = self._slices(buffer, bounds)
            if bounds is None:
                self._gather(buffer, slices[self.rank], group=self._group)
            else:
                self._calls.all_gather(list(slices), slices[self.rank], group=self._group)
        return handle

    def _do_reduce_scatter(self, stamp: Stamp, buffer: Tensor, out: Tensor, divisor: float, bounds: Bounds) -> Handle:
        """As :meth:`Comm.reduce_scatter`; for unequal slices torch issues one NCCL group of reductions."""
        op, rest = self._op(divisor, buffer.dtype)
        with self._on_stream(stamp, buffer, out) as handle:
            if bounds is None:
                self._reduce_scatter(out, buffer, op=op, group=self._group)
            else:
                self._calls.reduce_scatter(out, list(self._slices(buffer, bounds)), op=op, group=self._group)
            self._divide(out, out, rest)
        return handle

    def _do_all_reduce(self, stamp: Stamp, buffer: Tensor, out: Tensor | None, divisor: float) -> Handle:
        op, rest = self._op(divisor, buffer.dtype)
        with self._on_stream(stamp, buffer, out) as handle:
            total = buffer if out is None else out.copy_(buffer)
            self._calls.all_reduce(total, op=op, group=self._group)
            self._divide(total, total, rest)
        return handle

    def _do_all_to_all(self, stamp: Stamp, buffer: Tensor, out: Tensor, bounds: Bounds, out_bounds: Bounds) -> Handle:
        """As :meth:`Comm.all_to_all`, in one NCCL group of sends and receives."""
        with self._on_stream(stamp, buffer, out) as handle:
            slices, slots = self._slices(buffer, bounds), self._slices(out, out_bounds)
            self._calls.all_to_all(list(slots), list(slices), group=self._group)
        return handle

    def _do_broadcast(self, stamp: Stamp, buffer: Tensor, root: int) -> Handle:
        with self._on_stream(stamp, buffer) as handle:
            self._calls.broadcast(buffer, group=self._group, group_src=root)
        return handle

    def _do_send(self, stamp: Stamp, buffer: Tensor, to: int) -> Handle:
        """As :meth:`Comm.send`; NCCL matches messages only by their order."""
        with self._on_stream(stamp, buffer) as handle:
            self._calls.send(buffer, group=self._group, group_dst=to)
        return handle

    def _do_receive(self, stamp: Stamp, buffer: Tensor, source: int) -> Handle:
        with self._on_stream(stamp, buffer) as handle:
            self._calls.recv(buffer, group=self._group, group_src=source)
        return handle

    def _do_exchange(self, sends: Sequence[Stamped], receives: Sequence[Stamped]) -> Handle:
        """As :meth:`Comm.exchange`, in one NCCL group, whose sends and receives start together."""
        stamped = [*sends, *receives]
        newest = stamped[-1][0] if stamped else None
        with self._on_stream(newest, *(buffer for _, buffer, _ in stamped)) as handle:
            messages = [(self._calls.isend, buffer, to) for _, buffer, to in sends]
            messages += [(self._calls.irecv, buffer, source) for _, buffer, source in receives]
            group = [
                self._calls.P2POp(move, buffer, group=self._group, group_peer=peer)
                for move, buffer, peer in messages
                if buffer.numel()
            ]
            for work in self._calls.batch_isend_irecv(group) if group else ():
                work.wait()
        return handle

    def chain(self, first: Handle, issue: Callable[[], Handle], on_first_done: Callable[[], object]) -> Handle:
        """As :meth:`Comm.chain`: this Comm's stream waits for the other Comm's, without the compute stream."""
        if not isinstance(first, _StreamHandle):  # its result is computed on the compute stream after the wait
            return super().chain(first, issue, on_first_done)
        with torch.cuda.stream(self._stream):
            first.block(self._stream)
            second = issue()

        def issue_next() -> Handle:
            on_first_done()
            return second

        return Chain(first, issue_next)

    @property
    def host(self) -> Comm:
        """As :attr:`Comm.host`."""
        return self if self._host is None else self._host

    @contextlib.contextmanager
    def record(self, events: list[CollectiveEvent] | None = None) -> Iterator[list[CollectiveEvent]]:
        """As :meth:`Comm.record`, including collectives of :attr:`host`."""
        with super().record(events) as found, contextlib.ExitStack() as stack:
            if self._host is not None:
                stack.enter_context(self._host.record(found))
            yield found

    def _start(self, *args: Any, **kwargs: Any) -> Stamp:
        """As :meth:`Comm._start`."""
        self._ledger.check()
        stamp = super()._start(*args, **kwargs)
        if self._record_order is not None and stamp.kind != "message":
            self._record_order(stamp)
        return stamp

    @contextlib.contextmanager
    def _on_stream(self, stamp: Stamp | None, *tensors: Tensor | None) -> Iterator[_StreamHandle]:
        handle = _StreamHandle(self._stream, tensors)
        if stamp is not None:  # before the call, in which NCCL may connect ranks and block the host
            self._ledger.add(stamp, handle.is_done)
        with handle:
            yield handle

    def _op(self, divisor: float, dtype: torch.dtype) -> tuple[Any, float]:
        """Return NCCL's operation for a sum divided by ``divisor``, and the divisor that remains to be applied."""
        direction = choose_sum(divisor, self.size, dtype)
        if direction is Sum.PLAIN:
            return self._calls.ReduceOp.SUM, divisor
        if direction is Sum.AVERAGE:
            return self._calls.ReduceOp.AVG, 1
        return self._calls._make_nccl_premul_sum(1 / divisor), 1


class Sum(StrEnum):
    """Ways to sum and divide."""

    PLAIN = "sum, then divide"
    AVERAGE = "NCCL divides by the number of ranks"
    SCALED = "NCCL multiplies every term while it reads it"


def choose_sum(divisor: float, size: int, dtype: torch.dtype) -> Sum:
    """Choose how NCCL computes a sum divided by ``divisor``, without a separate kernel for the division if possible.

    If the divisor is a power of two, NCCL multiplies every term by its reciprocal as it reads the term. This is exact,
    so the result is bitwise the same. Any other divisor needs a true division of the sum (x/3 is not x * (1/3)).

    Args:
        divisor: Divisor of the sum.
        size: Number of ranks of the Comm.
        dtype: Dtype of the buffer. In fp16, with few exponent bits, scaled terms could underflow. Integers have no
            reciprocal. torch passes the factor to NCCL as a float, which is wrong for bf16: there only the average is
            correct, which needs the divisor to be the number of ranks.
    """
    if divisor == 1 or math.frexp(divisor)[0] != 0.5 or dtype not in {torch.float32, torch.float64, torch.bfloat16}:
        return Sum.PLAIN
    if divisor == size:
        return Sum.AVERAGE
    return Sum.PLAIN if dtype is torch.bfloat16 else Sum.SCALED


class _StreamHandle(Handle):
    """Handle of work on the communication stream; also the context in which it is enqueued."""

    def __init__(self, stream: torch.cuda.Stream, tensors: tuple[Tensor | None, ...]) -> None:
        self._stream = stream
        self._tensors = tensors  # the allocator does not know that this stream uses them
        self._event: Any = None  # torch annotates record_event with its private base class
        self._recorded: Any = None  # the same event, kept after the wait
        self._is_issued = False
        self._context: torch.cuda.StreamContext | None = None

    def __enter__(self) -> Self:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._context = torch.cuda.stream(self._stream)
        self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._context is not None
        self._context.__exit__(*error)
        self._event = self._recorded = self._stream.record_event()
        self._is_issued = True

    def is_done(self) -> bool:
        """Whether the device has completed the work. Any thread may call."""
        return self._is_issued and self._recorded.query()

    def wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._event)
            self._event = None
            self._tensors = ()  # later users of their memory run after the wait on the compute stream

    def block(self, stream: torch.cuda.Stream) -> None:
        """Make another stream wait. The tensors are kept until the compute stream waits too."""
        if self._event is not None:
            stream.wait_event(self._event)
