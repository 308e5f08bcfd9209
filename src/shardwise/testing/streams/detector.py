"""The happens-before detector: what is enqueued on streams and done by the host, and whether waits order it.

It is told of every kernel, copy, wait, allocation and free, in the order in which the host comes to them, and asks
whether a GPU would have been *obliged* to run each behind what it depends on. Nothing has to run late for a race to be
found. The rules:

1. Two accesses to overlapping bytes, one of them a write, must be ordered. This holds for host memory that copies use.
2. Memory that is freed may be handed out at the next allocation on the stream that it was allocated on. Whatever used
   it must be done before that, as that stream and the host see it.
3. An allocation counts as a write of its stream: another stream may use the memory only behind that point.
4. A launch takes over what the launching thread has seen. A wait for an event takes over what its stream had seen when
   the event was recorded.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwise.testing.streams.clocks import Agent, Clock
from shardwise.testing.streams.memory import Access, Memory, Side, extent
from shardwise.testing.streams.places import Stack, here
from shardwise.testing.streams.report import EarlyFree, Findings, HostWait, Mismatch, Seen, race


class Local(threading.local):
    """State of one thread.

    Attributes:
        host: The thread as an agent.
        stream: The current stream of the device; ``None``: the default one.
        num_hidden: Operators are not seen while this is above 0.
        side: Where a factory that is running makes its tensor; ``None``: where its arguments are.
        non_blocking: The copy that is running was asked not to wait.
        is_watched: Operators of this thread are seen.
    """

    def __init__(self) -> None:
        self.host: Agent | None = None
        self.stream: Any = None
        self.num_hidden = 0
        self.side: Side | None = None
        self.non_blocking = False
        self.is_watched = False


class Detector:
    """Clocks of all agents, histories of all memory, and what was found.

    Attributes:
        seen: The findings.
        local: State of the calling thread.
        lock: Held while anything here changes.
        compute: The default stream, as an agent.
        default: The default stream, as ``torch.cuda.default_stream`` gives it.
        refuses_waits: Waits of the host that ``torch.cuda.set_sync_debug_mode`` knows raise.
        allocated_bytes, peak_bytes: Device memory that tensors hold now, and the most so far.
    """

    def __init__(self) -> None:
        self.seen = Seen(settle=self._settle)
        self.local = Local()
        self.lock = threading.RLock()
        self.allocated_bytes = self.peak_bytes = 0
        self.refuses_waits = False
        self._is_open = True
        self._findings = Findings(self.seen)
        self._numbers = itertools.count()
        self._streams: list[Agent] = []
        self._freed: dict[Agent, list[tuple[Memory, list[Access], set[Agent], Stack]]] = defaultdict(list)
        self.compute = self.new_stream("the compute stream")
        self.default: Any = None

    # -- agents

    def new_stream(self, name: str) -> Agent:
        """A stream as an agent."""
        with self.lock:
            agent = Agent(next(self._numbers), name, is_host=False)
            self._streams.append(agent)
        return agent

    @property
    def host(self) -> Agent:
        """The calling thread as an agent."""
        found = self.local.host
        if found is None:
            name = threading.current_thread().name
            shown = "the host" if name == "MainThread" else f"the host's thread {name}"
            with self.lock:
                found = self.local.host = Agent(next(self._numbers), shown, is_host=True)
        return found

    @property
    def stream(self) -> Agent:
        """The current stream of the calling thread, as an agent."""
        stream = self.local.stream
        return self.compute if stream is None else stream.agent

    # -- order

    def moment_of(self, agent: Agent) -> Clock:
        """The work certain to be done when the calling thread enqueues something on a stream now (an event)."""
        with self.lock:
            agent.learn(self.host.clock)
            return dict(agent.clock)

    def wait(self, agent: Agent, moment: Clock) -> None:
        """Make a stream, or a thread of the host, wait for an event."""
        with self.lock:
            agent.learn(self.host.clock)
            agent.learn(moment)

    def host_waits(self, why: str, moment: Clock | None = None) -> None:
        """The calling thread waits for the device: for a moment of a stream, by default the current one's newest."""
        with self.lock:
            self.host.learn(self.stream.clock if moment is None else moment)
            self.seen.host_waits.append(HostWait(why, here()))
        if self.refuses_waits and moment is None:
            raise RuntimeError(f"called a synchronizing CUDA operation: {why}")

    def host_waits_for_all(self, why: str) -> None:
        """The calling thread waits for every stream."""
        with self.lock:
            for stream in self._streams:
                self.host.learn(stream.clock)
            self.seen.host_waits.append(HostWait(why, here()))

    # -- accesses

    def launch(self, operation: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """A kernel or a copy on the current stream."""
        with self.lock:
            agent = self.stream
            agent.learn(self.host.clock)
            self._access(agent, operation, reads, writes)

    def on_host(self, operation: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """Something that the calling thread does itself, with memory of the host that copies have used."""
        with self.lock:
            self._access(self.host, operation, reads, writes)

    def _access(self, agent: Agent, operation: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        time, where = agent.tick(), here()
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                memory = memory_of(tensor)
                if memory is None or tensor.numel() == 0 or (agent.is_host and memory.side is Side.DEVICE):
                    continue
                access = Access(agent, time, is_write, *extent(tensor), operation, where)
                for other in memory.add(access):
                    self._findings.add(race(other, access, memory))

    def mismatch(self, what: str) -> None:
        """Note an operator that a GPU would refuse."""
        with self.lock:
            self._findings.add(Mismatch(what, here()))

    # -- memory

    def make(self, storage: torch.UntypedStorage, side: Side) -> Memory:
        """A storage has got memory on a side."""
        home = self.stream if side is Side.DEVICE else None
        memory = Memory(side, home, storage.nbytes(), here(4), self)
        set_memory(storage, memory)
        if home is not None:
            with self.lock:
                self._hand_out(memory, home)
        return memory

    def resize(self, memory: Memory, num_bytes: int) -> None:
        """The storage of device memory gives it back, or gets other memory."""
        with self.lock:
            if num_bytes != memory.num_bytes and memory.num_bytes:
                self._take_back(memory)
                memory.accesses, memory.recorded = [], set()
            memory.num_bytes = num_bytes
            if num_bytes:
                memory.home, memory.made = self.stream, here(4)
                self._hand_out(memory, self.stream)

    def _hand_out(self, memory: Memory, home: Agent) -> None:
        self._reuse(home)
        memory.accesses = [Access(home, home.time, True, 0, memory.num_bytes, "allocation", memory.made)]  # noqa: FBT003
        self.allocated_bytes += memory.num_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def _reuse(self, home: Agent) -> None:
        """Whatever was freed on a stream may be handed out there now: it must be out of use."""
        gone = self._freed.pop(home, ())
        if not gone:
            return
        home.learn(self.host.clock)
        for memory, accesses, recorded, where in gone:
            for access in accesses:
                if not (access.agent.is_host or access.agent in recorded or home.has_seen(access.agent, access.time)):
                    self._findings.add(EarlyFree(access, memory.made, where, home))

    def _take_back(self, memory: Memory) -> None:
        assert memory.home is not None
        self.allocated_bytes -= memory.num_bytes
        if any(access.agent is not memory.home for access in memory.accesses):
            self._freed[memory.home].append((memory, memory.accesses, memory.recorded, here()))

    def adopt(self, storage: torch.UntypedStorage, side: Side) -> Memory:
        """A storage was made under another detector, before anything that this one has seen."""
        home = self.compute if side is Side.DEVICE else None
        memory = Memory(side, home, storage.nbytes(), (), self)
        set_memory(storage, memory)
        self.allocated_bytes += memory.num_bytes if home is not None else 0
        return memory

    def died(self, memory: Memory) -> None:
        """The storage of memory is gone: it goes back to the allocator."""
        if self._is_open and memory.side is Side.DEVICE and memory.num_bytes:
            with self.lock:
                self._take_back(memory)

    def _settle(self) -> None:
        with self.lock:
            for home in tuple(self._freed):
                self._reuse(home)

    def close(self) -> None:
        """The context has ended: what dies from now on concerns nobody."""
        self._is_open = False
        _locked.clear()

    # -- threads

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Operators of this thread are not seen inside: they stand for no work of the program."""
        self.local.num_hidden += 1
        try:
            yield
        finally:
            self.local.num_hidden -= 1

    @contextmanager
    def making(self, side: Side | None, *, non_blocking: bool = False) -> Iterator[None]:
        """Tensors that operators of this thread make inside lie on this side."""
        before = self.local.side, self.local.non_blocking
        self.local.side, self.local.non_blocking = side, non_blocking
        try:
            yield
        finally:
            self.local.side, self.local.non_blocking = before


#: Those at work, the newest last.
_active: list[Detector] = []

#: Under this name a storage keeps its :class:`Memory`. The object that Python sees of a storage lives as long as it.
_KEY = "_shardwise_memory"
#: Memory by its address that the driver was asked to lock, whatever storage is made over it.
_locked: dict[int, Memory] = {}


def set_memory(storage: torch.UntypedStorage, memory: Memory) -> None:
    """Place a storage in this memory."""
    storage.__dict__[_KEY] = memory


def lock_memory(address: int, memory: Memory) -> None:
    """Place storages at this address that are yet to be made in this memory."""
    _locked[address] = memory


def unlock_memory(address: int) -> None:
    """Undo :func:`lock_memory`."""
    _locked.pop(address, None)


def memory_of(tensor: Tensor) -> Memory | None:
    """The memory that a tensor lies in, where the detector knows it: pretended, or used by a copy."""
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None  # sparse tensors, those inside of transforms
    found = storage.__dict__.get(_KEY)
    if found is None and _locked:
        found = _locked.get(storage.data_ptr())
        if found is not None:
            set_memory(storage, found)
    if found is not None and found.owner is not None and _active and found.owner is not _active[-1]:
        return _active[-1].adopt(storage, found.side)
    return found


def side_of(tensor: Tensor) -> Side:
    """The side on which a tensor lies; a tensor that the detector does not know lies on the host."""
    memory = memory_of(tensor)
    return Side.HOST if memory is None else memory.side


# -- the one that is at work


def active() -> Detector:
    """The detector at work.

    Raises:
        RuntimeError: There is none.
    """
    if not _active:
        raise RuntimeError(
            "no pretended device is in use here.\n  Make and use streams inside `with streams.pretended_cuda():`."
        )
    return _active[-1]


@contextmanager
def at_work(detector: Detector) -> Iterator[Seen]:
    """Observe all work inside the context with a detector."""
    _active.append(detector)
    try:
        yield detector.seen
    finally:
        detector.close()
        _active.remove(detector)
