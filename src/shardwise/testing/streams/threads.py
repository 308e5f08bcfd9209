"""Threads of the host: handovers between threads order their work, and operators are observed in every thread."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from shardwise import torch_private
from shardwise.testing.streams.clocks import Clock
from shardwise.testing.streams.detector import Detector
from shardwise.testing.streams.operators import Watch
from shardwise.testing.streams.patches import Patches

_submit, _result = ThreadPoolExecutor.submit, Future.result
_put, _get = queue.Queue.put, queue.Queue.get
_start, _join = threading.Thread.start, threading.Thread.join

#: Attribute of a thread, a future or a queue with the clock of the thread whose work it passes on.
_END = "_shardwise_end"


def install(patches: Patches, detector: Detector) -> None:
    """Report handovers by pools, threads and queues to the detector."""
    for part in (_pools, _threads, _queues):
        part(patches, _Handover(detector))


class _Handover:
    """Orders threads: the receiver of a handover merges the clock that the sender had at the handover."""

    def __init__(self, detector: Detector) -> None:
        self._detector = detector

    def moment(self) -> Clock:
        """The clock of the calling thread, after one more event."""
        with self._detector.lock:
            self._detector.host.tick()
            return dict(self._detector.host.clock)

    def merge(self, source: Any) -> None:
        """Note that the calling thread has received a handover from a thread, a future or a queue."""
        with self._detector.lock:
            self._detector.host.merge(source.__dict__.get(_END, {}))

    def handed(self, function: Callable[..., Any], end: Clock) -> Callable[..., Any]:
        """Wrap a function for another thread; ``end`` is filled with that thread's clock after the function."""
        begin = self.moment()

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._detector.lock:
                self._detector.host.merge(begin)
            try:
                with Watch(self._detector):
                    return function(*args, **kwargs)
            finally:
                end.update(self.moment())

        return run


def _pools(patches: Patches, handover: _Handover) -> None:
    def submit(self: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        end: Clock = {}
        future = _submit(self, handover.handed(function, end), *args, **kwargs)
        setattr(future, _END, end)
        return future

    def result(self: Any, timeout: float | None = None) -> Any:
        try:
            return _result(self, timeout)
        finally:
            handover.merge(self)

    patches.set(ThreadPoolExecutor, "submit", submit)
    patches.set(Future, "result", result)


def _threads(patches: Patches, handover: _Handover) -> None:
    def start(self: threading.Thread) -> None:
        end: Clock = {}
        setattr(self, _END, end)
        self.run = handover.handed(self.run, end)
        _start(self)

    def join(self: threading.Thread, timeout: float | None = None) -> None:
        _join(self, timeout)
        if not self.is_alive():
            handover.merge(self)

    patches.set(threading.Thread, "start", start)
    patches.set(threading.Thread, "join", join)


def _queues(patches: Patches, handover: _Handover) -> None:
    def put(self: queue.Queue[Any], *args: Any, **kwargs: Any) -> None:
        end: Clock = self.__dict__.setdefault(_END, {})
        for number, time in handover.moment().items():  # merged over all threads that put something
            end[number] = max(end.get(number, 0), time)
        _put(self, *args, **kwargs)

    def get(self: queue.Queue[Any], *args: Any, **kwargs: Any) -> Any:
        found = _get(self, *args, **kwargs)
        handover.merge(self)
        return found

    patches.set(queue.Queue, "put", put)
    patches.set(queue.Queue, "get", get)


def run_backward_in_a_thread(patches: Patches, detector: Detector) -> None:
    """Run every backward in a thread of the device, as on CUDA, while the calling thread waits."""
    pool = concurrent.futures.ThreadPoolExecutor(1, _THREAD)

    def elsewhere(original: Callable[..., Any]) -> Callable[..., Any]:
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name.startswith(_THREAD):
                return original(*args, **kwargs)
            stream = detector.local.stream

            def run() -> Any:
                detector.local.stream = stream
                return original(*args, **kwargs)

            return pool.submit(run).result()

        return run_backward

    torch_private.replace_backward(patches.set, elsewhere)


_THREAD = "autograd-of-device"
