"""Traces of some steps of a run for ui.perfetto.dev, and on a GPU the allocator's history for memory_viz."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from shardwise import torch_private
from shardwise.measure.profile import StepProfile, step_range
from shardwise.sim.chrome import chrome_trace
from shardwise.spec.text import printable
from shardwise.train.folder import replace_text


class StepTrace:
    """Profiles the steps ``wanted``, and writes this rank's files after the last of them.

    The history of a GPU's allocator is also written if a step fails, for example because memory runs out.
    """

    def __init__(self, steps: range, device: torch.device, path: Path, rank: int) -> None:
        """Set the steps to profile, all of which must be made, and the file to write."""
        self._wanted, self._device, self._path, self._rank = steps, device, path, rank
        self._profile: StepProfile | None = None
        self._memory = path.with_name(f"memory-{path.stem}.pickle")
        self._open = contextlib.ExitStack()

    @contextlib.contextmanager
    def step(self, number: int, say: Callable[[str], object]) -> Iterator[None]:
        """Profile step ``number`` in this block if wanted. ``say`` gets the path of the trace after the last step."""
        if number not in self._wanted:
            yield
            return
        if self._profile is None:
            self._path.parent.mkdir(exist_ok=True)
            if self._device.type == "cuda":
                self._open.enter_context(torch_private.memory_history(str(self._memory)))
            self._profile = StepProfile(self._device)
            self._profile.__enter__()
        try:
            with step_range(number):
                yield
        except BaseException:
            self._open.close()
            raise
        if number == self._wanted[-1]:
            self._profile.__exit__(None, None, None)
            self._open.close()
            replace_text(self._path, chrome_trace({f"rank {self._rank}, measured": self._profile.slices}))
            self._profile = None
            say(f"trace of steps {self._wanted[0]} to {number}: {printable(self._path)}, for ui.perfetto.dev")
            if self._device.type == "cuda":
                say(f"the allocator in these steps: {printable(self._memory)}, for docs.pytorch.org/memory_viz")

    def optimizer(self, number: int) -> contextlib.AbstractContextManager[object]:
        """Mark the optimizer's part of step ``number``."""
        return step_range(number, "optimizer") if self._profile is not None else contextlib.nullcontext()
