"""Copies to the host that are as late on CPUs as on CUDA."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from unittest import mock

from torch import Tensor

from shardwise.comm.base import Handle
from shardwise.engine.storage.host import Copy, Transfers

#: Those that the device has waited for, the oldest first: as on a stream, each is made after those before it.
_under_way: list[LateCopy] = []
_copying = threading.Lock()


class LateCopy(Copy):
    """What it copies is there when the host has waited for it, and not before."""

    def __init__(self, source: Tensor, target: Tensor, after: Handle) -> None:
        self._source, self._target, self._after = source, target, after

    def wait(self) -> None:
        self._after.wait()
        self._source = self._source.clone()  # the device's buffer may be used again
        _under_way.append(self)

    def wait_on_host(self) -> None:
        with _copying:
            while self in _under_way:
                first = _under_way.pop(0)
                first._target.copy_(first._source)


@contextlib.contextmanager
def late_copies() -> Iterator[None]:
    """Inside, sums go to the host by :class:`LateCopy`."""

    def send(_transfers: Transfers, source: Tensor, target: Tensor, after: Handle, _pool: object) -> LateCopy:
        return LateCopy(source, target, after)

    def synchronise(_transfers: Transfers) -> None:
        for copy in tuple(_under_way[-1:]):
            copy.wait_on_host()

    with mock.patch.multiple(Transfers, send=send, synchronise=synchronise):
        yield
