"""The trace of some steps of a run, for ui.perfetto.dev."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from shardwise.measure.profile import StepProfile, step_range
from shardwise.sim.chrome import chrome_trace
from shardwise.spec.text import printable
from shardwise.train.folder import replace_text


class StepTrace:
    """Profiles the steps ``wanted`` while they are made, and writes this rank's trace after the last of them."""

    def __init__(self, wanted: range, device: torch.device, path: Path, rank: int) -> None:
        """Take the numbers of the steps, all of which the run will make, and the file to write."""
        self._wanted, self._device, self._path, self._rank = wanted, device, path, rank
        self._profile: StepProfile | None = None

    @contextlib.contextmanager
    def step(self, number: int, say: Callable[[str], object]) -> Iterator[None]:
        """Around step ``number``. ``say`` is called with where the trace is, after the last step."""
        if number not in self._wanted:
            yield
            return
        if self._profile is None:
            self._profile = StepProfile(self._device)
            self._profile.__enter__()
        with step_range(number):
            yield
        if number == self._wanted[-1]:
            self._profile.__exit__(None, None, None)
            self._path.parent.mkdir(exist_ok=True)
            replace_text(self._path, chrome_trace({f"rank {self._rank}, measured": self._profile.slices}))
            self._profile = None
            say(f"trace of steps {self._wanted[0]} to {number}: {printable(self._path)}, for ui.perfetto.dev")

    def optimizer(self, number: int) -> contextlib.AbstractContextManager[object]:
        """Around the optimizer's part of step ``number``."""
        return step_range(number, "optimizer") if self._profile is not None else contextlib.nullcontext()
