"""A rank's file in memory: what is copied before training goes on, and written to the disk by another process."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.shard import Layout, Piece, byte_view

#: Images grow in steps of this, so that a few bytes more in the next save need no new one.
_GRANULE = 2 * 2**20


class Image:
    """Shared memory without a name, as large as the file, with the file's content at the file's places.

    The kernel frees it when the last process that holds it is gone, however it ends. It does not count towards the
    size of ``/dev/shm``.

    Attributes:
        file: Descriptor, which another process can be given.
        capacity: Bytes that fit.
        num_bytes: Bytes of the file that is in it.
    """

    def __init__(self, num_bytes: int) -> None:
        self.file = _anonymous()
        self.capacity = -(-num_bytes // _GRANULE) * _GRANULE
        self.num_bytes = 0
        self._end = weakref.finalize(self, os.close, self.file)
        self._copied: torch.cuda.Event | None = None
        self._is_pinned = False
        try:
            os.truncate(self.file, self.capacity)
            self._bytes = memoryview(mmap.mmap(self.file, self.capacity))
        except BaseException:
            self._end()
            raise

    def fill(self, plan: Layout, content: Mapping[Piece, Tensor]) -> None:
        """Copy a file's content.

        On a CPU it is there afterwards. From a GPU the copies are issued on the current stream, before whatever the
        stream does next, and the host goes on; :meth:`wait` waits for them.
        """
        self.num_bytes = plan.file_bytes
        self._bytes[: len(plan.header)] = plan.header
        device = next((tensor.device for tensor in content.values() if tensor.device.type == "cuda"), None)
        whole = None if device is None else self._pinned()
        for piece, (begin, end) in zip(plan.offsets, pairwise([*plan.offsets.values(), plan.file_bytes]), strict=True):
            source = content[piece].detach()
            if whole is not None and source.device.type == "cuda":  # as bytes: a place need not suit the dtype's width
                whole[begin:end].copy_(source.contiguous().view(torch.uint8), non_blocking=True)
            else:
                self._bytes[begin:end] = byte_view(source.cpu().contiguous())
        if device is not None:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(device))

    def is_filled(self) -> bool:
        """Whether the copies have been made."""
        return self._copied is None or self._copied.query()

    def wait(self) -> None:
        """Wait for the copies."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def close(self) -> None:
        """Give the memory back, once the processes that were given the descriptor have closed it too.

        Memory that a device is still to write to stays until this process ends: the copies may wait for a collective
        that never ends, and cannot be called off.
        """
        if not self.is_filled():
            _abandoned.append(self._bytes)
        elif self._is_pinned:
            _driver().cudaHostUnregister(self._whole().data_ptr())
        del self._bytes
        self._end()

    def _whole(self) -> Tensor:
        return torch.frombuffer(self._bytes, dtype=torch.uint8)

    def _pinned(self) -> Tensor:
        """All of it as a tensor. The driver locks the memory: otherwise copies from a GPU make the host wait."""
        whole = self._whole()
        if not self._is_pinned:
            self._is_pinned = int(_driver().cudaHostRegister(whole.data_ptr(), self.capacity, 0)) == 0
            if not self._is_pinned:  # CUDA would report the refusal as that of the next kernel
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device="cuda")
        return whole


#: See :meth:`Image.close`.
_abandoned: list[memoryview] = []


def _driver() -> Any:
    return torch.cuda.cudart()


def _anonymous() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("shardwise-image")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
