"""Communication between ranks: all of it goes through a :class:`Comm`.

The public methods of a Comm are the same on every transport. Each records the collective (event, sequence number),
returns at once if the Comm has a single rank, and otherwise calls the transport's ``_do_...`` method. Buffers are flat,
contiguous, one-dimensional tensors, divided into ``size`` slices where a collective gathers or scatters; slice ``r``
belongs to rank ``r``. Slices are equal unless ``bounds`` (``size + 1`` offsets, the same on every rank) says where
they begin and end; slices may be empty.

Sums run in rank order, element by element: ``((x0 + x1) + x2) + ...``, then one true division by ``divisor``. The
result is therefore the same number on every rank and for every division of the buffer (on NCCL the library chooses the
order).

All ranks of a Comm must issue the same collectives in the same order. Each is stamped with a sequence number and the
name of the unit that it serves, so that a disagreement of ranks is detected before they exchange wrong data. Handles
may be waited for in any order, except those of all-reduces, which need one order on all ranks: the second half of an
all-reduce starts when its handle is waited for.

Where Comms of several models share one communicator (NCCL), all their collectives must be issued in one order on all
ranks, because the communicator does not distinguish models. ``comm.issue_order`` compares that order whenever another
model issues a collective, and raises RankDisagreement. Messages between two ranks are not compared: both must send and
receive them in one order.

[Note: Agreed order]
There is one sequence of all collectives and messages over all Comms. Each rank issues a subsequence of it, in its order
(ADR 30). So ranks never wait in a circle, even if one queue serves the work of all streams.

[Note: Handles own their buffers]
A handle keeps the tensors that it moves alive until it has been waited for. The caller may drop its own references to
buffers and results; it must keep the handle, and wait for it. Without the handle's references the memory could be given
to another tensor while it is still read or written: on NCCL the host is far ahead of the GPU, and CUDA's allocator does
not know about the communication stream.
"""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import stall
from shardwise.comm.dtype import dtype_name
from shardwise.comm.stall import Stamp


@dataclass(slots=True)
class CollectiveEvent:
    """One collective as it was issued by this rank, or one exchange of ``data_parallel`` between devices.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``all_reduce``, ``broadcast``, ``send`` or
            ``receive``; of ``data_parallel`` also ``gather``, ``scatter`` and ``reduce``.
        axis: Mesh axis, for example ``dp_shard``; ``devices`` of ``data_parallel``.
        unit: Name of the unit (or purpose) that the collective serves.
        dtype: Short dtype name of the elements sent.
        sent_bytes: Bytes that this rank sends. NCCL does not report its bytes; for NCCL this is the number of a direct
            exchange. For ``data_parallel``: bytes between the first replica and all others together, also where
            replicas share a device and nothing is copied.
    """

    kind: str
    axis: str
    unit: str
    dtype: str
    sent_bytes: int = 0


class Handle(ABC):
    """A collective under way. It keeps the tensors that it moves alive until it has been waited for."""

    @abstractmethod
    def wait(self) -> None:
        """Finish: afterwards (on CUDA: for work enqueued afterwards on the current stream) the result may be read.

        Waiting twice is allowed and free.
        """

    def start_next_phase(self) -> bool:
        """Finish the phase under way and start the next one. Returns whether there was one to start.

        A handle with a single phase may wait only for its result here, and for its sends in :meth:`wait`.
        """
        return False

    def wait_received(self) -> None:
        """Wait for the result only. Sent buffers may still be read, so :meth:`wait` must be called later."""
        self.wait()


class Done(Handle):
    """The handle of a collective that has already finished."""

    def wait(self) -> None:
        """Return at once."""


DONE = Done()


class Exchange(Handle):
    """Independent messages in both directions."""

    __slots__ = ("_receives", "_sends")

    def __init__(self, sends: Sequence[Handle], receives: Sequence[Handle]) -> None:
        self._sends, self._receives = sends, receives

    def wait_received(self) -> None:
        """As :meth:`Handle.wait_received`."""
        for handle in self._receives:
            handle.wait()
        self._receives = ()

    def wait(self) -> None:
        """As :meth:`Handle.wait`."""
        self.wait_received()
        for handle in self._sends:
            handle.wait()
        self._sends = ()


class Chain(Handle):
    """Two collectives, or phases of one, of which the second needs the result of the first."""

    __slots__ = ("_first", "_second", "_then")

    def __init__(self, first: Handle, then: Callable[[], Handle]) -> None:
        self._first = first
        self._then: Callable[[], Handle] | None = then
        self._second: Handle = DONE

    def start_next_phase(self) -> bool:
        """As :meth:`Handle.start_next_phase`."""
        if self._then is None:
            return self._second.start_next_phase()
        self._first.wait()
        then, self._then = self._then, None
        self._second = then()
        return True

    def wait(self) -> None:
        """As :meth:`Handle.wait`."""
        if self._then is not None:
            self.start_next_phase()
        self._second.wait()


#: A buffer, the other rank, and the unit that the message serves.
Message = tuple[Tensor, int, str]
#: A message as transports receive it: its stamp, the buffer, and the other rank.
Stamped = tuple[Stamp, Tensor, int]
#: Offsets at which the slices of a buffer begin and end; ``None``: they are equal.
Bounds = Sequence[int] | None


class Recorder:
    """Records an event for every exchange inside :meth:`record`."""

    def __init__(self, axis: str) -> None:
        self.axis = axis  # mesh axis of the exchanges
        self._listeners: list[list[CollectiveEvent]] = []

    @contextlib.contextmanager
    def record(self, events: list[CollectiveEvent] | None = None) -> Iterator[list[CollectiveEvent]]:
        """Collect an event for every exchange that is issued inside the context, in order, in ``events``."""
        events = [] if events is None else events
        self._listeners.append(events)
        try:
            yield events
        finally:
            self._listeners = [listener for listener in self._listeners if listener is not events]

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Record no events inside the context, for communication that does not belong to a step."""
        listeners, self._listeners = self._listeners, []
        try:
            yield
        finally:
            self._listeners = listeners

    def _record_event(self, kind: str, unit: str, dtype: torch.dtype, sent_bytes: int) -> CollectiveEvent:
        event = CollectiveEvent(kind, self.axis, unit, dtype_name(dtype), sent_bytes)
        for events in self._listeners:
            events.append(event)
        return event


class Comm(Recorder, ABC):
    """Collectives over the ranks of one mesh axis.

    Args:
        axis: Name of the mesh axis.
        rank: This rank's coordinate on the axis.
        size: Number of ranks on the axis.
        device: Device of the buffers.
        channel: Name in messages about this Comm, the same on all its ranks; by default ``axis``.

    Attributes:
        is_in_order: Whether a collective begins only after all earlier ones have finished, as on a stream. A receive
            then blocks later collectives until its message arrives. :meth:`exchange` is correct on every transport.
        has_peers: Whether there are peers. A dry run's Comm has none: its receive buffers keep their content.
        waited_s: Seconds that the host has waited for messages; 0 where it does not wait (NCCL).
    """

    is_in_order = False
    has_peers = True
    waited_s = 0.0

    def __init__(self, axis: str, rank: int, size: int, device: torch.device, channel: str | None = None) -> None:
        super().__init__(axis)
        self.rank = rank
        self.size = size
        self.device = device
        self.channel = channel or axis
        #: Whether collectives return at once: there is one rank, and they need not stay in the order of a stream.
        self._is_local = size == 1
        self._num_issued: dict[str, int] = {}
        self._divisors: dict[tuple[float, torch.dtype], Tensor] = {}

    @property
    def device_type(self) -> str:
        """Type of the device of the buffers; in a dry run, of the simulated device."""
        return self.device.type

    @property
    def held_bytes(self) -> int:
        """Bytes of the unused receive buffers that this Comm keeps."""
        return 0

    # -- collectives

    def all_gather(self, buffer: Tensor, *, unit: str, bounds: Bounds = None) -> Handle:
        """Fill every slice of ``buffer`` with its owner's content, in place.

        Collective:
            Sends this rank's slice to every other rank: ``(size-1)/size * buffer bytes`` if slices are equal.
        """
        rank, numel = self.rank, buffer.numel()
        own = numel // self.size if bounds is None else bounds[rank + 1] - bounds[rank]
        stamp = self._start("all_gather", unit, buffer, numel, own * (self.size - 1))
        if self._is_local:
            return DONE
        return self._do_all_gather(stamp, buffer, bounds)

    def reduce_scatter(
        self, buffer: Tensor, out: Tensor, *, unit: str, divisor: float = 1, bounds: Bounds = None
    ) -> Handle:
        """Sum ``buffer`` over the ranks, divide by ``divisor``, and put this rank's slice of the result into ``out``.

        ``out`` has as many elements as this rank's slice and may be that slice of ``buffer``. The other slices of
        ``buffer`` must not be written before the handle has been waited for.

        Collective:
            Sends each other rank its slice: ``(size-1)/size * buffer bytes`` where slices are equal.
        """
        numel = buffer.numel()
        stamp = self._start("reduce_scatter", unit, buffer, numel, numel - out.numel())
        if self._is_local:
            self._divide(buffer, out, divisor)
            return DONE
        return self._do_reduce_scatter(stamp, buffer, out, divisor, bounds)

    def all_reduce(self, buffer: Tensor, *, unit: str, divisor: float = 1, out: Tensor | None = None) -> Handle:
        """Sum ``buffer`` over the ranks and divide by ``divisor``, in place or into ``out``. Any number of elements.

        With ``out``, which must not overlap it, ``buffer`` is unchanged; it must not be written before the handle has
        been waited for. On two ranks over Gloo the collective then has one phase, and receives directly into ``out``.

        Collective:
            Sends ``2 (size-1)/size * buffer bytes`` per rank where ``size`` divides the number of elements; slices
            differ by one element otherwise.
        """
        rank, size, numel = self.rank, self.size, buffer.numel()
        own = (rank + 1) * numel // size - rank * numel // size
        stamp = self._start("all_reduce", unit, buffer, numel, numel - own + own * (size - 1))
        if self._is_local:
            self._divide(buffer, buffer if out is None else out, divisor)
            # A world of one has as many phases as others.
            return DONE if self.is_in_order else Chain(DONE, Done)
        return self._do_all_reduce(stamp, buffer, out, divisor)

    def all_to_all(
        self, buffer: Tensor, out: Tensor, *, unit: str, bounds: Bounds = None, out_bounds: Bounds = None
    ) -> Handle:
        """Send slice ``r`` of ``buffer`` to rank ``r``, and put what rank ``s`` sent into slot ``s`` of ``out``.

        ``out`` has ``size`` slots, each as large as this rank's slice of a peer's ``buffer``. If ``bounds`` differs
        between ranks, ``out_bounds`` says where the slots begin and end. This rank's own slice is not moved: its slot
        of ``out`` is undefined afterwards.

        Collective:
            Sends each other rank its slice: ``(size-1)/size * buffer bytes`` where slices are equal.
        """
        rank, numel = self.rank, buffer.numel()
        own = numel // self.size if bounds is None else bounds[rank + 1] - bounds[rank]
        # If ranks have different offsets, their numbers of elements differ: 0 makes the stamps equal.
        stamp = self._start("all_to_all", unit, buffer, numel if out_bounds is None else 0, numel - own)
        if self._is_local:
            return DONE
        return self._do_all_to_all(stamp, buffer, out, bounds, out_bounds)

    def broadcast(self, buffer: Tensor, *, root: int, unit: str) -> Handle:
        """Copy ``root``'s ``buffer`` into every rank's.

        Collective:
            The root sends ``(size-1) * buffer bytes``, the others nothing.
        """
        numel = buffer.numel()
        stamp = self._start("broadcast", unit, buffer, numel, numel * (self.size - 1) if self.rank == root else 0)
        if self._is_local:
            return DONE
        return self._do_broadcast(stamp, buffer, root)

    # -- messages

    def send(self, buffer: Tensor, *, to: int, unit: str) -> Handle:
        """Send ``buffer`` to rank ``to``, which must :meth:`receive` as many elements of the same dtype.

        Messages from one rank to another arrive in the order in which they were sent. The buffer must not be written
        before the handle has been waited for.

        Collective:
            These two ranks only. Sends the buffer.
        """
        return self._do_send(self._start_send(buffer, to, unit), buffer, to)

    def receive(self, buffer: Tensor, *, source: int, unit: str) -> Handle:
        """Fill ``buffer`` with a message of rank ``source``. ``unit`` must be the same as in the sender's call.

        Collective:
            These two ranks only. Sends nothing.
        """
        return self._do_receive(self._start_receive(buffer, source, unit), buffer, source)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Handle:
        """:meth:`send` and :meth:`receive` several messages as one collective, in which none waits for another.

        Use it to send to ranks that send too: on a transport that works in order, ranks that all receive first (or all
        send first) would wait for each other forever.

        Returns:
            One handle for all.

        Collective:
            This rank and the ranks of the messages, which must call too. Sends ``sends``.
        """
        outgoing = [(self._start_send(buffer, to, unit), buffer, to) for buffer, to, unit in sends]
        incoming = [(self._start_receive(buffer, peer, unit), buffer, peer) for buffer, peer, unit in receives]
        return self._do_exchange(outgoing, incoming)

    # -- combinations

    def chain(self, first: Handle, issue: Callable[[], Handle], on_first_done: Callable[[], object]) -> Handle:
        """Issue a collective of this Comm on the result of another's.

        Args:
            first: The other collective, under way. ``issue`` moves its result, without a computation in between.
            issue: Issues the collective. On a transport with streams it is called at once and enqueued after ``first``;
                otherwise it is called when the returned handle advances.
            on_first_done: Called when ``first`` has been waited for, as the returned handle advances.

        Returns:
            A handle of both, of which ``first`` is one phase.

        Collective:
            The collective that ``issue`` issues.
        """

        def issue_next() -> Handle:
            on_first_done()
            return issue()

        return Chain(first, issue_next)

    @property
    def host(self) -> Comm:
        """A Comm over the same ranks for small messages in host memory, for which the host waits."""
        return self

    def barrier(self) -> None:
        """Return when every rank has arrived. A one-element all-reduce."""
        value = torch.zeros(1, dtype=torch.int64, device=self.host.device)
        self.host.all_reduce(value, unit="barrier").wait()

    # -- shared by transports

    def _start(
        self, kind: str, unit: str, buffer: Tensor, numel: int, sent_numel: int, *, direction: str | None = None
    ) -> Stamp:
        """Record the event of a collective and give it the next number of its channel."""
        if self._listeners:
            self._record_event(kind, unit, buffer.dtype, sent_numel * buffer.element_size())
        channel = self.channel
        if direction is not None:
            channel, kind = f"{channel}/{direction}", "message"
        sequence = self._num_issued.get(channel, 0)
        self._num_issued[channel] = sequence + 1
        stamp = Stamp(channel, sequence, kind, unit, numel, buffer.dtype)
        stall.history.append(stamp)
        stall.newest[channel] = sequence
        return stamp

    def _start_send(self, buffer: Tensor, to: int, unit: str) -> Stamp:
        numel = buffer.numel()
        return self._start("send", unit, buffer, numel, numel, direction=f"{self.rank}>{to}")

    def _start_receive(self, buffer: Tensor, source: int, unit: str) -> Stamp:
        return self._start("receive", unit, buffer, buffer.numel(), 0, direction=f"{source}>{self.rank}")

    def _slices(self, buffer: Tensor, bounds: Bounds) -> Sequence[Tensor]:
        """Return the slices of ``buffer``, as views."""
        if bounds is None:
            return buffer.view(self.size, -1).unbind(0)
        return [buffer[start:stop] for start, stop in itertools.pairwise(bounds)]

    def _divide(self, total: Tensor, out: Tensor, divisor: float) -> None:
        """Write ``total / divisor`` to ``out``, by true division.

        CUDA would multiply by the reciprocal of a Python number, so there the divisor is a tensor. It is at least fp32,
        because bf16 cannot represent 257, nor fp16 2049.
        """
        if divisor == 1:
            if out.data_ptr() != total.data_ptr():
                out.copy_(total)
            return
        if total.device.type != "cuda":
            torch.div(total, divisor, out=out)
            return
        key = divisor, torch.promote_types(total.dtype, torch.float32)
        if key not in self._divisors:
            self._divisors[key] = torch.full((1,), divisor, dtype=key[1], device=total.device)
        torch.div(total, self._divisors[key], out=out)

    # -- implemented by each transport. Arguments are those of the public method, after the stamp.

    @abstractmethod
    def _do_all_gather(self, stamp: Stamp, buffer: Tensor, bounds: Bounds) -> Handle: ...

    @abstractmethod
    def _do_reduce_scatter(
        self, stamp: Stamp, buffer: Tensor, out: Tensor, divisor: float, bounds: Bounds
    ) -> Handle: ...

    @abstractmethod
    def _do_all_reduce(self, stamp: Stamp, buffer: Tensor, out: Tensor | None, divisor: float) -> Handle: ...

    @abstractmethod
    def _do_all_to_all(
        self, stamp: Stamp, buffer: Tensor, out: Tensor, bounds: Bounds, out_bounds: Bounds
    ) -> Handle: ...

    @abstractmethod
    def _do_broadcast(self, stamp: Stamp, buffer: Tensor, root: int) -> Handle: ...

    @abstractmethod
    def _do_send(self, stamp: Stamp, buffer: Tensor, to: int) -> Handle: ...

    @abstractmethod
    def _do_receive(self, stamp: Stamp, buffer: Tensor, source: int) -> Handle: ...

    def _do_exchange(self, sends: Sequence[Stamped], receives: Sequence[Stamped]) -> Handle:
        sent = [self._do_send(*each) for each in sends]
        return Exchange(sent, [self._do_receive(*each) for each in receives])


class Wrapper(Comm):
    """A Comm that delegates to another Comm, which stamps and records collectives."""

    def __init__(self, inner: Comm, device: torch.device | None = None) -> None:
        super().__init__(inner.axis, inner.rank, inner.size, device or inner.device, inner.channel)
        self._inner = inner
        self.has_peers = inner.has_peers

    @property
    def held_bytes(self) -> int:
        """As :attr:`Comm.held_bytes`."""
        return self._inner.held_bytes

    def record(self, events: list[CollectiveEvent] | None = None) -> Any:
        """As :meth:`Comm.record`."""
        return self._inner.record(events)

    def unrecorded(self) -> Any:
        """As :meth:`Comm.unrecorded`."""
        return self._inner.unrecorded()

    def _start(self, *args: Any, **kwargs: Any) -> Stamp:
        return self._inner._start(*args, **kwargs)
