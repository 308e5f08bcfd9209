"""The host form: master, ``.grad`` and optimizer state in host memory, with copies to and from the compute device.

A gather first copies the master into this rank's slice of the gathered buffer. A reduced gradient is copied from the
device's buffer to the host's. On CUDA each direction has a separate stream:

* up: starts after everything that was enqueued on the compute stream; the all-gather waits for it.
* down: starts after the reduction; the compute stream waits for it before the buffer is used again.

The host waits for a copy before it reads the result: at the end of backward, because the optimizer is about to read the
gradients; before it updates a unit inside backward; and where it adds up gradients itself. On any other device the
same copies are synchronous.
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


def refuse_no_offload(parameters: Iterable[nn.Parameter], placements: Placements, policy: OffloadPolicy) -> None:
    """Refuse a policy that offloads nothing of the model.

    Raises:
        PlanError: There is nothing to offload.
    """
    if not any(p.numel() and policy.covers(placements, is_trainable=p.requires_grad) for p in parameters):
        what = "no parameters" if policy.optimizer else "no frozen parameters"
        raise PlanError(f"offload_policy finds nothing to offload: there are {what}.\n  Set offload_policy='none'.")


def choose_units(
    owned: Mapping[Name, Sequence[OwnedParameter]], placements: Placements, policy: OffloadPolicy
) -> set[Name]:
    """Return the names of the units in ``owned`` that ``policy`` offloads; there may be none in a pipeline stage."""
    sizes = [
        sum(
            entry.parameter.nbytes
            for entry in entries
            if policy.covers(placements, is_trainable=entry.parameter.requires_grad)
        )
        for entries in owned.values()
    ]
    if not any(sizes):
        return set()
    return {name for name, is_chosen in zip(owned, choose(sizes, policy.ratio), strict=True) if is_chosen}


def host_zeros(numel: int, dtype: torch.dtype, device: torch.device, *, pins: bool) -> Tensor:
    """Allocate zeros in host memory for copies from and to ``device``; on meta in a dry run."""
    if device.type == "meta":
        return torch.zeros(numel, dtype=dtype, device=device)
    return torch.zeros(numel, dtype=dtype, pin_memory=pins and device.type == "cuda")


class OnHost(Around):
    """Stores master and ``.grad`` on the host; the form ``inner`` defines their format."""

    def __init__(self, inner: Form, policy: OffloadPolicy) -> None:
        super().__init__(inner)
        self.policy = policy
        self.resident: Tensor | None = None  # the copy of the master on the device
        self._resident_epoch = -1  # Engine.epoch of its values
        self._host_sum: Tensor | None = None  # on the host, for a sum that cannot be copied directly into .grad
        self._copy: Copy | None = None  # the newest copy to the host

    def make_master(self, group: Group) -> Tensor:
        """Allocate and fill the master on the host, and allocate the device's copy if the policy keeps one."""
        facts = group.facts
        if facts.stored_as is not None:
            packed = self.inner.make_master(group)
            return host_zeros(packed.numel(), packed.dtype, group.device, pins=self.policy.pin_memory).copy_(packed)
        if facts.keeps_shard:
            # Packing needs the master's full precision.
            dtype = group.dtype if facts.gathered_as is not None else group.compute_dtype
            self.resident = torch.zeros(group.master_numel, dtype=dtype, device=group.device)
        return group.fill(self.zeros(group, group.master_numel))

    def zeros(self, group: Group, numel: int) -> Tensor:
        """Allocate zeros in host memory."""
        return host_zeros(numel, group.dtype, group.device, pins=self.policy.pin_memory)

    def start(self, group: Group, engine: Engine) -> None:
        """Share the model's transfers, and announce a buffer on the device for a master that is cast there."""
        super().start(group, engine)
        self._packed = packed_pool(engine, "reduce")
        transfers = engine.extras.find(Transfers)
        if transfers is None:
            transfers = Transfers(group.device)
            engine.extras.add(transfers)
            engine.extras.host_waits.append(transfers.synchronise)
        self.transfers = transfers
        if group.facts.needs_staging:
            transfers.reserve_staging(group.master)

    def gather(self, group: Group) -> Handle:
        """Copy the master to the device and gather as the inner form."""
        with self.transfers.uploading():
            handle = self.inner.gather_from(group, self._on_device(group))
            return handle if group.placements.shards_optimizer else self.transfers.copies_so_far()

    def _on_device(self, group: Group) -> Tensor:
        """Return the master, copied to the device if needed; its copy there is up to date within a forward."""
        if self.resident is None:
            return self.transfers.staged(group.master) if group.facts.needs_staging else group.master
        if self._resident_epoch != group.epoch:
            is_cast = self.resident.dtype is not group.dtype
            master = self.transfers.staged(group.master) if is_cast else group.master
            self.resident.copy_(master, non_blocking=True)
            self._resident_epoch = group.epoch
        return self.resident

    def store_sum(self, group: Group, reduction: Handle) -> Handle:
        """Copy the sum to the host once ``reduction`` has finished."""
        gradient = group.gradient
        sum_on_device, grad_memory = gradient.result, gradient.storage.make()
        assert sum_on_device is not None
        gradient.result = grad_memory
        if group.reduce_dtype is not group.dtype or gradient.has_sums:
            if self._host_sum is None:
                self._host_sum = host_zeros(
                    sum_on_device.numel(), sum_on_device.dtype, group.device, pins=self.policy.pin_memory
                )
            gradient.result = self._host_sum
        self._copy = self.transfers.send(sum_on_device, gradient.result, reduction, self._packed)
        return self._copy

    def wait_for_host(self) -> None:
        """Make the host wait for the group's newest copy of a sum, and so for earlier ones; from any thread."""
        if self._copy is not None:
            self._copy.wait_on_host()

    def buffers(self) -> list[tuple[str, Tensor]]:
        """Buffers of the inner form, the device's copy of the master, and the host memory that receives sums."""
        own = (("parameters", self.resident), ("host", self._host_sum))
        return [*super().buffers(), *((category, tensor) for category, tensor in own if tensor is not None)]


class Transfers:
    """Streams, events and staging buffers for the copies of one model's offloaded groups."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.device = device
        self._upload = torch.cuda.Stream(device) if is_cuda else None
        self._download = torch.cuda.Stream(device) if is_cuda else None
        self._events: dict[str, Any] = {}  # the newest event of each direction
        self._staging: dict[torch.dtype, Tensor] = {}

    def reserve_staging(self, master: Tensor) -> None:
        """Allocate a buffer on the device for a master that is copied in its own dtype and cast there."""
        if master.numel() > len(self._staging.get(master.dtype, ())):
            self._staging[master.dtype] = torch.zeros(master.numel(), dtype=master.dtype, device=self.device)

    @property
    def staging_buffers(self) -> list[Tensor]:
        """The staging buffers on the device."""
        return list(self._staging.values())

    # -- up

    @contextlib.contextmanager
    def uploading(self) -> Iterator[None]:
        """On CUDA, enqueue everything inside the context on the stream for copies to the device."""
        if self._upload is None:
            yield
            return
        self._upload.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._upload):
            yield
            self._events["up"] = self._upload.record_event()

    def staged(self, master: Tensor) -> Tensor:
        """Copy a master to the device uncast, inside :meth:`uploading`; the result is valid until the next call."""
        return self._staging[master.dtype][: master.numel()].copy_(master, non_blocking=True)

    def copies_so_far(self) -> Handle:
        """Return a handle for everything enqueued so far inside :meth:`uploading`. Called inside of it."""
        return Done() if self._upload is None else _Event(self._upload.record_event(), self.device)

    # -- down

    def send(self, source: Tensor, target: Tensor, after: Handle, pool: PackedPool) -> Copy:
        """Copy ``source`` on the device to ``target`` on the host as soon as ``after`` is done.

        Args:
            source: The sum.
            target: The memory of ``.grad``, or a buffer that is added to it.
            after: The reduction. On CUDA its last part (adding up packed gradients) runs on the stream for copies to
                the host.
            pool: Pool of the reduction's packed buffers, which may be reused once the handle has been waited for.
        """
        if self._download is None:
            return _DeferredCopy(source, target, after)
        with torch.cuda.stream(self._download), pool.defer_release() as used:
            after.wait()
            target.copy_(source, non_blocking=True)
            self._events["down"] = self._download.record_event()
        return _Event(
            self._events["down"], self.device, lambda: [pool.release(each) for each in used], moved=(source, target)
        )

    def synchronise(self) -> None:
        """Make the host wait until every copy has been made, so that it may read gradients and write masters."""
        for event in self._events.values():
            event.synchronize()
        self._events.clear()


class Copy(Handle):
    """A copy of one tensor between device and host."""

    def wait_on_host(self) -> None:
        """Make the host wait until the copy has been made, after :meth:`wait` has been called."""


class _Event(Copy):
    """A copy on a separate CUDA stream."""

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


class _DeferredCopy(Copy):
    """A copy that :meth:`wait` makes, after waiting for the source."""

    def __init__(self, source: Tensor, target: Tensor, after: Handle) -> None:
        self._copies: tuple[Tensor, Tensor] | None = source, target
        self._after = after

    def start_next_phase(self) -> bool:
        return self._after.start_next_phase()

    def wait(self) -> None:
        self._after.wait()
        if self._copies is not None:
            source, target = self._copies
            self._copies = None
            target.copy_(source)
