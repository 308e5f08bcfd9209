"""Activation offloading: tensors that a module's forward saves for backward are moved to host memory and back.

The module's ``forward`` runs under hooks on saved tensors (``torch.autograd.graph.saved_tensors_hooks``). Each storage
that autograd would keep is copied to host memory once, however many views of it are saved, and is freed on the device.
Backward gets views of a new copy. The saved tensors of a recomputed module are its inputs. Parameters are not copied,
because their memory belongs to the engine. Life of one storage:

=================================  ===================================================================================
moment                             what happens
=================================  ===================================================================================
forward saves a tensor of it       its copy to the host is issued
the next offloaded call ends       the copy is waited for, and the storage freed: the device stores those of two calls
backward reaches the next call     its copy to the device is issued: one call before backward needs it
backward reaches its call          the copy is waited for; autograd frees it after use
=================================  ===================================================================================

Tensors that the last call has saved are still on the device when backward begins, and are not copied back. A pipeline
runs backwards between forwards: the device then stores the last call of one forward and two calls of the backward. On
CUDA copies use two separate streams. Device memory is allocated and freed on the compute stream, which waits for a copy
before it frees the memory that the copy uses. On any other device copies are synchronous.
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
from shardwise.spec.order import EntryPoint
from shardwise.spec.policies import ActivationOffloadPolicy
from shardwise.spec.replacement import Replacement


def find(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    policy: ActivationOffloadPolicy | None,
    recomputed: Iterable[str] = (),
) -> dict[str, nn.Module]:
    """Return the modules of ``model`` that ``policy`` offloads, by name.

    A module in ``recomputed``, which backward runs again, is offloaded in place of the units inside it.

    Raises:
        PlanError: There are none, or one is inside another or inside a recomputed module.
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
    """Make the modules that :func:`find` has returned offload their saved tensors; ``None`` without a policy.

    Must be called after ``recompute.install``, so that the inputs of recomputed modules are offloaded.
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
        names: Names of the modules.
        host: Buffers on the host.
        sent_bytes, returned_bytes: Bytes copied to the host and back so far.
    """

    def __init__(self, policy: ActivationOffloadPolicy, names: tuple[str, ...], device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.names = names
        self.device = device
        self.host = HostMemory(device, pins=policy.pin_memory and is_cuda)
        self.sent_bytes = self.returned_bytes = 0
        self._least_bytes = policy.least_bytes
        self._to_host = torch.cuda.Stream(device) if is_cuda else None
        self._to_device = torch.cuda.Stream(device) if is_cuda else None
        self._never_copied: frozenset[int] = frozenset()  # storages that are not copied: parameters
        self._checked: SavedTensors | None = None
        self._newest: _Call | None = None
        self._continues_forward = False  # whether the next call is in the same forward as the newest
        self._open: _Call | None = None
        self._by_storage: weakref.WeakValueDictionary[tuple[int, int], _SavedStorage] = weakref.WeakValueDictionary()

    def forward_begins(self, engine: Engine, entry: EntryPoint) -> None:  # noqa: ARG002
        """Record the storages of parameters, which are not offloaded."""
        permanent = [*(group.gathered for group in engine.groups), *ignored_of(engine).parameters.values()]
        self._never_copied = frozenset(map(torch_private.storage_identity, permanent))
        self._checked = engine.extras.find(SavedTensors)
        self._continues_forward = False

    # -- forward

    @property
    def is_open(self) -> bool:
        """Whether a call is under way."""
        return self._open is not None

    def begin(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Begin a call; returns the hooks under which it must run."""
        call = self._open = _Call(self._newest if self._continues_forward else None)
        self._continues_forward = True
        checked = self._checked
        # A tensor that is not copied passes through the hooks of SavedTensors, which ours would otherwise replace.
        inner = (checked.pack, checked.unpack) if checked is not None else (None, None)

        def pack(tensor: Tensor) -> Any:
            if self._is_copied(tensor):
                return _SavedTensor(self._saved_storage(tensor, call), call, tensor)
            return tensor if inner[0] is None else inner[0](tensor)

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, _SavedTensor):
                return saved.tensor()
            return saved if inner[1] is None else inner[1](saved)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def end(self) -> None:
        """End the call, and free on the device the storages that the call before it has saved."""
        call, self._open = self._open, None
        if call is None or not call.has_saved:
            return
        before, self._newest = self._newest, call
        if before is not None:
            for saved_storage in before.saved_storages:
                saved_storage.free_on_device()

    def _is_copied(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device != self.device:
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return False
        num_bytes = tensor.untyped_storage().nbytes()
        return num_bytes >= self._least_bytes and torch_private.storage_identity(tensor) not in self._never_copied

    def _saved_storage(self, tensor: Tensor, call: _Call) -> _SavedStorage:
        """Return the saved storage of a tensor's storage; the first call for a storage issues its copy to the host."""
        key = torch_private.storage_identity(tensor), tensor._version  # noqa: SLF001 - as autograd checks
        saved_storage = self._by_storage.get(key)
        if saved_storage is None or not saved_storage.is_on_device:  # after that, another storage may have this address
            saved_storage = self._by_storage[key] = _SavedStorage(self, tensor)
        call.add(saved_storage)  # a shared one is freed with those of its newest call
        return saved_storage

    # -- copies

    def copy_to_host(self, source: Tensor, target: Tensor, after: Any) -> Any:
        """Copy to the host. Returns the copy's event. ``after``: event of the last copy that used the host's memory."""
        self.sent_bytes += source.nbytes
        return self._copy(source, target, self._to_host, after)

    def copy_to_device(self, source: Tensor, target: Tensor, after: Any) -> Any:
        """Copy to the device. Returns the copy's event."""
        self.returned_bytes += source.nbytes
        return self._copy(source, target, self._to_device, after)

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

    def compute_stream(self) -> torch.cuda.Stream | None:
        """The compute stream; ``None`` on other devices than CUDA."""
        return None if self._to_host is None else torch.cuda.current_stream(self.device)


class _Call:
    """One call of an offloaded module, and the call before it. Saved tensors keep it alive.

    Attributes:
        has_saved: Whether the call has saved tensors.
    """

    def __init__(self, before: _Call | None) -> None:
        self._before = weakref.ref(before) if before is not None else None
        self._saved_storages: dict[int, weakref.ref[_SavedStorage]] = {}
        self._is_entered = False

    @property
    def has_saved(self) -> bool:
        return bool(self._saved_storages)

    @property
    def saved_storages(self) -> list[_SavedStorage]:
        """The storages that backward still needs, newest first, without those that a later call has saved too."""
        found = [saved for ref in reversed(self._saved_storages.values()) if (saved := ref()) is not None]
        return [saved for saved in found if saved.newest_call() is self]

    def add(self, saved_storage: _SavedStorage) -> None:
        self._saved_storages[id(saved_storage)] = weakref.ref(saved_storage)
        saved_storage.newest_call = weakref.ref(self)

    def enter(self) -> None:
        """Copy back the storages of this call, which backward has reached, and then those of the call before it."""
        if self._is_entered:
            return
        self._is_entered = True
        before = self._before() if self._before is not None else None
        for call in (self, before):
            for saved_storage in call.saved_storages if call is not None else ():
                saved_storage.copy_back()


class _SavedStorage:
    """One storage: on the device, on the host, or both. Saved tensors keep it alive.

    Attributes:
        is_on_device: Whether the storage that forward saved is still on the device.
        newest_call: Weak reference to the last call that has saved it.
    """

    def __init__(self, offload: ActivationOffload, tensor: Tensor) -> None:
        self._offload = offload
        self._on_device: Tensor | None = tensor.detach()  # shares the tensor's version counter
        self._version = tensor._version  # noqa: SLF001
        self._is_changed = False
        self._returned: Tensor | None = None
        self._stream = offload.compute_stream()
        self.newest_call: Any = lambda: None
        flat = _all_bytes(self._on_device)
        self._host, after = offload.host.acquire(flat.numel())
        self._event = self._host_event = offload.copy_to_host(flat, self._host, after)

    @property
    def is_on_device(self) -> bool:
        return self._on_device is not None

    def _wait(self) -> None:
        """Make the compute stream wait for the copy under way."""
        if self._event is not None:
            assert self._stream is not None
            self._stream.wait_event(self._event)
            self._event = None

    def free_on_device(self) -> None:
        """Free the storage on the device."""
        if self._on_device is not None:
            self._wait()
            self._is_changed = self._on_device._version != self._version  # noqa: SLF001
            self._on_device = None

    def copy_back(self) -> None:
        """Copy the storage back, unless it is on the device or the copy is under way."""
        if self._on_device is None and self._returned is None:
            self._stream = self._offload.compute_stream()
            self._returned = torch.empty_like(self._host, device=self._offload.device)
            self._event = self._host_event = self._offload.copy_to_device(self._host, self._returned, self._host_event)

    def storage(self) -> torch.UntypedStorage:
        """The storage on the device, as forward saved it."""
        if self._on_device is not None:
            self._is_changed = self._on_device._version != self._version  # noqa: SLF001
        if self._is_changed:
            raise StateError(
                "a tensor that backward needs was modified by an inplace operation after it had been saved, and"
                " offload_activations has copied it to the host meanwhile.\n"
                "  Compute out of place; without offload_activations torch names the operation."
            )
        if self._on_device is not None:
            return self._on_device.untyped_storage()
        self.copy_back()
        self._wait()
        assert self._returned is not None
        return self._returned.untyped_storage()

    def __del__(self, is_finalizing: Any = sys.is_finalizing) -> None:
        if not is_finalizing() and hasattr(self, "_host_event"):
            self._wait()  # the copy must end before the device's memory is freed
            self._offload.host.release(self._host, self._host_event)


class _SavedTensor:
    """The object that autograd stores in place of a saved tensor."""

    __slots__ = ("_call", "_dtype", "_offset", "_saved_storage", "_shape", "_stride")

    def __init__(self, saved_storage: _SavedStorage, call: _Call, tensor: Tensor) -> None:
        self._saved_storage, self._call = saved_storage, call
        self._dtype, self._offset = tensor.dtype, tensor.storage_offset()
        self._shape, self._stride = tensor.shape, tensor.stride()

    def tensor(self) -> Tensor:
        """Return the tensor on the device."""
        self._call.enter()
        storage = self._saved_storage.storage()
        with torch.no_grad():
            like = torch.empty(0, dtype=self._dtype, device=storage.device)
            return like.set_(storage, self._offset, self._shape, self._stride)


def _all_bytes(tensor: Tensor) -> Tensor:
    """Return a view of the full storage of a tensor as bytes."""
    storage = tensor.untyped_storage()
    with torch.no_grad():
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return flat.set_(storage, 0, (storage.nbytes(),), (1,))


class HostMemory:
    """Reusable buffers on the host; on meta in a dry run.

    Attributes:
        most_used_bytes: Maximum of bytes in use at once. At most as many bytes are kept unused.
    """

    def __init__(self, device: torch.device, *, pins: bool) -> None:
        self._device = device if device.type == "meta" else torch.device("cpu")
        self._pins = pins
        self._unused: list[tuple[Tensor, Any]] = []  # buffer and last event, oldest first
        self._used_bytes = self._unused_bytes = 0
        self.most_used_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers, used or not."""
        return self._used_bytes + self._unused_bytes

    def acquire(self, num_bytes: int) -> tuple[Tensor, Any]:
        """Return a buffer, and the event of the last copy that used its memory, which must be waited for."""
        self._used_bytes += num_bytes
        self.most_used_bytes = max(self.most_used_bytes, self._used_bytes)
        for place, (buffer, _) in enumerate(self._unused):
            if buffer.numel() == num_bytes:
                self._unused_bytes -= num_bytes
                return self._unused.pop(place)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device, pin_memory=self._pins), None

    def release(self, buffer: Tensor, event: Any) -> None:
        """Take a buffer back; frees the oldest unused ones above ``most_used_bytes``."""
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
            return self.original(*args, **kwargs)
        try:
            with offload.begin():
                return self.original(*args, **kwargs)
        finally:
            offload.end()
