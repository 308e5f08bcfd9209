"""Collectives over Gloo, by point-to-point messages.

c10d's Gloo reduce-scatter clones its input and all-reduces all of it, and its all-gather fills a full-size temporary.
Here every rank sends each peer exactly the slice that the peer needs, directly out of the flat buffer. A gather
receives directly into the buffer; a reduction receives into the memory of the sum and a reused scratch buffer. Sums run
in rank order, so that the result is the same number under every strategy, and the same that one process gets by adding
up the ranks' contributions in order.

A direct exchange was measured faster than a ring at 2, 4 and 8 ranks.
"""

from __future__ import annotations

import bisect
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler
from torch.profiler import record_function

from shardwise import torch_private
from shardwise.comm import stall
from shardwise.comm.base import Bounds, Chain, Comm, Handle
from shardwise.comm.stall import StallWatch, Stamp
from shardwise.spec.errors import CommError

#: Sums run in chunks of this many elements, so that a chunk stays in the cache from the first addition to the division.
CHUNK_NUMEL = 1 << 18

_NOTHING: AbstractContextManager[None] = nullcontext()
_TAG_SEQUENCE_BITS = 15
_TAG_HASH_BITS = 15
_SECOND_PHASE = 1 << (_TAG_SEQUENCE_BITS + _TAG_HASH_BITS)


class GlooComm(Comm):
    """Collectives over the ranks of a Gloo process group, for CPU tensors."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        axis: str,
        *,
        channel: str | None = None,
        watch: StallWatch | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.ranks = tuple(ranks) if ranks is not None else tuple(range(group.size()))
        super().__init__(axis, self.ranks.index(group.rank()), len(self.ranks), torch.device("cpu"), channel)
        self.group = group
        self.watch = watch
        self._hashes: dict[tuple[str, str, str, int, torch.dtype], int] = {}
        self._scratch = ScratchBuffers()
        # Peers in an order that differs from rank to rank, so that not all send to rank 0 first.
        self._peers = tuple((self.rank + step) % self.size for step in range(1, self.size))
        # Destroying torch's ``Work`` of a message waits until Gloo's thread has released it. Right after the wait, that
        # thread is not scheduled yet: this took a third of the time of a sum of 4 KiB. So the ``Work`` objects of the
        # last receives and sends are kept until the next ones have been waited for.
        self.kept_works: deque[tuple[dist.Work, ...]] = deque(maxlen=2)

    @property
    def held_bytes(self) -> int:
        """As :attr:`Comm.held_bytes`."""
        return self._scratch.num_bytes

    def _do_all_gather(self, stamp: Stamp, buffer: Tensor, bounds: Bounds) -> Handle:
        return self._gather_slices(self._exchange(stamp), self._slices(buffer, bounds))

    def _do_reduce_scatter(self, stamp: Stamp, buffer: Tensor, out: Tensor, divisor: float, bounds: Bounds) -> Handle:
        return self._reduce(stamp, self._slices(buffer, bounds), out, divisor)

    def _do_all_reduce(self, stamp: Stamp, buffer: Tensor, out: Tensor | None, divisor: float) -> Handle:
        if out is not None and self.size == 2:
            # The same number of bytes as with two halves, and one wait instead of two.
            return self._reduce(stamp, [buffer, buffer], out, divisor)
        numel = buffer.numel()
        bounds = [index * numel // self.size for index in range(self.size + 1)]
        slices, sums = self._slices(buffer, bounds), self._slices(buffer if out is None else out, bounds)
        reduced = self._reduce(stamp, slices, sums[self.rank], divisor)
        return Chain(reduced, lambda: self._gather_slices(self._exchange(stamp, _SECOND_PHASE), sums))

    def _do_all_to_all(self, stamp: Stamp, buffer: Tensor, out: Tensor, bounds: Bounds, out_bounds: Bounds) -> Handle:
        slices, slots = self._slices(buffer, bounds), self._slices(out, out_bounds)
        exchange = self._exchange(stamp)
        for peer in self._peers:
            exchange.receive(slots[peer], peer)
        for peer in self._peers:
            exchange.send(slices[peer], peer)
        return exchange

    def _do_broadcast(self, stamp: Stamp, buffer: Tensor, root: int) -> Handle:
        exchange = self._exchange(stamp)
        if self.rank == root:
            for peer in self._peers:
                exchange.send(buffer, peer)
        else:
            exchange.receive(buffer, root)
        return exchange

    def _do_send(self, stamp: Stamp, buffer: Tensor, to: int) -> Handle:
        exchange = self._exchange(stamp)
        exchange.send(buffer, to)
        return exchange

    def _do_receive(self, stamp: Stamp, buffer: Tensor, source: int) -> Handle:
        exchange = self._exchange(stamp)
        exchange.receive(buffer, source)
        return exchange

    # -- the exchange itself

    def _exchange(self, stamp: Stamp, phase: int = 0) -> _Exchange:
        """Make the exchange of a collective, with a tag that no other collective shares.

        The tag is made of the sequence number and a hash of (channel, kind, unit, elements, dtype). Messages of ranks
        that disagree therefore never match: they wait, and the stall watch reports it.
        """
        key = (stamp.channel, stamp.kind, stamp.unit, stamp.numel, stamp.dtype)
        code = self._hashes.get(key)
        if code is None:
            code = zlib.crc32(repr(key).encode()) & ((1 << _TAG_HASH_BITS) - 1)
            self._hashes[key] = code
        tag = ((stamp.sequence & ((1 << _TAG_SEQUENCE_BITS) - 1)) << _TAG_HASH_BITS) | code | phase
        return _Exchange(self, stamp, tag)

    def _gather_slices(self, exchange: _Exchange, slices: Sequence[Tensor]) -> _Exchange:
        """Send this rank's slice to every other rank, and receive theirs."""
        for peer in self._peers:
            exchange.receive(slices[peer], peer)
        for peer in self._peers:
            exchange.send(slices[self.rank], peer)
        return exchange

    def _reduce(self, stamp: Stamp, slices: Sequence[Tensor], out: Tensor, divisor: float) -> Handle:
        own = slices[self.rank]
        buffers = [out] if is_other_memory(out, own) else []  # receive buffers; the first is the memory of the sum
        num_more = self.size - 1 - len(buffers)
        scratch = self._scratch.allocate(own.numel() * num_more, own.dtype, own.device) if num_more else None
        if scratch is not None:
            buffers += [scratch[index * own.numel() : (index + 1) * own.numel()] for index in range(num_more)]
        exchange = self._exchange(stamp)
        terms: list[Tensor] = [own] * self.size
        for peer, received in zip(self._peers, buffers, strict=True):
            terms[peer] = received
            exchange.receive(received, peer)
        for peer in self._peers:
            exchange.send(slices[peer], peer)

        def finish() -> None:
            _sum_in_order(terms, out, divisor, own=self.rank)
            if scratch is not None:
                self._scratch.release(scratch)

        exchange.on_received = finish
        return exchange


class _Exchange(Handle):
    """Messages under way; ``on_received`` is called once, when all have arrived."""

    __slots__ = ("_comm", "_receives", "_sends", "_tag", "issued", "messages", "on_received")

    def __init__(self, comm: GlooComm, stamp: Stamp, tag: int) -> None:
        self._comm = comm
        self.stamp = stamp
        self._tag = tag
        self._receives: list[tuple[dist.Work, Tensor]] = []
        self._sends: list[tuple[dist.Work, Tensor]] = []
        self.messages: list[tuple[str, int, int, int]] = []  # direction, peer in the group, tag, bytes: for the watch
        self.on_received: Callable[[], None] | None = None

    def receive(self, tensor: Tensor, peer: int) -> None:
        self._begin("receive", self._comm.group.recv, tensor.data, peer, self._receives)

    def send(self, tensor: Tensor, peer: int) -> None:
        with torch_private.without_function_modes():  # selective recomputation would count .data as a write
            alias = tensor.data
        self._begin("send", self._comm.group.send, alias, peer, self._sends)

    def _begin(
        self,
        kind: str,
        begin: Callable[..., dist.Work],
        alias: Tensor,
        peer: int,
        pending: list[tuple[dist.Work, Tensor]],
    ) -> None:
        """Start a message of ``alias``: ``.data``, whose version counter is separate, because it is emptied later."""
        if not alias.numel():
            return  # the peer skips it too
        peer_rank = self._comm.ranks[peer]
        self.messages.append((kind, peer_rank, self._tag, alias.nbytes))
        try:
            if profiler._is_profiler_enabled:
                begin = _unrecorded(begin)
            pending.append((begin([alias], peer_rank, self._tag), alias))
        except RuntimeError as error:
            raise self._failure(error) from error

    def start_next_phase(self) -> bool:
        if self._receives:
            self._wait(self._receives)
        if self.on_received is not None:
            finish, self.on_received = self.on_received, None
            finish()
        return False

    def wait(self) -> None:
        self.start_next_phase()
        if self._sends:
            self._wait(self._sends)

    def _wait(self, messages: list[tuple[dist.Work, Tensor]]) -> None:
        stall.waiting = self.stamp
        watch = self._comm.watch
        if watch is not None:
            watch.enter_wait(self)
        begin = time.perf_counter()
        try:
            with self._range():
                for work, _ in messages:
                    work.wait()
        except RuntimeError as error:
            raise self._failure(error) from error
        finally:
            stall.waiting = None
            self._comm.waited_s += time.perf_counter() - begin
        if watch is not None:
            watch.leave_wait()
        for _, alias in messages:
            if torch.is_inference_mode_enabled() or not alias.is_inference():  # else torch forbids it
                alias.set_()  # pyrefly: ignore[no-matching-overload] - the kept ``Work`` must not keep memory
        self._comm.kept_works.append(tuple(work for work, _ in messages))
        messages.clear()

    def _range(self) -> AbstractContextManager[Any]:
        """Mark the wait in a profile: ``shardwise::arrive [all_gather blocks.3]``; nothing without a profiler."""
        if not profiler._is_profiler_enabled:
            return _NOTHING
        return record_function(f"shardwise::arrive [{self.stamp.kind} {self.stamp.unit}]")

    def _failure(self, error: RuntimeError) -> CommError:
        message = str(error).strip().splitlines()[0]
        if self._comm.watch is not None:
            return self._comm.watch.failure(str(self.stamp), message)
        return CommError(f"{self.stamp} failed: {message}")


def _unrecorded(begin: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    """Wrap ``begin`` so that the message has no range in a profile.

    torch ends the range of a message at its wait. If the profile has ended before, as for messages that a failed
    forward left under way, torch writes into memory that the profiler has freed (torch 2.13; valgrind shows it).
    """

    def begin_unrecorded(*args: object) -> dist.Work:
        torch.autograd._enable_record_function(False)  # noqa: FBT003 - there is no public name
        try:
            return begin(*args)
        finally:
            torch.autograd._enable_record_function(True)  # noqa: FBT003

    return begin_unrecorded


def _sum_in_order(terms: Sequence[Tensor], out: Tensor, divisor: float, *, own: int) -> None:
    """Write ``((terms[0] + terms[1]) + ...) / divisor`` to ``out``, chunk by chunk.

    ``out`` may be any one of the terms. Term ``own`` is only read, unless it is ``out``.
    """
    if len(terms) == 2 and divisor == 1:
        torch.add(terms[0], terms[1], out=out)
        return
    numel = out.numel()
    for start in range(0, numel, CHUNK_NUMEL):
        stop = min(start + CHUNK_NUMEL, numel)
        target = out[start:stop]
        total = terms[0][start:stop]
        # ``out`` may be a term that has yet to be added, so the running sum is kept in another term.
        running = terms[1 if own == 0 else 0][start:stop]
        for index in range(1, len(terms)):
            is_last = index == len(terms) - 1
            total = torch.add(total, terms[index][start:stop], out=target if is_last else running)
        if divisor != 1:
            torch.div(total, divisor, out=target)


class ScratchBuffers:
    """The unused receive buffers of one Comm, by dtype, smallest first.

    A buffer serves every sum that it is large enough for. After several reductions one buffer per dtype is left, as
    large as the largest sum (``spec.memory.footprint`` relies on this).
    """

    def __init__(self) -> None:
        self._free: dict[torch.dtype, list[Tensor]] = {}

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the smallest unused buffer of at least ``numel`` elements, or a new one in place of the largest."""
        free = self._free.setdefault(dtype, [])
        index = bisect.bisect_left(free, numel, key=Tensor.numel)
        if index < len(free):
            return free.pop(index)
        if free:
            free.pop()
        return torch.empty(numel, dtype=dtype, device=device)

    def release(self, buffer: Tensor) -> None:
        """Take back a buffer of :meth:`allocate`."""
        bisect.insort(self._free[buffer.dtype], buffer, key=Tensor.numel)

    @property
    def free(self) -> list[Tensor]:
        """The unused buffers."""
        return [buffer for buffers in self._free.values() for buffer in buffers]

    @property
    def num_bytes(self) -> int:
        """Bytes of the unused buffers."""
        return sum(buffer.nbytes for buffer in self.free)


def is_other_memory(out: Tensor, own: Tensor) -> bool:
    """Whether ``out`` is other memory than this rank's own term, so that a peer's slice can be received there."""
    return _address(out) != _address(own)


def _address(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage._cdata, int(tensor.storage_offset())
