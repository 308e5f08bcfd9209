"""Random numbers of stages: dropout of each stage and microbatch has a stream of its own."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch


class RngStreams:
    """The streams of one step.

    The ranks of a pipeline have the same random state as a rule: they read the same samples. One number of it is the
    step's seed, whatever the stages draw: afterwards the states are still the same, so that loaders that shuffle by
    them agree, and a state that is restored repeats the step.

    Args:
        device: Where the stages compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._devices = [device] if device.type == "cuda" else []
        self._seed = None if device.type == "meta" else int(torch.randint(1 << 62, (), device="cpu"))

    @contextlib.contextmanager
    def of(self, stage: int, microbatch: int) -> Iterator[None]:
        """Draw from the stream of a stage and microbatch inside."""
        if self._seed is None:
            yield
            return
        text = f"{self._seed} {stage} {microbatch}".encode()
        with torch.random.fork_rng(devices=self._devices):
            seed = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())
            # torch.manual_seed also notes a traceback for every kind of device that is not in use: 0.5 ms each time.
            torch.default_generator.manual_seed(seed)
            for device in self._devices:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            yield
