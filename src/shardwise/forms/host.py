"""Between the host and the compute device: masters up to where they are gathered, reduced gradients down to ``.grad``.

A group that is offloaded keeps its master and what the optimizer adds to it in host memory. At a gather the master is
copied into this rank's slice of the gathered buffer, from where the all-gather takes it; a reduced gradient is copied
from the device's buffer to the host's. On CUDA each direction has a stream of its own:

* up: after everything that the compute stream had been given (the slot is free then); the all-gather waits for it.
* down: after the reduction; the compute stream waits for it before the buffer is used again.

The host waits in two places: at the end of backward, because the optimizer is about to read the gradients, and where it
has to add up gradients itself. On any other device the same copies are made, each when it is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from shardwise.comm.base import Done, Handle
from shardwise.spec.errors import PlanError
from shardwise.spec.placement import Placements
from shardwise.spec.policies import OffloadPolicy, choose

if TYPE_CHECKING:
    from shardwise.engine.build import OwnedParameter
    from shardwise.engine.group import Group
    from shardwise.engine.pool import PackedPool

Name = TypeVar("Name", str, tuple[str, ...])


def choose_units(owned: Mapping[Name, Sequence[OwnedParameter]], row: Placements, policy: OffloadPolicy) -> set[Name]:
    """Names of the units that ``policy`` offloads, by what each owns.

    Raises:
        PlanError: There is nothing to offload.
    """
    sizes = [
        sum(
            entry.parameter.nbytes
            for entry in entries
            if policy.covers(row, is_trainable=entry.parameter.requires_grad)
        )
        for entries in owned.values()
    ]
    if not any(sizes):
        what = "no parameters" if policy.optimizer else "no frozen parameters"
        raise PlanError(f"offload_policy finds nothing to offload: there are {what}.\n  Set offload_policy='none'.")
    return {name for name, is_chosen in zip(owned, choose(sizes, policy.ratio), strict=True) if is_chosen}


def host_zeros(numel: int, dtype: torch.dtype, device: torch.device, *, pins: bool) -> Tensor:
    """Host memory that exchanges data with ``device``. In a dry run there is none."""
    if device.type == "meta":
        return torch.zeros(numel, dtype=dtype, device=device)
    return torch.zeros(numel, dtype=dtype, pin_memory=pins and device.type == "cuda")


class Transfers:
    """The copies of one model's offloaded groups, and the device's buffers that they pass through.

    Args:
        groups: The offloaded groups; each is told who carries its copies.
        device: The compute device.
    """

    def __init__(self, groups: Sequence[Group], device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.device = device
        self._up = torch.cuda.Stream(device) if is_cuda else None
        self._down = torch.cuda.Stream(device) if is_cuda else None
        self._events: dict[str, Any] = {}  # the newest of either direction
        self._stages: dict[torch.dtype, Tensor] = {}
        for group in groups:
            group.transfers = self
            if group.needs_stage:  # masters travel as they are: the host is not to cast
                numel = max(group.master.numel(), len(self._stages.get(group.dtype, ())))
                self._stages[group.dtype] = torch.zeros(numel, dtype=group.dtype, device=device)

    @property
    def stages(self) -> list[Tensor]:
        """The buffers on the device."""
        return list(self._stages.values())

    # -- up

    @contextlib.contextmanager
    def upward(self) -> Iterator[None]:
        """On CUDA, the context in which everything is enqueued on the stream that goes up."""
        if self._up is None:
            yield
            return
        self._up.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._up):
            yield
            self._events["up"] = self._up.record_event()

    def staged(self, master: Tensor) -> Tensor:
        """A master on the device, as it is on the host. Called inside :meth:`upward`; good until the next call."""
        return self._stages[master.dtype][: master.numel()].copy_(master, non_blocking=True)

    def arrival(self) -> Handle:
        """Done when what :meth:`upward` was given so far is there. Called inside of it."""
        return Done() if self._up is None else _Event(self._up.record_event(), self.device)

    # -- down

    def send(self, source: Tensor, target: Tensor, after: Handle, pool: PackedPool) -> Handle:
        """Copy ``source`` on the device to ``target`` on the host as soon as ``after`` is done.

        Args:
            source: The sum.
            target: Where ``.grad`` lives, or what is added to it.
            after: The reduction. On CUDA its last part (adding up what came packed) runs on the stream that goes down.
            pool: Where it gives back its packed buffers: others may write there when the handle has been waited for.
        """
        if self._down is None:
            return _Later(source, target, after)
        with torch.cuda.stream(self._down), pool.holding() as held:
            after.wait()
            target.copy_(source, non_blocking=True)
            self._events["down"] = self._down.record_event()
        return _Event(
            self._events["down"], self.device, lambda: [pool.give(buffer) for buffer in held], moved=(source, target)
        )

    def synchronise(self) -> None:
        """Have the host wait until every copy has been made, so that it may read gradients and write masters."""
        for event in self._events.values():
            event.synchronize()
        self._events.clear()


class _Event(Handle):
    """A copy on a stream of its own."""

    def __init__(
        self,
        event: Any,
        device: torch.device,
        then: Callable[[], object] | None = None,
        moved: tuple[Tensor, ...] = (),
    ) -> None:
        self._event = event
        self._device = device
        self._then = then
        self._moved = moved

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)
        self._moved = ()
        then, self._then = self._then, None
        if then is not None:
            then()


class _Later(Handle):
    """A copy that is made when what it copies is there."""

    def __init__(self, source: Tensor, target: Tensor, after: Handle) -> None:
        self._copies: tuple[Tensor, Tensor] | None = source, target
        self._after = after

    def advance(self) -> bool:
        return self._after.advance()

    def wait(self) -> None:
        self._after.wait()
        if self._copies is not None:
            source, target = self._copies
            self._copies = None
            target.copy_(source)
