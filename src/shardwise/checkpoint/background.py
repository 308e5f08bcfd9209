"""This rank's writing process, as training sees it: it is given a file's content and says later how it went."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shardwise.checkpoint.image import Image
from shardwise.checkpoint.shard import Layout, Piece
from shardwise.checkpoint.writing_process import receive, send

_GONE = {"problem": "the process that writes checkpoints has been killed (often: out of memory)", "is_storage": False}


class Background:
    """A process that writes one file at a time. It is started by the first save and lives until :meth:`close`.

    The memory that a file is copied into is kept for the next one.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._image: Image | None = None
        self._unsent: tuple[dict[str, Any], tuple[int, ...]] | None = None
        self._outcome: dict[str, Any] | None = None

    def begin(self, job: dict[str, Any], plan: Layout | None, content: Mapping[Piece, Tensor]) -> None:
        """Copy a file's content and have it written; without a ``plan`` only pass ``job`` on.

        Raises:
            OSError: There is no memory for the copy, or no process can be started.
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
        """The outcome, or ``None`` as long as there is none. Does not wait."""
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
        """The outcome."""
        if self._unsent is not None:
            if self._image is not None:
                self._image.wait()
            self._send()
        if self._outcome is None:
            self._receive()
        assert self._outcome is not None
        return self._outcome

    def close(self) -> None:
        """End the process, whatever it is doing, and give the memory back."""
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
            words = ["-P", "-m", "shardwise.checkpoint.writing_process", str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen([sys.executable, *words], pass_fds=(theirs.fileno(),))
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
        with contextlib.suppress(OSError):  # it is gone: noticed when its outcome is read
            send(self._channel, job, files)

    def _receive(self) -> None:
        received = None
        if self._channel is not None:
            with contextlib.suppress(OSError):
                received = receive(self._channel)
        self._outcome = _GONE if received is None else received[0]
