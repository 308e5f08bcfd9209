"""Threads of the host: what one hands to another is ordered, and operators are seen in each of them."""

from __future__ import annotations

import concurrent.futures
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
_start, _join = threading.Thread.start, threading.Thread.join

#: Under this name a thread or a future keeps what its work had seen when it was done.
_END = "_shardwise_end"


def install(patches: Patches, detector: Detector) -> None:
    """Have pools and threads tell the detector what they hand over."""

    def moment() -> Clock:
        with detector.lock:
            detector.host.tick()
            return dict(detector.host.clock)

    def learn(clock: Clock) -> None:
        with detector.lock:
            detector.host.learn(clock)

    def handed(function: Callable[..., Any], end: Clock) -> Callable[..., Any]:
        """The function as another thread is to run it."""
        begin = moment()

        def run(*args: Any, **kwargs: Any) -> Any:
            learn(begin)
            try:
                with Watch(detector):
                    return function(*args, **kwargs)
            finally:
                end.update(moment())

        return run

    def submit(self: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        end: Clock = {}
        future = _submit(self, handed(function, end), *args, **kwargs)
        setattr(future, _END, end)
        return future

    def result(self: Any, timeout: float | None = None) -> Any:
        try:
            return _result(self, timeout)
        finally:
            learn(getattr(self, _END, {}))

    def start(self: threading.Thread) -> None:
        end: Clock = {}
        setattr(self, _END, end)
        self.run = handed(self.run, end)
        _start(self)

    def join(self: threading.Thread, timeout: float | None = None) -> None:
        _join(self, timeout)
        if not self.is_alive():
            learn(getattr(self, _END, {}))

    patches.set(ThreadPoolExecutor, "submit", submit)
    patches.set(Future, "result", result)
    patches.set(threading.Thread, "start", start)
    patches.set(threading.Thread, "join", join)


def run_backward_in_a_thread(patches: Patches, detector: Detector) -> None:
    """Have every backward run in a thread of the device, as on CUDA, while the thread that calls it waits."""
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
