"""The training side of a rank's writing process: passes a file's content to the process and returns the outcome.

The content is copied into memory before training continues; the process then writes the copy to the disk.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.shard import Layout, Piece, byte_view
from shardwise.checkpoint.writing_process import receive, send

_GONE = {"problem": "the process that writes checkpoints has been killed (often: out of memory)", "is_storage": False}
#: Sizes of images are multiples of this, so that a slightly larger save can use the same image.
_GRANULE = 2 * 2**20


class Background:
    """A process that writes one file at a time. The first save starts it, and it lives until :meth:`close`.

    The memory for the copy is reused by the next save.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._image: Image | None = None
        self._unsent: tuple[dict[str, Any], tuple[int, ...]] | None = None
        self._outcome: dict[str, Any] | None = None

    def begin(self, job: dict[str, Any], plan: Layout | None, content: Mapping[Piece, Tensor]) -> None:
        """Copy a file's content and start writing it. Without a ``plan``, only send ``job`` to the process.

        Raises:
            OSError: There is no memory for the copy, or the process cannot be started.
        """
        self._outcome = None
        self._start()
        files: tuple[int, ...] = ()
        if plan is not None:
            image = self._image_for(plan.file_bytes)
            image.fill(plan, content)
            files = (image.file,)
        self._unsent = job, files
        self.poll()

    def poll(self) -> dict[str, Any] | None:
        """Return the outcome, or ``None`` if the process has not finished. Does not wait."""
        if self._unsent is not None:
            if self._image is not None and not self._image.is_filled():
                return None
            self._send()
        if self._outcome is None and self._channel is not None:
            ready, _, _ = select.select([self._channel], [], [], 0)
            if ready:
                self._receive()
        return self._outcome

    def wait(self) -> dict[str, Any]:
        """Wait for the outcome and return it."""
        if self._unsent is not None:
            if self._image is not None:
                self._image.wait()
            self._send()
        if self._outcome is None:
            self._receive()
        assert self._outcome is not None
        return self._outcome

    def close(self) -> None:
        """Kill the process, whatever it is doing, and release the memory."""
        process, channel, image = self._process, self._channel, self._image
        self._process = self._channel = self._image = self._unsent = None
        if channel is not None:
            channel.close()
        if process is not None:
            process.kill()
            process.wait()
        if image is not None:
            image.close()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = ["-P", "-m", "shardwise.checkpoint.writing_process", str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen([sys.executable, *arguments], pass_fds=(theirs.fileno(),))
        self._channel = ours

    def _image_for(self, num_bytes: int) -> Image:
        if self._image is None or not num_bytes <= self._image.capacity <= 2 * num_bytes + 2**24:
            if self._image is not None:
                self._image.close()
                self._image = None
            self._image = Image(num_bytes)
        return self._image

    def _send(self) -> None:
        assert self._unsent is not None
        assert self._channel is not None
        (job, files), self._unsent = self._unsent, None
        with contextlib.suppress(OSError):  # if the process is gone, reading its outcome will show it
            send(self._channel, job, files)

    def _receive(self) -> None:
        received = None
        if self._channel is not None:
            with contextlib.suppress(OSError):
                received = receive(self._channel)
        self._outcome = _GONE if received is None else received[0]


class Image:
    """Anonymous shared memory of the size of a file, with the content of the file.

    The kernel frees the memory when the last process that uses it has ended. The memory does not count towards the size
    of ``/dev/shm``.
    """

    def __init__(self, num_bytes: int) -> None:
        self.file = _anonymous_file()  # descriptor, which can be sent to another process
        self.capacity = -(-num_bytes // _GRANULE) * _GRANULE  # size in bytes
        self.num_bytes = 0  # size of the file that it contains
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

        On a CPU the copy is complete on return. From a GPU the copies are issued on the current stream, before later
        work of the stream, and the host continues; :meth:`wait` waits for them.
        """
        self.num_bytes = plan.file_bytes
        self._bytes[: len(plan.header)] = plan.header
        device = next((tensor.device for tensor in content.values() if tensor.device.type == "cuda"), None)
        whole = None if device is None else self._pinned()
        for piece, (begin, end) in zip(plan.offsets, pairwise([*plan.offsets.values(), plan.file_bytes]), strict=True):
            source = content[piece].detach()
            if whole is not None and source.device.type == "cuda":  # as bytes: offsets may not be aligned for the dtype
                whole[begin:end].copy_(source.contiguous().view(torch.uint8), non_blocking=True)
            else:
                self._bytes[begin:end] = byte_view(source.cpu().contiguous())
        if device is not None:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(device))

    def is_filled(self) -> bool:
        """Return whether the copies are complete."""
        return self._copied is None or self._copied.query()

    def wait(self) -> None:
        """Wait for the copies."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def close(self) -> None:
        """Release the memory, which is freed when other processes with the descriptor have closed it too.

        Memory that a device will still write to is kept until this process ends, because the copies may wait for a
        collective that never completes, and they cannot be cancelled.
        """
        if not self.is_filled():
            _abandoned.append(self._bytes)
        elif self._is_pinned:
            _driver().cudaHostUnregister(self._as_tensor().data_ptr())
        del self._bytes
        self._end()

    def _as_tensor(self) -> Tensor:
        return torch.frombuffer(self._bytes, dtype=torch.uint8)

    def _pinned(self) -> Tensor:
        """Return the memory as a pinned tensor. Without pinning, copies from a GPU would make the host wait."""
        whole = self._as_tensor()
        if not self._is_pinned:
            self._is_pinned = int(_driver().cudaHostRegister(whole.data_ptr(), self.capacity, 0)) == 0
            if not self._is_pinned:  # clear the error, which CUDA would report for the next kernel
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device="cuda")
        return whole


#: Memory that a device may still write to; see :meth:`Image.close`.
_abandoned: list[memoryview] = []


def _driver() -> Any:
    return torch.cuda.cudart()


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("shardwise-image")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
