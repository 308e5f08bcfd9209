"""The same detector on a real GPU, fed by torch's trace of streams and events and by the calls of ``NcclComm``.

``tests/gpu/test_plans.py`` runs it. On a GPU it found the planted race, and one false race with gradients on the host,
because it did not observe that the host waits for the factor of clipping. The fix has not been run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import torch_private
from shardwise.comm import axes
from shardwise.measure.shapes import tensors_in
from shardwise.testing.streams.clocks import Agent, Clock
from shardwise.testing.streams.detector import Detector, memory_of, observing
from shardwise.testing.streams.memory import Memory, Side
from shardwise.testing.streams.operators import Watch
from shardwise.testing.streams.patches import Patches
from shardwise.testing.streams.report import Seen

#: Calls of ``NcclComm``, with the indices of the arguments that they read and that they write.
_CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "all_gather_single": ((1,), (0,)),
    "all_gather_into_tensor": ((1,), (0,)),
    "all_gather": ((1,), (0,)),
    "reduce_scatter_single": ((1,), (0,)),
    "reduce_scatter_tensor": ((1,), (0,)),
    "reduce_scatter": ((1,), (0,)),
    "all_reduce": ((0,), (0,)),
    "all_to_all": ((1,), (0,)),
    "broadcast": ((0,), (0,)),
    "send": ((0,), ()),
    "recv": ((), (0,)),
}


@contextlib.contextmanager
def watched() -> Iterator[Seen]:
    """Check the order of streams on a real GPU inside; everything becomes slow.

    Yields:
        The observations, as from ``pretended_cuda``; ``collectives`` stays empty.

    Raises:
        RuntimeError: There is no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("this machine has no GPU to watch.\n  Use streams.pretended_cuda() here.")
    detector, patches = _OfGpu(), Patches()
    with observing(detector) as seen, torch_private.traced_gpu(detector.callbacks()):
        try:
            patches.set(torch.UntypedStorage, "resize_", _resizing(detector))
            torch_private.replace_backward(patches.set, detector.around_backward)
            patches.set(axes, "transport", axes.Transport(calls=_Calls(detector)))
            with _OnGpu(detector):
                yield seen
            seen.check_freed()
        finally:
            patches.undo()


class _OfGpu(Detector):
    """A detector whose streams are those of the driver, by their addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.default = types.SimpleNamespace(pending=())
        self._by_address: dict[int, Agent] = {}
        self._events: dict[int, Clock] = {}
        self._threads: list[Agent] = []  # autograd's threads
        self._caller: Agent | None = None  # the thread that called the newest backward

    @property
    def stream(self) -> Agent:
        """See :attr:`Detector.stream`."""
        return self._agent(torch.cuda.current_stream().cuda_stream)

    def _agent(self, address: int) -> Agent:
        with self.lock:
            if address not in self._by_address:
                is_default = address == torch.cuda.default_stream().cuda_stream
                self._by_address[address] = self.compute if is_default else self.new_stream(f"stream {address:#x}")
            return self._by_address[address]

    def around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap backward to order its thread after the call, and the calling thread after its end."""

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            caller = self.host
            self._learn(tuple(self._threads), caller)
            self._caller = caller
            try:
                return original(*args, **kwargs)
            finally:
                self._learn([caller], *self._threads)

        return run_backward

    def _learn(self, agents: Iterable[Agent], *sources: Agent) -> None:
        with self.lock:
            for source in sources:
                source.tick()
                for agent in agents:
                    agent.merge(source.clock)

    @property
    def host(self) -> Agent:
        """See :attr:`Detector.host`. A new thread of autograd starts with the clock of the caller of backward."""
        is_new = self.local.host is None
        found = super().host
        if is_new and threading.current_thread().name.startswith("Dummy"):  # made by C++
            with self.lock:
                self._threads.append(found)
            if self._caller is not None:
                self._learn([found], self._caller)
        return found

    def mismatch(self, what: str) -> None:
        """Do nothing: a real GPU refuses such operators itself."""

    def host_waits(self, why: str, moment: Clock | None = None) -> None:
        """See :meth:`Detector.host_waits`. Waits inside operators are not counted: the driver's trace counts them."""
        if moment is None:
            self._learn([self.host], self.stream)
        else:
            super().host_waits(why, moment)

    def callbacks(self) -> dict[str, Callable[..., None]]:
        """Callbacks for torch's trace, by the name of the event."""

        def record(event: int, stream: int) -> None:
            self._events[event] = self.moment_of(self._agent(stream))

        def wait(event: int, stream: int) -> None:
            self.wait(self._agent(stream), self._events.get(event, {}))

        return {
            "event_record": record,
            "event_wait": wait,
            "event_synchronization": lambda event: self.host_waits("event", self._events.get(event, {})),
            "stream_synchronization": lambda stream: self.host_waits("stream", self._agent(stream).clock),
            "device_synchronization": lambda: self.host_waits_for_all("device"),
        }

    def know(self, tensor: Tensor) -> None:
        """Register the memory of a tensor that the program has made."""
        if memory_of(tensor) is not None or tensor.layout is not torch.strided:
            return
        if tensor.is_cuda:
            self.make(tensor.untyped_storage(), Side.DEVICE)
        elif tensor.device.type == "cpu" and tensor.is_pinned():
            self.make(tensor.untyped_storage(), Side.PINNED)


class _OnGpu(Watch):
    """Registers device and pinned memory from the tensors that operators use."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        detector = self._detector
        assert isinstance(detector, _OfGpu)
        inputs = tensors_in([*args, *(kwargs or {}).values()])
        if detector.local.num_unobserved or (func.namespace == "c10d" and any(tensor.is_cuda for tensor in inputs)):
            return func(*args, **(kwargs or {}))
        for tensor in inputs:
            detector.know(tensor)
        if torch_private.schema_of(func)[0] == "aten::record_stream" and (memory := memory_of(args[0])) is not None:
            memory.recorded.add(detector.stream)
        made = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in tensors_in([made]):
            detector.know(tensor)
        return made

    def _seen(self, schema: Any, args: Any, kwargs: Any, made: Any) -> None:
        inputs, new = tensors_in([*args, *kwargs.values()]), tensors_in([made])
        is_on_device = any(tensor.is_cuda for tensor in new)
        if not new or is_on_device == any(tensor.is_cuda for tensor in inputs):
            super()._seen(schema, args, kwargs, made)
            return
        side = Side.DEVICE if is_on_device else Side.PINNED if new[0].is_pinned() else Side.HOST
        with self._detector.placing_new_tensors(side, non_blocking=bool(kwargs.get("non_blocking"))):
            super()._seen(schema, args, kwargs, made)


class _Calls:
    """Replaces ``torch.distributed`` in ``NcclComm``, and reports its calls to the detector."""

    def __init__(self, detector: Detector) -> None:
        self._detector = detector

    def __getattr__(self, name: str) -> Any:
        call = getattr(dist, name)
        if name not in _CALLS:
            return call
        reads, writes = _CALLS[name]

        def seen(*args: Any, **kwargs: Any) -> Any:
            read, written = (tensors_in([args[place] for place in places]) for places in (reads, writes))
            self._detector.launch(f"nccl {name}", read, written)
            return call(*args, **kwargs)

        return seen

    def batch_isend_irecv(self, messages: list[Any]) -> Any:
        """See ``dist.batch_isend_irecv``."""
        sent, received = ([m.tensor for m in messages if m.op is op] for op in (dist.isend, dist.irecv))
        self._detector.launch("nccl messages", sent, received)
        return dist.batch_isend_irecv(messages)


def _resizing(detector: Detector) -> Callable[[Any, int], Any]:
    original: Any = torch.UntypedStorage.resize_

    def resize_(storage: Any, num_bytes: int) -> Any:
        memory: Memory | None = storage.__dict__.get("_shardwise_memory")
        if memory is not None and memory.side is Side.DEVICE:
            detector.resize(memory, num_bytes)
        return original(storage, num_bytes)

    return resize_
