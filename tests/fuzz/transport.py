"""A transport that is as early, or as late, as it may be.

What a collective writes may be there as soon as it has been issued, or only when it is waited for; what it sends may be
read until then. So some are finished at once, and others work on copies: their buffers hold NaN until they are waited
for, and what they have been given to send must not have changed by then. Which ones is drawn from a seed, as are short
pauses that bring ranks out of step. A rank that finishes a sum early waits until the hosts of the others go on with it;
so what is finished at once is the same on all ranks, and the rest is each rank's own. An engine that reads or writes a
buffer too early computes something else.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shardwise.comm.base import Handle
from shardwise.comm.gloo import GlooComm


class _Late(Handle):
    """Delivers when it is waited for."""

    def __init__(self, inner: Handle, deliver: Callable[[], None]) -> None:
        self._inner = inner
        self._deliver: Callable[[], None] | None = deliver

    def start_next_phase(self) -> bool:
        if self._inner.start_next_phase():
            return True
        self._finish()
        return False

    def wait(self) -> None:
        self._inner.wait()
        self._finish()

    def _finish(self) -> None:
        deliver, self._deliver = self._deliver, None
        if deliver is not None:
            deliver()


class _Transport:
    """What stands for three methods of ``GlooComm``."""

    def __init__(self, seed: int, rank: int) -> None:
        self._shared, self._random = random.Random(seed), random.Random(f"{seed} {rank}")
        self._gather, self._scatter, self._reduce = GlooComm.all_gather, GlooComm.reduce_scatter, GlooComm.all_reduce

    def _run(self, issue: Callable[[], Handle], issue_late: Callable[[], Handle]) -> Handle:
        if self._random.random() < 0.02:
            time.sleep(self._random.choice([0.0005, 0.002, 0.005]))
        if self._shared.random() < 0.25:
            handle = issue()
            while handle.start_next_phase():
                pass
            return handle
        return self._random.choice([issue, issue_late, issue_late])()

    def all_gather(self, comm: GlooComm, buffer: Tensor, *, unit: str, bounds: Sequence[int] | None = None) -> Handle:
        def issue_late() -> Handle:
            stand_in = buffer.clone()
            theirs, here = comm._slices(buffer, bounds), comm._slices(stand_in, bounds)
            others = [rank for rank in range(comm.size) if rank != comm.rank]
            for rank in others:
                _spoil(theirs[rank])

            def deliver() -> None:
                _check(theirs[comm.rank], here[comm.rank], f"gather of {unit}")
                for rank in others:
                    theirs[rank].copy_(here[rank])

            return _Late(self._gather(comm, stand_in, unit=unit, bounds=bounds), deliver)

        return self._run(lambda: self._gather(comm, buffer, unit=unit, bounds=bounds), issue_late)

    def reduce_scatter(self, comm: GlooComm, buffer: Tensor, out: Tensor, *, unit: str, **how: Any) -> Handle:
        def issue_late() -> Handle:
            given, place = buffer.clone(), out.clone()
            is_inside = out.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
            _spoil(out)
            before = buffer.clone()

            def deliver() -> None:
                if is_inside:
                    _spoil(out)
                _check(buffer, before, f"sum of {unit}")
                out.copy_(place)

            return _Late(self._scatter(comm, given, place, unit=unit, **how), deliver)

        return self._run(lambda: self._scatter(comm, buffer, out, unit=unit, **how), issue_late)

    def all_reduce(
        self, comm: GlooComm, buffer: Tensor, *, unit: str, divisor: float = 1, out: Tensor | None = None
    ) -> Handle:
        def issue_late() -> Handle:
            given, target = buffer.clone(), buffer if out is None else out
            _spoil(target)
            before = buffer.clone()

            def deliver() -> None:
                _check(buffer, before, f"sum of {unit}")
                target.copy_(given)

            return _Late(self._reduce(comm, given, unit=unit, divisor=divisor), deliver)

        return self._run(lambda: self._reduce(comm, buffer, unit=unit, divisor=divisor, out=out), issue_late)


def _spoil(tensor: Tensor) -> None:
    tensor.fill_(float("nan") if tensor.is_floating_point() else 77)


def _check(tensor: Tensor, sent: Tensor, what: str) -> None:
    if not torch.equal(tensor.view(torch.uint8), sent.view(torch.uint8)):
        raise AssertionError(f"what the {what} sends, or receives into, was written before it had been waited for")


@contextlib.contextmanager
def delayed(seed: int, rank: int) -> Iterator[None]:
    """Inside, messages are early or late as ``seed`` says."""
    transport = _Transport(seed, rank)

    def method(name: str) -> Callable[..., Handle]:
        def issue(comm: GlooComm, *args: Any, **kwargs: Any) -> Handle:  # a function: a method gets no Comm
            return getattr(transport, name)(comm, *args, **kwargs)

        return issue

    with contextlib.ExitStack() as stack:
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            stack.enter_context(mock.patch.object(GlooComm, name, method(name)))
        yield
