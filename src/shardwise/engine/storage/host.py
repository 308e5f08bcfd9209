"""The host form: master, ``.grad`` and optimizer state in host memory, copies to and from the device that computes.

At a gather the master is copied into this rank's slice of the gathered buffer, from where the all-gather takes it; a
reduced gradient is copied from the device's buffer to the host's. On CUDA each direction has a stream of its own:

* up: after everything that the compute stream had been given; the all-gather waits for it.
* down: after the reduction; the compute stream waits for it before the buffer is used again.

The host waits for a copy where it reads what was copied: at the end of backward, because the optimizer is about to read
the gradients; before it updates a unit inside backward; and where it has to add up gradients itself. On any other
device the same copies are made, each when it is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from shardwise.comm.base import Done, Handle
from shardwise.engine.group import Form, Group
from shardwise.engine.storage.inner import Around
from shardwise.engine.storage.packed import PackedPool, packed_pool
from shardwise.spec.errors import PlanError
from shardwise.spec.placement import Placements
from shardwise.spec.policies import OffloadPolicy, choose

if TYPE_CHECKING:
    from shardwise.engine.build import OwnedParameter
    from shardwise.engine.engine import Engine

Name = TypeVar("Name", str, tuple[str, ...])


def refuse_no_offload(parameters: Iterable[nn.Parameter], row: Placements, policy: OffloadPolicy) -> None:
    """Refuse a policy that finds nothing in a whole model.

    Raises:
        PlanError: There is nothing to offload.
    """
    if not any(p.numel() and policy.covers(row, is_trainable=p.requires_grad) for p in parameters):
        what = "no parameters" if policy.optimizer else "no frozen parameters"
        raise PlanError(f"offload_policy finds nothing to offload: there are {what}.\n  Set offload_policy='none'.")


def choose_units(owned: Mapping[Name, Sequence[OwnedParameter]], row: Placements, policy: OffloadPolicy) -> set[Name]:
    """Names of the units that ``policy`` offloads, by what each owns. Of a stage of a pipeline there may be none."""
    sizes = [
        sum(
            entry.parameter.nbytes
            for entry in entries
            if policy.covers(row, is_trainable=entry.parameter.requires_grad)
        )
        for entries in owned.values()
    ]
    if not any(sizes):
        return set()
    return {name for name, is_chosen in zip(owned, choose(sizes, policy.ratio), strict=True) if is_chosen}


def host_zeros(numel: int, dtype: torch.dtype, device: torch.device, *, pins: bool) -> Tensor:
    """Host memory that exchanges data with ``device``. In a dry run there is none."""
    if device.type == "meta":
        return torch.zeros(numel, dtype=dtype, device=device)
    return torch.zeros(numel, dtype=dtype, pin_memory=pins and device.type == "cuda")


class OnHost(Around):
    """Keeps on the host what the optimizer works on; ``within`` says how the group is held, apart from the place."""

    def __init__(self, within: Form, policy: OffloadPolicy) -> None:
        super().__init__(within)
        self.policy = policy
        self.resident: Tensor | None = None  # the shard that the device keeps of the master
        self._resident_epoch = -1  # the forward for which it was brought
        self._landing: Tensor | None = None  # on the host, for a sum that cannot go straight to where .grad lives
        self._copy: Copy | None = None  # the newest one to the host

    def make_master(self, group: Group) -> Tensor:
        """As the form within, on the host; and the device's shard, where it keeps one."""
        facts = group.facts
        if facts.held_as is not None:
            packed = self.within.make_master(group)
            return host_zeros(packed.numel(), packed.dtype, group.device, pins=self.policy.pin_memory).copy_(packed)
        if facts.keeps_shard:
            # What is packed from it has the master's own digits.
            kept = group.dtype if facts.sent_as is not None else group.compute_dtype
            self.resident = torch.zeros(group.master_numel, dtype=kept, device=group.device)
        return group.fill(self.zeros(group, group.master_numel))

    def zeros(self, group: Group, numel: int) -> Tensor:
        """Host memory."""
        return host_zeros(numel, group.dtype, group.device, pins=self.policy.pin_memory)

    def start(self, group: Group, engine: Engine) -> None:
        """Join the model's transfers, with a buffer on the device for a master that has to be cast there."""
        super().start(group, engine)
        self._packed = packed_pool(engine, "reduce")
        transfers = engine.extras.find(Transfers)
        if transfers is None:
            transfers = Transfers(group.device)
            engine.extras.add(transfers)
            engine.extras.host_waits.append(transfers.synchronise)
        self.transfers = transfers
        if group.facts.needs_stage:
            transfers.stage(group.master)

    def gather(self, group: Group) -> Handle:
        """As the form within, once the master has been brought up."""
        with self.transfers.upward():
            handle = self.within.send(group, self._bring(group))
            return handle if group.row.shards_optimizer else self.transfers.arrival()

    def _bring(self, group: Group) -> Tensor:
        """The master on its way from the host, or what the device has kept of it in this forward."""
        if self.resident is None:
            return self.transfers.staged(group.master) if group.facts.needs_stage else group.master
        if self._resident_epoch != group.epoch:
            is_cast = self.resident.dtype is not group.dtype
            master = self.transfers.staged(group.master) if is_cast else group.master
            self.resident.copy_(master, non_blocking=True)
            self._resident_epoch = group.epoch
        return self.resident

    def arrive(self, group: Group, reduction: Handle) -> Handle:
        """Send the sum to the host as soon as it is there."""
        gradient = group.gradient
        sum_on_device, home = gradient.result, gradient.storage.make()
        assert sum_on_device is not None
        gradient.result = home
        if group.reduce_dtype is not group.dtype or gradient.has_sums:
            if self._landing is None:
                self._landing = host_zeros(
                    sum_on_device.numel(), sum_on_device.dtype, group.device, pins=self.policy.pin_memory
                )
            gradient.result = self._landing
        self._copy = self.transfers.send(sum_on_device, gradient.result, reduction, self._packed)
        return self._copy

    def wait_for_host(self) -> None:
        """Wait for the newest copy of a sum of the group, made after those before it; from any thread."""
        if self._copy is not None:
            self._copy.wait_on_host()

    def buffers(self) -> list[tuple[str, Tensor]]:
        """Buffers of the form within, the device's shard, and the host memory where sums arrive."""
        own = (("parameters", self.resident), ("host", self._landing))
        return [*super().buffers(), *((category, tensor) for category, tensor in own if tensor is not None)]


class Transfers:
    """The copies of one model's offloaded groups, and the device's buffers that they pass through."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.device = device
        self._up = torch.cuda.Stream(device) if is_cuda else None
        self._down = torch.cuda.Stream(device) if is_cuda else None
        self._events: dict[str, Any] = {}  # the newest of either direction
        self._stages: dict[torch.dtype, Tensor] = {}

    def stage(self, master: Tensor) -> None:
        """Allocate a buffer on the device for a master that travels uncast: the host is not to cast."""
        if master.numel() > len(self._stages.get(master.dtype, ())):
            self._stages[master.dtype] = torch.zeros(master.numel(), dtype=master.dtype, device=self.device)

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

    def send(self, source: Tensor, target: Tensor, after: Handle, pool: PackedPool) -> Copy:
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
        """Make the host wait until every copy has been made, so that it may read gradients and write masters."""
        for event in self._events.values():
            event.synchronize()
        self._events.clear()


class Copy(Handle):
    """A copy of one tensor between device and host."""

    def wait_on_host(self) -> None:
        """Make the host wait until the copy has been made. The handle has been waited for already."""


class _Event(Copy):
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

    def wait_on_host(self) -> None:
        self._event.synchronize()


class _Later(Copy):
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
