"""The microbatches of this rank, read during the step or evaluation that uses them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.launch import heartbeat
from shardwise.train.config.resolve import Batch
from shardwise.train.data.rows import Samples
from shardwise.train.data.user_data import UserSamples
from shardwise.train.model.build import TokenBatch, to_tensors


@dataclass(slots=True)
class Microbatches:
    """Reads microbatches, and times the reading."""

    batch: Batch  # batch sizes of the run
    device: torch.device  # device of the microbatches
    data_s: float = 0.0  # seconds that this rank's host has spent on reading. The caller may reset it.

    def read(
        self, part: Samples, samples: Iterable[Sequence[int]], global_batch: Iterable[int], count: int
    ) -> Iterator[TokenBatch | Any]:
        """Yield one microbatch for each entry of ``samples``, which are the indices of this rank's samples.

        ``global_batch`` are the ``count`` samples of all ranks, over whose targets the loss is averaged.
        """
        if isinstance(part, UserSamples):
            return self.timed(part.microbatches([[(index, index) for index in each] for each in samples], self.device))
        learned = part.num_targets(global_batch)
        share = None if learned is None else learned * self.batch.micro / count
        return self.timed(to_tensors(part, each, self.device, share) for each in samples)

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield ``batches``, and add the time spent waiting for them to ``data_s``."""
        while True:
            heartbeat.record_progress()
            started = time.perf_counter()
            batch = next(batches, self)
            self.data_s += time.perf_counter() - started
            if batch is self:
                return
            yield batch
