"""The happens-before detector: whether waits order the work on streams and on the host.

The detector observes every kernel, copy, wait, allocation and free, in the host's order, and checks whether a GPU would
be *obliged* to run each after the work that it depends on. So it finds races that did not happen in this run. The
rules:

1. Two accesses to overlapping bytes, one of them a write, must be ordered. This includes host memory used by copies.
2. Freed memory may be reused by the next allocation on the stream on which it was allocated. All earlier uses must be
   finished before, according to the clock of that stream.
3. An allocation counts as a write on its stream: another stream may use the memory only after it.
4. A launch merges the launching thread's clock into the stream's clock. A wait for an event merges the clock that the
   event's stream had when the event was recorded.
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
from shardwise.testing.streams.report import EarlyFree, Findings, HostWait, Mismatch, Seen, race
from shardwise.testing.streams.stacks import Stack, here


class Local(threading.local):
    """State of one thread.

    Attributes:
        host: The thread as an agent.
        stream: The current stream of the device; ``None``: the default stream.
        num_unobserved: Operators are not observed while this is above 0.
        side: Side of the tensors that a running factory makes; ``None``: that of its arguments.
        non_blocking: The running copy has ``non_blocking=True``.
        is_watched: Operators of this thread are observed.
    """

    def __init__(self) -> None:
        self.host: Agent | None = None
        self.stream: Any = None
        self.num_unobserved = 0
        self.side: Side | None = None
        self.non_blocking = False
        self.is_watched = False


class Detector:
    """Clocks of all agents, accesses to all memory, and findings.

    Attributes:
        seen: The findings.
        local: State of the calling thread.
        lock: Lock for all changes of the detector.
        compute: The default stream, as an agent.
        default: The default stream, as returned by ``torch.cuda.default_stream``.
        refuses_waits: Host waits raise, as with ``torch.cuda.set_sync_debug_mode("error")``.
        allocated_bytes: Bytes of device memory in use.
        peak_bytes: Peak of ``allocated_bytes``.
    """

    def __init__(self) -> None:
        self.seen = Seen(check_freed=self._check_freed)
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
        """Make an agent for a stream."""
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
        """The clock of an event that the calling thread records on a stream now."""
        with self.lock:
            agent.merge(self.host.clock)
            return dict(agent.clock)

    def wait(self, agent: Agent, moment: Clock) -> None:
        """Make a stream, or a thread of the host, wait for an event."""
        with self.lock:
            agent.merge(self.host.clock)
            agent.merge(moment)

    def host_waits(self, why: str, moment: Clock | None = None) -> None:
        """Note that the calling thread waits for an event's clock, by default for the current stream's work."""
        with self.lock:
            self.host.merge(self.stream.clock if moment is None else moment)
            self.seen.host_waits.append(HostWait(why, here()))
        if self.refuses_waits and moment is None:
            raise RuntimeError(f"called a synchronizing CUDA operation: {why}")

    def host_waits_for_all(self, why: str) -> None:
        """Note that the calling thread waits for every stream."""
        with self.lock:
            for stream in self._streams:
                self.host.merge(stream.clock)
            self.seen.host_waits.append(HostWait(why, here()))

    # -- accesses

    def launch(self, operation: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """Note a kernel or a copy on the current stream."""
        with self.lock:
            agent = self.stream
            agent.merge(self.host.clock)
            self._access(agent, operation, reads, writes)

    def on_host(self, operation: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """Note an access by the calling thread to host memory that copies have used."""
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
        """Note that memory was allocated for a storage on a side."""
        home = self.stream if side is Side.DEVICE else None
        memory = Memory(side, home, storage.nbytes(), here(4), self)
        set_memory(storage, memory)
        if home is not None:
            with self.lock:
                self._on_allocation(memory, home)
        return memory

    def resize(self, memory: Memory, num_bytes: int) -> None:
        """Note that a storage has freed its device memory, or has new memory."""
        with self.lock:
            if num_bytes != memory.num_bytes and memory.num_bytes:
                self._on_free(memory)
                memory.accesses, memory.recorded = [], set()
            memory.num_bytes = num_bytes
            if num_bytes:
                memory.home, memory.made = self.stream, here(4)
                self._on_allocation(memory, self.stream)

    def _on_allocation(self, memory: Memory, home: Agent) -> None:
        self._reuse(home)
        memory.accesses = [Access(home, home.time, True, 0, memory.num_bytes, "allocation", memory.made)]  # noqa: FBT003
        self.allocated_bytes += memory.num_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def _reuse(self, home: Agent) -> None:
        """Check that memory that was freed on a stream, and may be reused now, is no longer in use."""
        freed = self._freed.pop(home, ())
        if not freed:
            return
        home.merge(self.host.clock)
        for memory, accesses, recorded, where in freed:
            for access in accesses:
                if not (access.agent.is_host or access.agent in recorded or home.has_seen(access.agent, access.time)):
                    self._findings.add(EarlyFree(access, memory.made, where, home))

    def _on_free(self, memory: Memory) -> None:
        assert memory.home is not None
        self.allocated_bytes -= memory.num_bytes
        if any(access.agent is not memory.home for access in memory.accesses):
            self._freed[memory.home].append((memory, memory.accesses, memory.recorded, here()))

    def register_existing(self, storage: torch.UntypedStorage, side: Side) -> Memory:
        """Register a storage that was made under another detector, before all events of this one."""
        home = self.compute if side is Side.DEVICE else None
        memory = Memory(side, home, storage.nbytes(), (), self)
        set_memory(storage, memory)
        self.allocated_bytes += memory.num_bytes if home is not None else 0
        return memory

    def on_deletion(self, memory: Memory) -> None:
        """Note that a storage was deleted, so that its memory returns to the allocator."""
        if self._is_open and memory.side is Side.DEVICE and memory.num_bytes:
            with self.lock:
                self._on_free(memory)

    def _check_freed(self) -> None:
        with self.lock:
            for home in tuple(self._freed):
                self._reuse(home)

    def close(self) -> None:
        """End the context: storages that are deleted later are not checked."""
        self._is_open = False
        _locked.clear()

    # -- threads

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """Do not observe operators of this thread inside, because they are not work of the program."""
        self.local.num_unobserved += 1
        try:
            yield
        finally:
            self.local.num_unobserved -= 1

    @contextmanager
    def placing_new_tensors(self, side: Side | None, *, non_blocking: bool = False) -> Iterator[None]:
        """Place tensors that operators of this thread make inside on this side."""
        before = self.local.side, self.local.non_blocking
        self.local.side, self.local.non_blocking = side, non_blocking
        try:
            yield
        finally:
            self.local.side, self.local.non_blocking = before


#: The active detectors, the newest last.
_active: list[Detector] = []

#: Attribute of a storage with its :class:`Memory`. A storage's Python object lives as long as the storage.
_KEY = "_shardwise_memory"
#: Page-locked memory by its address, for storages that are made over it later.
_locked: dict[int, Memory] = {}


def set_memory(storage: torch.UntypedStorage, memory: Memory) -> None:
    """Place a storage in this memory."""
    storage.__dict__[_KEY] = memory


def lock_memory(address: int, memory: Memory) -> None:
    """Place storages that are later made at this address in this memory."""
    _locked[address] = memory


def unlock_memory(address: int) -> None:
    """Undo :func:`lock_memory`."""
    _locked.pop(address, None)


def memory_of(tensor: Tensor) -> Memory | None:
    """The memory of a tensor if the detector knows it, because it is pretended or a copy uses it; else ``None``."""
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None  # sparse tensors, and tensors inside of function transforms
    found = storage.__dict__.get(_KEY)
    if found is None and _locked:
        found = _locked.get(storage.data_ptr())
        if found is not None:
            set_memory(storage, found)
    if found is not None and found.owner is not None and _active and found.owner is not _active[-1]:
        return _active[-1].register_existing(storage, found.side)
    return found


def side_of(tensor: Tensor) -> Side:
    """The side of a tensor's memory; the host for a tensor that the detector does not know."""
    memory = memory_of(tensor)
    return Side.HOST if memory is None else memory.side


# -- the active detector


def active() -> Detector:
    """The active detector.

    Raises:
        RuntimeError: There is none.
    """
    if not _active:
        raise RuntimeError(
            "no pretended device is in use here.\n  Make and use streams inside `with streams.pretended_cuda():`."
        )
    return _active[-1]


@contextmanager
def observing(detector: Detector) -> Iterator[Seen]:
    """Observe all work inside the context with a detector."""
    _active.append(detector)
    try:
        yield detector.seen
    finally:
        detector.close()
        _active.remove(detector)
