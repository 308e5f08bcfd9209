"""Two transports for tests that reveal on the CPU faults which otherwise appear only with NCCL.

The variable ``SHARDWISE_TRANSPORT`` chooses one of them for every Comm over Gloo of ranks that ``run_on_ranks`` starts:

=================  ===================================================================================================
``in-order``       A Comm is a queue, like an NCCL stream. A collective begins when all collectives that were issued
                   before it have ended, and a send ends when the other rank has begun to receive it. Two ranks that
                   both receive first and send afterwards deadlock.
``early-free``     A collective reads its buffers as late as possible and writes its result when its handle is waited
                   for. Like NCCL it has no references to tensors. If memory was freed before the wait (when CUDA's
                   allocator may have given it to another tensor), NaN is sent.
=================  ===================================================================================================

Both are slow, and unlike the plain transport neither detects ranks that issue different collectives.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import threading
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardwise.comm import axes
from shardwise.comm.base import Comm, Handle, Wrapper
from shardwise.comm.gloo import GlooComm
from shardwise.nested import tensors_in
from shardwise.spec.errors import CommError, ConfigError

#: The environment variable.
TRANSPORT = "SHARDWISE_TRANSPORT"


def install() -> None:
    """Use the transport that the environment variable names, if any, in this process."""
    name = os.environ.get(TRANSPORT)
    if name:

        def on_host(*args: Any, watch: object, **kwargs: Any) -> Comm:
            del watch  # neither transport detects ranks that issue different collectives
            return debugged(GlooComm(*args, **kwargs), name)

        axes.transport = dataclasses.replace(axes.transport, on_host=on_host)


def debugged(comm: Comm, name: str) -> Comm:
    """Wrap ``comm`` in the transport ``name`` of this module."""
    transports = {"in-order": InOrder, "early-free": EarlyFree}
    if name not in transports:
        raise ConfigError(
            f"{TRANSPORT}={name!r} is not a transport.\n  Use one of {', '.join(transports)}, or unset it."
        )
    return transports[name](comm)


def _given_on(name: str) -> Callable[..., Handle]:
    """A method ``name`` that passes its call to :meth:`_Debug._issue`."""

    def method(self: _Debug, *args: Any) -> Handle:
        return self._issue(name, args)

    return method


class _Debug(Wrapper):
    """Passes every collective to another Comm, at a time that the subclass chooses."""

    @abstractmethod
    def _issue(self, name: str, args: tuple[Any, ...]) -> Handle:
        """Call the method ``name`` of the wrapped Comm."""

    _do_all_gather = _given_on("_do_all_gather")
    _do_reduce_scatter = _given_on("_do_reduce_scatter")
    _do_all_reduce = _given_on("_do_all_reduce")
    _do_all_to_all = _given_on("_do_all_to_all")
    _do_broadcast = _given_on("_do_broadcast")
    _do_send = _given_on("_do_send")
    _do_receive = _given_on("_do_receive")
    _do_exchange = _given_on("_do_exchange")


# -- in order


class InOrder(_Debug):
    """A queue of collectives that a thread runs one after the other, like a GPU's stream."""

    is_in_order = True

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self._queue: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        threading.Thread(target=_work_off, args=(self._queue,), name=f"{inner.axis}-stream", daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def _issue(self, name: str, args: tuple[Any, ...]) -> Handle:
        inner, is_inference = self._inner, torch.is_inference_mode_enabled()

        def run() -> None:
            # Use the issuing thread's state of torch, which is separate in each thread.
            with torch.inference_mode(is_inference), torch.no_grad():
                getattr(inner, name)(*args).wait()

        handle = _Queued(run)
        self._queue.put(handle)
        return handle


class _Queued(Handle):
    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run
        self._is_done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        assert self._run is not None
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error
        self._is_done.set()

    def wait(self) -> None:
        self._is_done.wait()
        self._run = None  # drops the references to tensors
        if self._error is not None:
            raise self._error


def _work_off(handles: queue.SimpleQueue[_Queued | None]) -> None:
    while (handle := handles.get()) is not None:
        handle.run()
        del handle  # else its tensors would stay alive until the next handle arrives


# -- early free


class EarlyFree(_Debug):
    """Collectives that have weak references to their buffers, and begin when any handle is waited for.

    Attributes:
        holds: A handle has references to its tensors until it has been waited for, as the contract of Comm requires.
    """

    holds: ClassVar[bool] = True

    def _issue(self, name: str, args: tuple[Any, ...]) -> Handle:
        collective = _Collective(self._inner, name, _map(_Place, args))
        _issued.append(collective)
        return _Freeing(collective, list(tensors_in(args)) if self.holds else [])


class _Place:
    """The place of a tensor in memory, without a reference to it."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous()
        self._storage = weakref.ref(tensor.untyped_storage())
        self._offset, self._dtype = int(tensor.storage_offset()), tensor.dtype
        self._shape, self._stride = tensor.shape, tensor.stride()

    def find(self) -> Tensor | None:
        """The tensor, unless its memory was freed."""
        storage = self._storage()
        end = (self._offset + self._shape.numel()) * self._dtype.itemsize
        if storage is None or storage.nbytes() < end:
            return None
        return torch.empty(0, dtype=self._dtype).set_(storage, self._offset, self._shape, self._stride)

    def copy(self) -> Tensor:
        """A copy of the current content; NaN (or the largest value of an integer dtype) if the memory was freed."""
        found = self.find()
        if found is not None:
            return found.clone()
        is_whole = not (self._dtype.is_floating_point or self._dtype.is_complex or self._dtype is torch.bool)
        value = torch.iinfo(self._dtype).max if is_whole else float("nan")
        return torch.full(self._shape, value, dtype=self._dtype)


class _Collective:
    """An issued collective, which may not have begun."""

    def __init__(self, inner: Comm, name: str, args: Any) -> None:
        self._inner, self._name, self._args = inner, name, args
        self._copies: list[tuple[_Place, Tensor]] = []
        self._handle: Handle | None = None

    def begin(self) -> None:
        self._handle = getattr(self._inner, self._name)(*_map(self._copy, self._args))

    def _copy(self, place: _Place) -> Tensor:
        copy = place.copy()
        self._copies.append((place, copy))
        return copy

    @torch.no_grad()
    def start_next_phase(self) -> bool:
        _begin_all()
        assert self._handle is not None
        if self._handle.start_next_phase():
            return True
        self._deliver()
        return False

    @torch.no_grad()
    def wait(self) -> None:
        _begin_all()
        assert self._handle is not None
        self._handle.wait()
        self._deliver()

    def _deliver(self) -> None:
        """Write the results: the received tensors of an exchange, the last tensor of other collectives."""
        copies, self._copies = self._copies, []
        is_exchange = self._name == "_do_exchange"
        num_sent = 1 if self._name == "_do_send" else len(self._args[0]) if is_exchange else len(copies) - 1
        for place, result in copies[max(0, num_sent) :]:
            found = place.find()
            if found is None:
                what = "exchange(messages)" if is_exchange else f"{self._name[4:]}({self._args[0].unit})"
                raise CommError(
                    f"{what} on {self._inner.axis}: the memory of its result was freed before its handle was waited"
                    " for.\n  Keep the tensor or the handle until then."
                )
            found.copy_(result)


#: The thread in which collectives begin and are waited for, so that modes of the calling thread do not affect them
#: (inference mode, or a mode that records operations for recomputation).
_elsewhere = ThreadPoolExecutor(max_workers=1, thread_name_prefix="early-free")

#: Collectives of all Comms of this process that were issued and have not begun.
_issued: deque[_Collective] = deque()


def _begin_all() -> None:
    """Begin every issued collective, because a peer may wait for any of them."""
    while _issued:
        _issued.popleft().begin()


class _Freeing(Handle):
    def __init__(self, collective: _Collective, tensors: list[Tensor]) -> None:
        self._collective = collective
        self._held = tensors

    def start_next_phase(self) -> bool:
        return _elsewhere.submit(self._collective.start_next_phase).result()

    def wait(self) -> None:
        _elsewhere.submit(self._collective.wait).result()
        self._held = []


# -- arguments


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """Replace tensors and places in a nested ``value`` by the function's results."""
    if isinstance(value, Tensor | _Place):
        return function(value)
    if isinstance(value, list | tuple):
        return tuple(_map(function, each) for each in value)
    return value
