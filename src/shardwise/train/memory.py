"""The most bytes of tensors that a process holds at once.

CUDA counts them. On CPU nothing does, so while a :class:`PeakTensorBytes` is open every operation is seen by a dispatch
mode: storages are counted when they first appear and taken off when they are freed. Two views of a storage count once;
meta tensors count nothing. This slows a step by about half, so the loop opens it for the first steps only, which reach
the peak: allocations are the same in every later step.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch

from shardwise.measure.storage import StorageCount


class PeakTensorBytes:
    """Measure the peak of tensor bytes between entry and exit.

    Attributes:
        peak_bytes: The most that was held at once, what was held at entry included.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = 0
        self._mode: StorageCount | None = None

    def __enter__(self) -> Self:
        """Begin to count."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._mode = StorageCount(self.device.type)
            self._mode.see_all_objects()
            self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop counting."""
        if self._mode is None:
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device)
            return
        self._mode.__exit__(kind, error, trace)
        self.peak_bytes = self._mode.peak_bytes
        self._mode.forget()
        self._mode = None
