"""NCCL's collectives without NCCL: ``torch.distributed``'s calls on tensors of a pretended device.

A call is a kernel of the current stream, and returns at once. Sent data is copied at the call. Results are written when
a stream or the host waits for them. A *carrier* transports the data: Gloo, in one thread for each communicator and in
the order of issue; or no transport, if this process acts as one rank of a world that does not exist.
"""

from __future__ import annotations

import queue
import threading
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm import stall
from shardwise.testing.streams.clocks import Agent
from shardwise.testing.streams.detector import Detector
from shardwise.testing.streams.device import Stream, current_stream
from shardwise.testing.streams.memory import Target
from shardwise.testing.streams.report import Collective
from shardwise.testing.streams.stacks import here

#: Returns the results of a collective, in the order of its targets.
Move = Callable[[], Sequence[Tensor]]


class Message(NamedTuple):
    """A send or receive in a batch. ``dist.P2POp`` would refuse the device, because the group is not NCCL's."""

    move: Any
    buffer: Tensor
    group: Any
    peer: int


class Carrier(ABC):
    """Transports the data of collectives, in the order of issue on each communicator."""

    @abstractmethod
    def gathered(self, sent: Tensor, group: Any) -> list[Tensor]:
        """Every rank's ``sent``, all of the same size."""

    @abstractmethod
    def exchanged(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]], group: Any) -> None:
        """Send tensors to ranks of the group, and receive into tensors from ranks of the group."""

    @abstractmethod
    def start(self, group: Any, move: Move) -> Future[Sequence[Tensor]]:
        """Run ``move`` after everything that was started on this group before."""


class OverGloo(Carrier):
    """Uses process groups of Gloo."""

    def __init__(self, detector: Detector) -> None:
        self._detector = detector
        self._queues: dict[Any, queue.SimpleQueue[tuple[Future[Any], Move] | None]] = {}

    def gathered(self, sent: Tensor, group: Any) -> list[Tensor]:
        """Every rank's ``sent``, by an all-gather."""
        if group.size() == 1:
            return [sent]
        plain = sent.contiguous().view(-1).view(torch.uint8)
        found = [torch.empty_like(plain) for _ in range(group.size())]
        dist.all_gather(found, plain, group=group)
        return [each.view(sent.dtype).view(sent.shape) for each in found]

    def exchanged(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]], group: Any) -> None:
        """Send and receive, all messages at the same time."""
        works = [dist.isend(buffer, group=group, group_dst=peer) for buffer, peer in sends if buffer.numel()]
        works += [dist.irecv(buffer, group=group, group_src=peer) for buffer, peer in receives if buffer.numel()]
        for work in works:
            assert work is not None
            work.wait()

    def start(self, group: Any, move: Move) -> Future[Sequence[Tensor]]:
        """Run ``move`` in the communicator's thread."""
        calls = self._queues.get(group)
        if calls is None:
            calls = self._queues[group] = queue.SimpleQueue()
            name = f"nccl {group.group_desc}"
            threading.Thread(target=self._work_off, args=(calls,), name=name, daemon=True).start()
        future: Future[Sequence[Tensor]] = Future()
        calls.put((future, move))
        return future

    def _work_off(self, calls: queue.SimpleQueue[tuple[Future[Any], Move] | None]) -> None:
        with self._detector.unobserved(), torch.no_grad():
            while (call := calls.get()) is not None:
                future, move = call
                try:
                    future.set_result(move())
                except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                    future.set_exception(error)

    def close(self) -> None:
        """End the threads."""
        for calls in self._queues.values():
            calls.put(None)


class Alone(Carrier):
    """Pretends the other ranks: each of them sends the same data as this rank."""

    def gathered(self, sent: Tensor, group: Any) -> list[Tensor]:
        """This rank's ``sent`` for every rank."""
        return [sent] * group.size()

    def exchanged(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]], group: Any) -> None:  # noqa: ARG002
        """Receive a sent tensor with the same shape and dtype, or zeros if there is none."""
        for buffer, _ in receives:
            alike = (sent for sent, _ in sends if sent.shape == buffer.shape and sent.dtype == buffer.dtype)
            buffer.copy_(next(alike, torch.zeros((), dtype=buffer.dtype)))

    def start(self, group: Any, move: Move) -> Future[Sequence[Tensor]]:  # noqa: ARG002
        """Run ``move`` at once."""
        future: Future[Sequence[Tensor]] = Future()
        with torch.no_grad():
            future.set_result(move())
        return future


class _UnderWay:
    """A collective whose results have not been written yet."""

    def __init__(self, detector: Detector, future: Future[Sequence[Tensor]], targets: list[Target]) -> None:
        self._detector, self._future, self.targets = detector, future, targets
        self._lock = threading.Lock()

    def is_done(self) -> bool:
        return self._future.done()

    def deliver(self) -> None:
        with self._detector.unobserved(), torch.no_grad(), self._lock:
            results = self._future.result()
            targets, self.targets = self.targets, []
            for target, result in zip(targets, results, strict=False):
                target.write(result)


class Calls:
    """Replaces ``torch.distributed`` in ``NcclComm``, with the calls that it uses, for a pretended device."""

    def __init__(self, detector: Detector, carrier: Carrier) -> None:
        self._detector, self._carrier = detector, carrier
        self.ReduceOp = types.SimpleNamespace(SUM=("sum", 1.0), AVG=("avg", 1.0))
        self.P2POp = lambda move, buffer, group=None, group_peer=0: Message(move, buffer, group, group_peer)
        self.isend, self.irecv = "isend", "irecv"

    def _make_nccl_premul_sum(self, factor: float) -> tuple[str, float]:
        """The operation that multiplies by ``factor`` and sums; the name is that of ``torch.distributed``."""
        return "sum", factor

    def all_gather_single(self, out: Tensor, own: Tensor, group: Any = None) -> None:
        """See ``dist.all_gather_single``."""
        sent = self._copy(own)
        self._issue("all_gather", group, [own], [out], lambda: [torch.cat(self._carrier.gathered(sent, group))])

    def all_gather(self, outs: list[Tensor], own: Tensor, group: Any = None) -> None:
        """See ``dist.all_gather``; slices may differ in size."""
        sent, sizes = self._copy(own), [out.numel() for out in outs]

        def move() -> list[Tensor]:
            padded = torch.zeros(max(sizes), dtype=sent.dtype)
            padded[: sent.numel()] = sent
            return [part[:size] for part, size in zip(self._carrier.gathered(padded, group), sizes, strict=True)]

        self._issue("all_gather", group, [own], outs, move)

    def reduce_scatter_single(self, out: Tensor, buffer: Tensor, op: Any = None, group: Any = None) -> None:
        """See ``dist.reduce_scatter_single``."""
        sent, rank, size = self._copy(buffer), group.rank(), group.size()
        self._issue("reduce_scatter", group, [buffer], [out], lambda: [self._sum(sent, op, group).view(size, -1)[rank]])

    def reduce_scatter(self, out: Tensor, parts: list[Tensor], op: Any = None, group: Any = None) -> None:
        """See ``dist.reduce_scatter``; slices may differ in size."""
        sent, begin, numel = self._copy(*parts), sum(p.numel() for p in parts[: group.rank()]), out.numel()
        self._issue("reduce_scatter", group, parts, [out], lambda: [self._sum(sent, op, group)[begin : begin + numel]])

    def all_reduce(self, total: Tensor, op: Any = None, group: Any = None) -> None:
        """See ``dist.all_reduce``."""
        sent = self._copy(total)
        self._issue("all_reduce", group, [total], [total], lambda: [self._sum(sent, op, group)])

    def all_to_all(self, outs: list[Tensor], parts: list[Tensor], group: Any = None) -> None:
        """See ``dist.all_to_all``."""
        sent, got = [self._copy(part) for part in parts], [self._empty(out) for out in outs]

        def move() -> list[Tensor]:
            rank = group.rank()
            sends, receives = ([(t, peer) for peer, t in enumerate(ts) if peer != rank] for ts in (sent, got))
            self._carrier.exchanged(sends, receives, group)
            got[rank] = sent[rank]
            return got

        self._issue("all_to_all", group, parts, outs, move)

    def broadcast(self, buffer: Tensor, group: Any = None, group_src: int = 0) -> None:
        """See ``dist.broadcast``."""
        sent, is_root = self._copy(buffer), group.rank() == group_src
        buffers = ([buffer], []) if is_root else ([], [buffer])
        self._issue("broadcast", group, *buffers, lambda: [self._carrier.gathered(sent, group)[group_src]])

    def send(self, buffer: Tensor, group: Any = None, group_dst: int = 0) -> None:
        """See ``dist.send``."""
        self.batch_isend_irecv([Message(self.isend, buffer, group, group_dst)])

    def recv(self, buffer: Tensor, group: Any = None, group_src: int = 0) -> None:
        """See ``dist.recv``."""
        self.batch_isend_irecv([Message(self.irecv, buffer, group, group_src)])

    def batch_isend_irecv(self, messages: list[Message]) -> list[Any]:
        """See ``dist.batch_isend_irecv``; the stream waits for all messages."""
        group, own = messages[0].group, messages[0].group.rank()
        outgoing = [message for message in messages if message.move == self.isend]
        incoming = [message for message in messages if message.move == self.irecv]
        sent = [(self._copy(message.buffer), message.peer) for message in outgoing]
        got = [(self._empty(message.buffer), message.peer) for message in incoming]

        def move() -> list[Tensor]:
            self._carrier.exchanged(sent, got, group)
            return [buffer for buffer, _ in got]

        kind = "exchange" if outgoing and incoming else "send" if outgoing else "recv"
        pairs = [(own, message.peer) for message in outgoing] + [(message.peer, own) for message in incoming]
        buffers = ([m.buffer for m in outgoing], [m.buffer for m in incoming])
        self._issue(kind, group, *buffers, move, messages=tuple(pairs))
        return []

    # -- shared parts of the calls

    def _issue(
        self,
        kind: str,
        group: Any,
        reads: list[Tensor],
        writes: list[Tensor],
        move: Move,
        *,
        messages: tuple[tuple[int, int], ...] = (),
    ) -> None:
        detector, stream = self._detector, current_stream()
        detector.launch(f"nccl {kind}", reads, writes)
        numel = 0 if messages else sum(tensor.numel() for tensor in writes)
        unit = stall.history[-1].unit if stall.history else ""
        _note(detector, stream.agent, group, kind=kind, unit=unit, numel=numel, messages=messages)
        started = self._carrier.start(group, move)
        stream.pending = [each for each in stream.pending if each.targets]
        stream.pending.append(_UnderWay(detector, started, [Target(tensor) for tensor in writes]))

    def _copy(self, *tensors: Tensor) -> Tensor:
        """Copy the data to send, concatenated, after pending results of this stream are written into it."""
        _deliver_into(current_stream(), tensors)
        with self._detector.unobserved(), torch.no_grad():
            copies = [tensor.detach().clone() for tensor in tensors]
            return copies[0] if len(copies) == 1 else torch.cat(copies)

    def _empty(self, like: Tensor) -> Tensor:
        """Memory for received data, which does not count as the program's memory."""
        with self._detector.unobserved():
            return torch.empty(like.shape, dtype=like.dtype)

    def _sum(self, sent: Tensor, op: tuple[str, float], group: Any) -> Tensor:
        """The sum of all ranks' data, in rank order."""
        parts = self._carrier.gathered(sent, group)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        kind, factor = op
        return total / group.size() if kind == "avg" else total * factor if factor != 1 else total


def opening(detector: Detector, communicator: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``comm.axes.communicator`` to record where ranks connect, because the host then waits for all of them."""
    opened = set()

    def open_or_find(parent: Any, ranks: Sequence[int], axis: str, purpose: str, *given: Any, **named: Any) -> Any:
        group = communicator(parent, ranks, axis, purpose, *given, **named)
        if group not in opened:
            opened.add(group)
            detector.host.tick()
            _note(detector, detector.host, group, kind="open", unit=f"{axis}/{purpose}")
        return group

    return open_or_find


def _note(
    detector: Detector,
    agent: Agent,
    group: Any,
    *,
    kind: str,
    unit: str,
    numel: int = 0,
    messages: tuple[tuple[int, int], ...] = (),
) -> None:
    details = group.group_name, _ranks_of(group), numel, messages, agent.number, dict(agent.clock), here()
    detector.seen.collectives.append(Collective(kind, unit, *details))


def _deliver_into(stream: Stream, tensors: Sequence[Tensor]) -> None:
    """Write the pending results of the stream if one of them goes to the memory of these tensors."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    targets = [target for each in stream.pending for target in each.targets]
    if any(target.is_in(storage) for target in targets for storage in storages):
        stream.deliver()


def _ranks_of(group: Any) -> tuple[int, ...]:
    ranks = getattr(group, "ranks", None)
    return tuple(ranks) if isinstance(ranks, (tuple, list)) else tuple(dist.get_process_group_ranks(group))
