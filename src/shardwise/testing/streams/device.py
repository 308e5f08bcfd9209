"""The pretended ``torch.cuda``: streams, events and properties of a GPU.

All enqueued work runs at once, in the host's order, so results are right. Streams and events only update the clocks of
the detector. Results of collectives are written when a stream or the host waits for them.
"""

from __future__ import annotations

import contextlib
import os
import types
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from shardwise.testing.streams.clocks import Clock
from shardwise.testing.streams.detector import Detector, active, lock_memory, unlock_memory
from shardwise.testing.streams.memory import Memory, Side, Target
from shardwise.testing.streams.patches import Patches
from shardwise.testing.streams.stacks import here

#: Properties of the pretended GPU, and version of the pretended NCCL.
NAME, CAPABILITY, TOTAL_BYTES, NCCL_VERSION = "NVIDIA H100 80GB HBM3", (9, 0), 80 << 30, (2, 28, 9)


class Pending(Protocol):
    """An unfinished collective.

    Attributes:
        targets: Places for the results; empty after they are written.
    """

    targets: list[Target]

    def is_done(self) -> bool:
        """Whether the results have been received."""

    def deliver(self) -> None:
        """Wait for the results and write them to their places."""


def _deliver(pending: list[Pending]) -> None:
    for each in pending:
        each.deliver()


class Stream:
    """Replaces ``torch.cuda.Stream``.

    Attributes:
        agent: The stream as an agent of the detector.
        pending: Collectives on the stream whose results have not been written yet.
    """

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        detector = active()
        stack = here(1)
        made_at = f" of {stack[0][0].rsplit('/', 1)[-1]}:{stack[0][1]}" if stack else ""
        self.device, self.priority = current_device(device), priority
        self.agent = detector.new_stream(f"a stream{made_at}")
        self.pending: list[Pending] = []
        _all_streams.add(self)

    @property
    def cuda_stream(self) -> int:
        """A unique number, in place of the address of the driver's object."""
        return self.agent.number

    stream_id = cuda_stream

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.agent is self.agent

    def __hash__(self) -> int:
        return hash(self.agent.number)

    def wait_stream(self, other: Stream) -> None:
        """Order later work of this stream after all work that is already on ``other``."""
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        """Order later work of this stream after the event."""
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event, which happens after all work that is already on this stream."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all work on this stream is finished."""
        return all(each.is_done() for each in self.pending)

    def synchronize(self) -> None:
        """Make the host wait for all work on this stream."""
        self.deliver()
        active().host_waits("stream.synchronize", self.agent.clock)

    def deliver(self) -> None:
        """Write the results of the collectives on this stream."""
        pending, self.pending = self.pending, []
        _deliver(pending)


_all_streams: weakref.WeakSet[Stream] = weakref.WeakSet()


class Event:
    """Replaces ``torch.cuda.Event``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._moment: Clock | None = None
        self._pending: list[Pending] = []
        self._num_asked = 0

    def record(self, stream: Stream | None = None) -> None:
        """Place the event after all work that is already on the stream."""
        stream = stream or current_stream()
        self._moment = active().moment_of(stream.agent)
        self._pending = list(stream.pending)
        self._num_asked = 0

    def wait(self, stream: Stream | None = None) -> None:
        """See :meth:`Stream.wait_event`. As on CUDA, an event that was never recorded is not waited for."""
        if self._moment is not None:
            stream = stream or current_stream()
            _deliver(self._pending)
            active().wait(stream.agent, self._moment)

    def synchronize(self) -> None:
        """Make the host wait for the event."""
        if self._moment is not None:
            _deliver(self._pending)
            active().host_waits("event.synchronize", self._moment)

    def query(self) -> bool:
        """Whether the event has happened; the first two queries always return false."""
        if self._moment is None:
            return True
        self._num_asked += 1
        if self._num_asked < 3 or not all(each.is_done() for each in self._pending):
            return False
        detector = active()
        if detector.local.is_watched:  # the host has learned this without a wait
            _deliver(self._pending)
            detector.wait(detector.host, self._moment)
        return True

    def elapsed_time(self, other: Event) -> float:  # noqa: ARG002 - as torch's
        """Milliseconds between two events; always 1, because times are not pretended."""
        return 1.0


class StreamContext:
    """Replaces ``torch.cuda.stream(...)``."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream
        self._before: list[Stream | None] = []

    def __enter__(self) -> None:
        local = active().local
        self._before.append(local.stream)
        local.stream = self._stream or local.stream

    def __exit__(self, *error: object) -> None:
        active().local.stream = self._before.pop()


def current_stream(_device: Any = None) -> Stream:
    """The stream on which this thread enqueues work."""
    detector = active()
    return detector.local.stream or detector.default


def current_device(given: Any = None) -> torch.device:
    """The given device with its index, or the current device."""
    if isinstance(given, int):
        return torch.device("cuda", given)
    index = None if given is None else torch.device(given).index
    return torch.device("cuda", _index if index is None else index)


_index = 0


def _set_device(device: Any) -> None:
    global _index  # noqa: PLW0603 - as CUDA's own, one for the process
    _index = current_device(device).index


def _set_stream(stream: Stream) -> None:
    active().local.stream = stream


def _synchronize(_device: Any = None) -> None:
    for stream in tuple(_all_streams):
        stream.deliver()
    active().host_waits_for_all("torch.cuda.synchronize")


class Generator:
    """Replaces a generator of the device by the CPU's generator."""

    def __init__(self) -> None:
        self._of_cpu = torch.default_generator

    def initial_seed(self) -> int:
        """See ``torch.Generator.initial_seed``."""
        return self._of_cpu.initial_seed()

    def manual_seed(self, seed: int) -> Generator:
        """See ``torch.Generator.manual_seed``."""
        self._of_cpu.manual_seed(seed)
        return self

    def get_offset(self) -> int:
        """Return 0: draws are not counted."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Do nothing: draws are not counted."""


@contextlib.contextmanager
def _device_context(device: Any) -> Iterator[None]:
    before = _index
    _set_device(device)
    try:
        yield
    finally:
        _set_device(before)


def _driver() -> Any:
    def register(address: int, num_bytes: int, _flags: int) -> int:
        lock_memory(address, Memory(Side.PINNED, None, num_bytes, here(4), None))
        return 0

    def unregister(address: int) -> int:
        unlock_memory(address)
        return 0

    return types.SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)


def install(patches: Patches, detector: Detector) -> None:
    """Replace functions and classes of ``torch.cuda``."""
    _all_streams.clear()
    _set_device(int(os.environ.get("LOCAL_RANK", "0")))
    detector.default = default = Stream()
    default.agent = detector.compute
    num_devices = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    properties = types.SimpleNamespace(
        name=NAME, total_memory=TOTAL_BYTES, major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=132
    )
    driver = _driver()

    def reset_peak(_device: Any = None) -> None:
        detector.peak_bytes = detector.allocated_bytes

    def set_sync_debug_mode(mode: int | str) -> None:
        detector.refuses_waits = mode in {"error", 2}

    answers: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "current_stream": current_stream,
        "default_stream": lambda _device=None: default,
        "set_stream": _set_stream,
        "synchronize": _synchronize,
        "set_sync_debug_mode": set_sync_debug_mode,
        "is_available": lambda: True,
        "is_initialized": lambda: False,  # there is no driver to call
        "init": lambda: None,
        "device_count": lambda: num_devices,
        "current_device": lambda: _index,
        "set_device": _set_device,
        "device": _device_context,
        "get_device_name": lambda _device=None: NAME,
        "get_device_capability": lambda _device=None: CAPABILITY,
        "get_device_properties": lambda _device=None: properties,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda _device=None: (TOTAL_BYTES - detector.allocated_bytes, TOTAL_BYTES),
        "memory_allocated": lambda _device=None: detector.allocated_bytes,
        "memory_reserved": lambda _device=None: detector.allocated_bytes,
        "max_memory_allocated": lambda _device=None: detector.peak_bytes,
        "max_memory_reserved": lambda _device=None: detector.peak_bytes,
        "memory_stats": lambda _device=None: defaultdict(int),
        "reset_peak_memory_stats": reset_peak,
        "empty_cache": lambda: None,
        "get_rng_state": lambda _device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, _device=None: torch.set_rng_state(state),
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": torch.default_generator.manual_seed,
        "default_generators": tuple(Generator() for _ in range(num_devices)),
        "cudart": lambda: driver,
    }
    for name, answer in answers.items():
        patches.set(torch.cuda, name, answer)
    patches.set(torch.cuda.nccl, "version", lambda: NCCL_VERSION)
