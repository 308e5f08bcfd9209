"""Activations in host memory: what a module's forward leaves for backward goes to the host, and comes back in time.

The module's ``forward`` runs under hooks on saved tensors (``torch.autograd.graph.saved_tensors_hooks``). Each storage
that autograd would keep is copied to host memory once, whatever number of views of it are saved, and is freed on the
device; backward gets views of a new copy. Of a recomputed module the saved tensors are its inputs. Parameters are not
copied: their memory belongs to the engine. Life of one storage:

=================================  ===================================================================================
moment                             what happens
=================================  ===================================================================================
forward saves a tensor of it       its copy to the host is issued
the next offloaded call ends       the copy is waited for, and the storage freed: the device holds those of two calls
backward comes to the next call    its copy to the device is issued: one call before backward needs it
backward comes to its call         the copy is waited for; autograd frees it as it goes
=================================  ===================================================================================

What the last call has saved is still on the device when backward begins, and is not copied back. A pipeline makes
backwards between forwards: then one forward's last call is on the device while another's backward has two. On CUDA
copies run on two streams of their own. The device's memory is allocated and freed on the stream that computes, which
waits for a copy before it frees what the copy reads or writes. On any other device copies are made at once.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import torch_private
from shardwise.engine.attach import Observer
from shardwise.engine.engine import Engine
from shardwise.engine.extensions.recompute import choose_modules, enclosing
from shardwise.engine.extensions.safety import SavedTensors
from shardwise.engine.storage.ignored import ignored_of
from shardwise.spec.errors import PlanError, StateError
from shardwise.spec.order import Entry
from shardwise.spec.policies import ActivationOffloadPolicy
from shardwise.spec.replacement import Replacement


def find(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    policy: ActivationOffloadPolicy | None,
    recomputed: Iterable[str] = (),
) -> dict[str, nn.Module]:
    """The modules of ``model`` that ``policy`` offloads, by name; ``recomputed`` are those that backward runs again.

    A recomputed module stands for the units inside of it, which leave nothing.

    Raises:
        PlanError: There are none, one lies inside another, or inside a recomputed module.
    """
    if policy is None:
        return {}
    recomputed = tuple(recomputed)
    known = {name: module for name, module in model.named_modules() if name in units or name in recomputed}
    found = choose_modules(model, known, policy.modules, policy.every, field="offload_activations")
    for name in found:
        outer = enclosing(name, recomputed)
        if outer is not None:
            raise PlanError(
                f"offload_activations names {name!r} inside {outer!r}, which is recomputed and leaves its inputs only."
                f"\n  Name {outer!r} instead, or leave offload_activations at True."
            )
    return found


def install(
    found: Mapping[str, nn.Module], policy: ActivationOffloadPolicy | None, *, device: torch.device
) -> ActivationOffload | None:
    """Make the modules that :func:`find` has found offload their saved tensors; ``None`` without a policy.

    Called after ``recompute.install``: offloaded are the inputs of what is recomputed.
    """
    if policy is None:
        return None
    offload = ActivationOffload(policy, tuple(found), device)
    for module in found.values():
        _Offloaded(module, offload).install()
    return offload


class ActivationOffload(Observer):
    """The common state of a model's offloaded modules: the host's memory, the streams, and the order of calls.

    Attributes:
        names: The modules.
        host: Memory on the host.
        sent_bytes, returned_bytes: Copied to the host and back so far.
    """

    def __init__(self, policy: ActivationOffloadPolicy, names: tuple[str, ...], device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.names = names
        self.device = device
        self.host = HostMemory(device, pins=policy.pin_memory and is_cuda)
        self.sent_bytes = self.returned_bytes = 0
        self._least_bytes = policy.least_bytes
        self._out = torch.cuda.Stream(device) if is_cuda else None
        self._back = torch.cuda.Stream(device) if is_cuda else None
        self._stays: frozenset[int] = frozenset()  # storages of parameters
        self._checked: SavedTensors | None = None
        self._newest: _Call | None = None
        self._follows = False  # whether the next call is in the same forward as the newest
        self._open: _Call | None = None
        self._by_storage: weakref.WeakValueDictionary[tuple[int, int], _Parcel] = weakref.WeakValueDictionary()

    def forward_begins(self, engine: Engine, entry: Entry) -> None:  # noqa: ARG002
        """Parameters lie where the engine has them."""
        held = [*(group.gathered for group in engine.groups), *ignored_of(engine).parameters.values()]
        self._stays = frozenset(map(torch_private.storage_identity, held))
        self._checked = engine.extras.find(SavedTensors)
        self._follows = False

    # -- forward

    @property
    def is_open(self) -> bool:
        """A call is under way."""
        return self._open is not None

    def begin(self) -> torch.autograd.graph.saved_tensors_hooks:
        """A call begins; returns the hooks under which it is to run."""
        call = self._open = _Call(self._newest if self._follows else None)
        self._follows = True
        checked = self._checked
        # A tensor that stays goes through the hooks that check parameters' memory, as it would without these here.
        inner = (checked.pack, checked.unpack) if checked is not None else (None, None)

        def pack(tensor: Tensor) -> Any:
            if self._is_copied(tensor):
                return _Saved(self._parcel(tensor, call), call, tensor)
            return tensor if inner[0] is None else inner[0](tensor)

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, _Saved):
                return saved.tensor()
            return saved if inner[1] is None else inner[1](saved)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def end(self) -> None:
        """The call is over: what the call before it has saved leaves the device."""
        call, self._open = self._open, None
        if call is None or not call.has_parcels:
            return
        before, self._newest = self._newest, call
        if before is not None:
            for parcel in before.parcels:
                parcel.leave()

    def _is_copied(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device != self.device:
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return False
        num_bytes = tensor.untyped_storage().nbytes()
        return num_bytes >= self._least_bytes and torch_private.storage_identity(tensor) not in self._stays

    def _parcel(self, tensor: Tensor, call: _Call) -> _Parcel:
        """The storage of a tensor, on its way to the host."""
        key = torch_private.storage_identity(tensor), tensor._version  # noqa: SLF001 - as autograd checks
        parcel = self._by_storage.get(key)
        if parcel is None or not parcel.is_here:  # else the storage may be another one by now
            parcel = self._by_storage[key] = _Parcel(self, tensor)
        call.add(parcel)  # used here too: it stays as long as what this call saves
        return parcel

    # -- copies

    def send(self, source: Tensor, target: Tensor, after: Any) -> Any:
        """Copy to the host; ``after``: the newest copy that used the host's memory. Returns the copy's event."""
        self.sent_bytes += source.nbytes
        return self._copy(source, target, self._out, after)

    def bring(self, source: Tensor, target: Tensor, after: Any) -> Any:
        """Copy to the device. Returns the copy's event."""
        self.returned_bytes += source.nbytes
        return self._copy(source, target, self._back, after)

    def _copy(self, source: Tensor, target: Tensor, stream: torch.cuda.Stream | None, after: Any) -> Any:
        if stream is None:
            target.copy_(source)
            return None
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return stream.record_event()

    def computing(self) -> torch.cuda.Stream | None:
        """The stream that computes."""
        return None if self._out is None else torch.cuda.current_stream(self.device)


class _Call:
    """One call of an offloaded module, and the one before it. Saved tensors keep it alive.

    Attributes:
        has_parcels: It has saved something.
    """

    def __init__(self, before: _Call | None) -> None:
        self._before = weakref.ref(before) if before is not None else None
        self._parcels: dict[int, weakref.ref[_Parcel]] = {}
        self._is_entered = False

    @property
    def has_parcels(self) -> bool:
        return bool(self._parcels)

    @property
    def parcels(self) -> list[_Parcel]:
        """The parcels whose backward is still to come, newest first, without those that a later call has saved too."""
        found = [parcel for ref in reversed(self._parcels.values()) if (parcel := ref()) is not None]
        return [parcel for parcel in found if parcel.newest_call() is self]

    def add(self, parcel: _Parcel) -> None:
        self._parcels[id(parcel)] = weakref.ref(parcel)
        parcel.newest_call = weakref.ref(self)

    def enter(self) -> None:
        """Backward has come to the call: have what it saved brought, and then what the call before it saved."""
        if self._is_entered:
            return
        self._is_entered = True
        before = self._before() if self._before is not None else None
        for call in (self, before):
            for parcel in call.parcels if call is not None else ():
                parcel.come()


class _Parcel:
    """One storage: on the device, on the host, or both. Saved tensors keep it alive.

    Attributes:
        is_here: The storage that forward saved is still on the device.
        newest_call: The last call that has saved it.
    """

    def __init__(self, offload: ActivationOffload, tensor: Tensor) -> None:
        self._offload = offload
        self._source: Tensor | None = tensor.detach()  # shares the tensor's counter of versions
        self._version = tensor._version  # noqa: SLF001
        self._is_changed = False
        self._returned: Tensor | None = None
        self._stream = offload.computing()
        self.newest_call: Any = lambda: None
        flat = _all_bytes(self._source)
        self._host, after = offload.host.take(flat.numel())
        self._event = self._host_event = offload.send(flat, self._host, after)

    @property
    def is_here(self) -> bool:
        return self._source is not None

    def _wait(self) -> None:
        """Make the compute stream wait for the copy under way."""
        if self._event is not None:
            assert self._stream is not None
            self._stream.wait_event(self._event)
            self._event = None

    def leave(self) -> None:
        """Free the storage on the device."""
        if self._source is not None:
            self._wait()
            self._is_changed = self._source._version != self._version  # noqa: SLF001
            self._source = None

    def come(self) -> None:
        """Copy the storage back, unless it is on the device or on its way."""
        if self._source is None and self._returned is None:
            self._stream = self._offload.computing()
            self._returned = torch.empty_like(self._host, device=self._offload.device)
            self._event = self._host_event = self._offload.bring(self._host, self._returned, self._host_event)

    def storage(self) -> torch.UntypedStorage:
        """The storage on the device, as forward saved it."""
        if self._source is not None:
            self._is_changed = self._source._version != self._version  # noqa: SLF001
        if self._is_changed:
            raise StateError(
                "a tensor that backward needs was modified by an inplace operation after it had been saved, and"
                " offload_activations has copied it to the host meanwhile.\n"
                "  Compute out of place; without offload_activations torch names the operation."
            )
        if self._source is not None:
            return self._source.untyped_storage()
        self.come()
        self._wait()
        assert self._returned is not None
        return self._returned.untyped_storage()

    def __del__(self, is_finalizing: Any = sys.is_finalizing) -> None:
        if not is_finalizing() and hasattr(self, "_host_event"):
            self._wait()  # before the device's memory is given to others
            self._offload.host.give(self._host, self._host_event)


class _Saved:
    """The object that autograd holds in place of a saved tensor."""

    __slots__ = ("_call", "_dtype", "_offset", "_parcel", "_shape", "_stride")

    def __init__(self, parcel: _Parcel, call: _Call, tensor: Tensor) -> None:
        self._parcel, self._call = parcel, call
        self._dtype, self._offset = tensor.dtype, tensor.storage_offset()
        self._shape, self._stride = tensor.shape, tensor.stride()

    def tensor(self) -> Tensor:
        """The tensor, on the device."""
        self._call.enter()
        storage = self._parcel.storage()
        with torch.no_grad():
            like = torch.empty(0, dtype=self._dtype, device=storage.device)
            return like.set_(storage, self._offset, self._shape, self._stride)


def _all_bytes(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor as bytes."""
    storage = tensor.untyped_storage()
    with torch.no_grad():
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return flat.set_(storage, 0, (storage.nbytes(),), (1,))


class HostMemory:
    """Buffers on the host that are used again. In a dry run they are on meta.

    Attributes:
        most_used_bytes: The most that was in use at once; no more than that stays unused.
    """

    def __init__(self, device: torch.device, *, pins: bool) -> None:
        self._device = device if device.type == "meta" else torch.device("cpu")
        self._pins = pins
        self._unused: list[tuple[Tensor, Any]] = []  # the oldest first
        self._used_bytes = self._unused_bytes = 0
        self.most_used_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers, used or not."""
        return self._used_bytes + self._unused_bytes

    def take(self, num_bytes: int) -> tuple[Tensor, Any]:
        """A buffer, and the event of the newest copy that used its memory, which must be waited for."""
        self._used_bytes += num_bytes
        self.most_used_bytes = max(self.most_used_bytes, self._used_bytes)
        for place, (buffer, _) in enumerate(self._unused):
            if buffer.numel() == num_bytes:
                self._unused_bytes -= num_bytes
                return self._unused.pop(place)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device, pin_memory=self._pins), None

    def give(self, buffer: Tensor, event: Any) -> None:
        """Return a buffer; the oldest unused ones are freed where more lies unused than was ever used at once."""
        self._used_bytes -= buffer.numel()
        self._unused_bytes += buffer.numel()
        self._unused.append((buffer, event))
        while self._unused_bytes > self.most_used_bytes:
            oldest, _ = self._unused.pop(0)  # torch's allocator of pinned memory waits for copies under way
            self._unused_bytes -= oldest.numel()


class _Offloaded(Replacement):
    def __init__(self, module: nn.Module, offload: ActivationOffload) -> None:
        super().__init__(module)
        self._offload = offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        offload = self._offload
        if not torch.is_grad_enabled() or offload.is_open or torch_private.current_backward() != -1:
            return self.own(*args, **kwargs)
        try:
            with offload.begin():
                return self.own(*args, **kwargs)
        finally:
            offload.end()
