"""Collectives over Gloo, point to point.

c10d's own Gloo reduce-scatter clones its input and all-reduces the whole of it, and its all-gather fills a full-size
temporary. Here every rank sends each peer exactly the slice that the peer needs, straight out of the flat buffer, and
receives straight into it (gather), or into where the sum will be and a reused scratch (reduce). Sums run in rank order,
so that the result is the same number whatever the strategy, and the same that one process gets by adding up the ranks'
contributions in order.

A direct exchange was measured faster than a ring at 2, 4 and 8 ranks.
"""

from __future__ import annotations

import bisect
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler

from shardwise.comm import stall
from shardwise.comm.base import Chain, CollectiveEvent, Comm, Done, Handle
from shardwise.spec.errors import CommError

if TYPE_CHECKING:
    from shardwise.comm.stall import StallWatch

#: Sums run in chunks of this many elements, so that a chunk stays in the cache from the first addition to the division.
CHUNK_NUMEL = 1 << 15

_DONE = Done()
_Stamp = tuple[CollectiveEvent, stall.Issued, int]  # its event, its place in the sequence, its tag
_TAG_SEQUENCE_BITS = 15
_TAG_HASH_BITS = 15
_TAG_SECOND_PHASE = 1 << (_TAG_SEQUENCE_BITS + _TAG_HASH_BITS)


class GlooComm(Comm):
    """Collectives over the ranks of a Gloo process group, for CPU tensors.

    Args:
        group: A Gloo process group that holds the ranks of this axis.
        axis: Name of the mesh axis.
        channel: Name in messages about this Comm, where an axis has more than one.
        watch: Notices stalls and tells ranks that disagree (``comm.stall``).
        ranks: Those of the group's ranks that lie on the axis with this one, in coordinate order; by default all. As
            messages go point to point, an axis needs no process group of its own.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        axis: str,
        *,
        channel: str | None = None,
        watch: StallWatch | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self._ranks = tuple(ranks) if ranks is not None else tuple(range(group.size()))
        super().__init__(axis, self._ranks.index(group.rank()), len(self._ranks), torch.device("cpu"))
        self.channel = channel or axis
        self._line = _Line(group, self._ranks, watch)
        self._sequence = 0
        self._hashes: dict[tuple[str, str, str, int], int] = {}
        self._num_passed: dict[str, int] = {}  # messages from one rank to another, by the name of that way
        self._scratch = Scratch()
        # Peers in an order that differs from rank to rank, so that not all send to rank 0 first.
        self._peers = tuple((self.rank + step) % self.size for step in range(1, self.size))

    @property
    def held_bytes(self) -> int:
        """As :attr:`Comm.held_bytes`."""
        return self._scratch.num_bytes

    def all_gather(self, buffer: Tensor, *, unit: str, cuts: Sequence[int] | None = None) -> Handle:
        """As :meth:`Comm.all_gather`."""
        stamp = self._start("all_gather", unit, buffer)
        if self.size == 1:
            return _DONE
        return self._spread(self._slices(buffer, cuts), stamp)

    def reduce_scatter(
        self, buffer: Tensor, out: Tensor, *, unit: str, divisor: float = 1, cuts: Sequence[int] | None = None
    ) -> Handle:
        """As :meth:`Comm.reduce_scatter`."""
        stamp = self._start("reduce_scatter", unit, buffer)
        return self._reduce(self._slices(buffer, cuts), out, divisor, stamp)

    def all_reduce(self, buffer: Tensor, *, unit: str, divisor: float = 1, out: Tensor | None = None) -> Handle:
        """As :meth:`Comm.all_reduce`."""
        stamp = event, issued, tag = self._start("all_reduce", unit, buffer)
        if out is not None and self.size == 2:
            # As many bytes as by halves, and half the waiting.
            return self._reduce([buffer, buffer], out, divisor, stamp)
        numel = buffer.numel()
        cuts = [index * numel // self.size for index in range(self.size + 1)]
        slices, sums = self._slices(buffer, cuts), self._slices(buffer if out is None else out, cuts)
        reduced = self._reduce(slices, sums[self.rank], divisor, stamp)
        if self.size == 1:
            return Chain(reduced, Done)  # of as many phases as elsewhere: a world of one does what others do
        return Chain(reduced, lambda: self._spread(sums, (event, issued, tag | _TAG_SECOND_PHASE)))

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
        # Where each rank has its own cuts no number of elements is the same on all of them.
        event, issued, tag = self._start("all_to_all", unit, buffer, None if out_cuts is None else (0,))
        if self.size == 1:
            return _DONE
        slices, slots = self._slices(buffer, cuts), self._slices(out, out_cuts)
        exchange = self._exchange(issued, tag)
        for peer in self._peers:
            exchange.receive(slots[peer], peer)
        for peer in self._peers:
            exchange.send(slices[peer], peer, event)
        return exchange

    def broadcast(self, buffer: Tensor, *, root: int, unit: str) -> Handle:
        """As :meth:`Comm.broadcast`."""
        event, issued, tag = self._start("broadcast", unit, buffer)
        if self.size == 1:
            return _DONE
        exchange = self._exchange(issued, tag)
        if self.rank == root:
            for peer in self._peers:
                exchange.send(buffer, peer, event)
        else:
            exchange.receive(buffer, root)
        return exchange

    def gather(
        self, shard: Tensor, out: Tensor | None, *, root: int, unit: str, cuts: Sequence[int] | None = None
    ) -> Handle:
        """As :meth:`Comm.gather`."""
        event, issued, tag = self._start("gather", unit, shard, cuts)
        exchange = self._exchange(issued, tag)
        if self.rank != root:
            exchange.send(shard, root, event)
            return exchange
        assert out is not None
        slices = self._slices(out, cuts)
        for peer in self._peers:
            exchange.receive(slices[peer], peer)
        slices[root].copy_(shard)
        return exchange

    def scatter(
        self, buffer: Tensor | None, out: Tensor, *, root: int, unit: str, cuts: Sequence[int] | None = None
    ) -> Handle:
        """As :meth:`Comm.scatter`."""
        event, issued, tag = self._start("scatter", unit, out, cuts)
        exchange = self._exchange(issued, tag)
        if self.rank != root:
            exchange.receive(out, root)
            return exchange
        assert buffer is not None
        slices = self._slices(buffer, cuts)
        for peer in self._peers:
            exchange.send(slices[peer], peer, event)
        out.copy_(slices[root])
        return exchange

    def send(self, buffer: Tensor, *, to: int, unit: str) -> Handle:
        """As :meth:`Comm.send`."""
        exchange = self._exchange(*self._pass(self.rank, to, unit, buffer))
        exchange.send(buffer, to, self._event("send", unit, buffer))
        return exchange

    def receive(self, buffer: Tensor, *, source: int, unit: str) -> Handle:
        """As :meth:`Comm.receive`."""
        self._event("receive", unit, buffer)
        exchange = self._exchange(*self._pass(source, self.rank, unit, buffer))
        exchange.receive(buffer, source)
        return exchange

    def close(self) -> None:
        """Forget the scratch buffers and the last messages."""
        self._scratch.clear()
        self._line.kept.clear()

    # -- the exchange itself

    def _start(self, kind: str, unit: str, buffer: Tensor, cuts: Sequence[int] | None = None) -> _Stamp:
        """Stamp a collective: its event, its place in the sequence, and a tag that no other collective shares.

        The tag is made of the sequence number and a hash of (kind, unit, elements). Messages of ranks that disagree
        therefore never pair up: they wait, and the watch tells the ranks. (Where ranks pass slices of different sizes,
        elements are those of the whole: ``cuts``.)
        """
        event = self._event(kind, unit, buffer)
        numel = buffer.numel() if cuts is None else cuts[-1]
        sequence = self._sequence
        self._sequence = sequence + 1
        return event, *self._stamp(self.channel, sequence, kind, unit, numel)

    def _pass(self, source: int, target: int, unit: str, buffer: Tensor) -> tuple[stall.Issued, int]:
        """Stamp a message from one rank to another, alike on both: each way has a sequence of its own."""
        way = f"{self.channel}/{source}>{target}"
        sequence = self._num_passed.get(way, 0)
        self._num_passed[way] = sequence + 1
        return self._stamp(way, sequence, "message", unit, buffer.numel())

    def _stamp(self, channel: str, sequence: int, kind: str, unit: str, numel: int) -> tuple[stall.Issued, int]:
        key = (channel, kind, unit, numel)
        code = self._hashes.get(key)
        if code is None:
            code = zlib.crc32(repr(key).encode()) & ((1 << _TAG_HASH_BITS) - 1)
            self._hashes[key] = code
        issued = stall.Issued(channel, sequence, kind, unit, numel)
        stall.note(issued)
        return issued, ((sequence & ((1 << _TAG_SEQUENCE_BITS) - 1)) << _TAG_HASH_BITS) | code

    def _exchange(self, issued: stall.Issued, tag: int) -> _Exchange:
        return _Exchange(self._line, issued, tag)

    def _spread(self, slices: Sequence[Tensor], stamp: _Stamp) -> _Exchange:
        """Send this rank's slice to every other, and receive theirs."""
        event, issued, tag = stamp
        exchange = self._exchange(issued, tag)
        for peer in self._peers:
            exchange.receive(slices[peer], peer)
        for peer in self._peers:
            exchange.send(slices[self.rank], peer, event)
        return exchange

    def _reduce(self, slices: Sequence[Tensor], out: Tensor, divisor: float, stamp: _Stamp) -> Handle:
        event, issued, tag = stamp
        own = slices[self.rank]
        if self.size == 1:
            _sum_in_order([own], out, divisor, own=0)
            return _DONE
        places = [out] if is_apart(out, own) else []  # of the peers' slices: the first goes to where the sum will be
        num_more = self.size - 1 - len(places)
        scratch = self._scratch.take(own.numel() * num_more, own.dtype, own.device) if num_more else None
        if scratch is not None:
            places += [scratch[place * own.numel() : (place + 1) * own.numel()] for place in range(num_more)]
        exchange = self._exchange(issued, tag)
        terms: list[Tensor] = [own] * self.size
        for peer, place in zip(self._peers, places, strict=True):
            terms[peer] = place
            exchange.receive(place, peer)
        for peer in self._peers:
            exchange.send(slices[peer], peer, event)

        def finish() -> None:
            _sum_in_order(terms, out, divisor, own=self.rank)
            if scratch is not None:
                self._scratch.give(scratch)

        exchange.on_received = finish
        return exchange


@dataclass(frozen=True, slots=True)
class _Line:
    """What the exchanges of a Comm share.

    Destroying what torch made for a message (a ``Work``) waits until Gloo's thread has let go of it. Right after the
    wait that thread has yet to get a processor again: this was a third of the time of a sum of 4 KiB. Those of the last
    receives and the last sends are therefore kept until the next ones have been waited for.

    Attributes:
        group: The process group.
        ranks: Of the group, by coordinate on the axis.
        watch: Notices stalls.
        kept: Of the last two waits.
    """

    group: dist.ProcessGroup
    ranks: Sequence[int]
    watch: StallWatch | None
    kept: deque[tuple[dist.Work, ...]] = field(default_factory=lambda: deque(maxlen=2))


class _Exchange(Handle):
    """Messages under way; ``on_received`` runs once, when everything has arrived."""

    __slots__ = ("_line", "_receives", "_sends", "_tag", "issued", "messages", "on_received")

    def __init__(self, line: _Line, issued: stall.Issued, tag: int) -> None:
        self._line = line
        self.issued = issued
        self._tag = tag
        self._receives: list[tuple[dist.Work, Tensor]] = []
        self._sends: list[tuple[dist.Work, Tensor]] = []
        self.messages: list[tuple[str, int, int, int]] = []  # direction, peer in the group, tag, bytes: for the watch
        self.on_received: Callable[[], None] | None = None

    def receive(self, tensor: Tensor, peer: int) -> None:
        if not tensor.numel():
            return  # both sides know
        source = self._line.ranks[peer]
        self.messages.append(("receive", source, self._tag, tensor.nbytes))
        try:
            alias = tensor.data  # with a count of writes of its own: it is written to after the wait
            begin = _unrecorded(self._line.group.recv) if profiler._is_profiler_enabled else self._line.group.recv  # noqa: SLF001
            self._receives.append((begin([alias], source, self._tag), alias))
        except RuntimeError as error:
            raise self._failure(error) from error

    def send(self, tensor: Tensor, peer: int, event: CollectiveEvent) -> None:
        if not tensor.numel():
            return
        target = self._line.ranks[peer]
        self.messages.append(("send", target, self._tag, tensor.nbytes))
        event.sent_bytes += tensor.nbytes
        try:
            alias = tensor.data  # with a count of writes of its own: it is written to after the wait
            begin = _unrecorded(self._line.group.send) if profiler._is_profiler_enabled else self._line.group.send  # noqa: SLF001
            self._sends.append((begin([alias], target, self._tag), alias))
        except RuntimeError as error:
            raise self._failure(error) from error

    def advance(self) -> bool:
        if self._receives:
            self._wait(self._receives)
        if self.on_received is not None:
            finish, self.on_received = self.on_received, None
            finish()
        return False

    def wait(self) -> None:
        self.advance()
        if self._sends:
            self._wait(self._sends)

    def _wait(self, messages: list[tuple[dist.Work, Tensor]]) -> None:
        stall.waiting = self.issued
        watch = self._line.watch
        if watch is not None:
            watch.entered(self)
        try:
            for work, _ in messages:
                work.wait()
        except RuntimeError as error:
            raise self._failure(error) from error
        finally:
            stall.waiting = None
        if watch is not None:
            watch.left()
        for _, alias in messages:
            if torch.is_inference_mode_enabled() or not alias.is_inference():  # torch would not let it
                alias.set_()  # pyrefly: ignore[no-matching-overload] - what is kept has no memory
        self._line.kept.append(tuple(work for work, _ in messages))
        messages.clear()

    def _failure(self, error: RuntimeError) -> CommError:
        message = str(error).strip().splitlines()[0]
        if self._line.watch is not None:
            return self._line.watch.failure(str(self.issued), message)
        return CommError(f"{self.issued} failed: {message}")


def _unrecorded(begin: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    """``begin``, without a range of its own in a profile.

    torch ends the range of a message at its wait. Where the profile has ended before, as it has for what a failed
    forward left under way, that writes into memory that the profiler has freed (torch 2.13; valgrind shows it).
    """

    def begin_unrecorded(*args: object) -> dist.Work:
        torch.autograd._enable_record_function(False)  # noqa: FBT003, SLF001 - there is no public name
        try:
            return begin(*args)
        finally:
            torch.autograd._enable_record_function(True)  # noqa: FBT003, SLF001

    return begin_unrecorded


def _sum_in_order(terms: Sequence[Tensor], out: Tensor, divisor: float, *, own: int) -> None:
    """``out = (((terms[0] + terms[1]) + ...) / divisor``, chunk by chunk.

    ``out`` may be any one of the terms. Term ``own`` is only read, where it is not ``out``.
    """
    if len(terms) == 1 and divisor == 1:
        if out.data_ptr() != terms[0].data_ptr():
            out.copy_(terms[0])
        return
    if len(terms) == 2 and divisor == 1:
        torch.add(terms[0], terms[1], out=out)
        return
    numel = out.numel()
    for start in range(0, numel, CHUNK_NUMEL):
        stop = min(start + CHUNK_NUMEL, numel)
        target = out[start:stop]
        total = terms[0][start:stop]
        # The running sum must not overwrite a term that has yet to be added, which ``out`` may be.
        running = terms[1 if own == 0 and len(terms) > 1 else 0][start:stop]
        for index in range(1, len(terms)):
            is_last = index == len(terms) - 1
            total = torch.add(total, terms[index][start:stop], out=target if is_last else running)
        if divisor != 1:
            torch.div(total, divisor, out=target)
        elif len(terms) == 1:
            target.copy_(total)


class Scratch:
    """The receive buffers of one Comm that are free, by dtype, smallest first.

    A buffer serves every sum that it is large enough for. As reductions follow one another, one buffer per dtype is
    left, as large as the largest sum (``spec.memory.footprint`` counts on that).
    """

    def __init__(self) -> None:
        self._free: dict[torch.dtype, list[Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The smallest free buffer of at least ``numel`` elements; else a new one, in the place of the largest."""
        free = self._free.setdefault(dtype, [])
        index = bisect.bisect_left(free, numel, key=Tensor.numel)
        if index < len(free):
            return free.pop(index)
        if free:
            free.pop()
        return torch.empty(numel, dtype=dtype, device=device)

    def give(self, buffer: Tensor) -> None:
        """Return a buffer that :meth:`take` gave out."""
        bisect.insort(self._free[buffer.dtype], buffer, key=Tensor.numel)

    def clear(self) -> None:
        """Forget all buffers."""
        self._free.clear()

    @property
    def free(self) -> list[Tensor]:
        """The buffers that are free now."""
        return [buffer for buffers in self._free.values() for buffer in buffers]

    @property
    def num_bytes(self) -> int:
        """Bytes of those."""
        return sum(buffer.nbytes for buffer in self.free)


def is_apart(out: Tensor, own: Tensor) -> bool:
    """A sum goes to ``out``, which is not this rank's own term: a peer's slice can be received there."""
    return _place(out) != _place(own)


def _place(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage._cdata, int(tensor.storage_offset())  # noqa: SLF001 - addresses of meta tensors are all 0
