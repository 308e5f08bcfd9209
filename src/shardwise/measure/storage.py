"""Bytes of tensors' storages: counted during a run, and those of an engine, by category."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shardwise import torch_private
from shardwise.engine.engine import Engine
from shardwise.engine.extensions.activation_offload import ActivationOffload
from shardwise.engine.storage.flat_parameters import group_of
from shardwise.engine.storage.host import Transfers
from shardwise.engine.storage.ignored import ignored_of
from shardwise.engine.storage.packed import packed_pool


class StorageCount(TorchDispatchMode):
    """Counts the bytes of live tensors inside a ``with`` block, and their peak.

    A dispatch mode sees every operation. Each storage is counted once, from the first operation that uses it until it
    is freed, and with its new size if it is resized in place::

        count = StorageCount("cpu")
        count.see_all_objects()  # counts existing tensors; else only those that the block uses are counted
        before = count.live_bytes
        with count:
            model(x).sum().backward()
        print(count.live_bytes - before, count.peak_bytes - before)
        count.forget()

    Memory that is allocated below torch's dispatcher is not counted. Operations take about 1.5 times as long.

    Args:
        device_type: Device type of the tensors that are counted.
        sees_arguments: Also count the arguments of operations. Not needed after :meth:`see_all_objects`, because all
            later tensors are results of operations.

    Attributes:
        live_bytes: Bytes of live storages.
        peak_bytes: Peak of ``live_bytes`` since the beginning or the last :meth:`begin_peak`.
        history: If set to a list, receives ``time.perf_counter`` and ``live_bytes`` after every change.
        owner: If set, returns the owner's name for each storage that is first seen inside the block.
        peak_by_owner: Bytes of owned storages at the peak, by owner.
    """

    def __init__(self, device_type: str, *, sees_arguments: bool = True) -> None:
        super().__init__()
        self._sees_arguments = sees_arguments
        self.device_type = device_type
        self.live_bytes = 0
        self.peak_bytes = 0
        self.history: list[tuple[float, int]] | None = None
        self.owner: Callable[[], str] | None = None
        self.peak_by_owner: dict[str, int] = {}
        self._by_owner: dict[str, int] = {}
        self._owners: dict[int, str] = {}
        self._sizes: dict[int, int] = {}
        self._watches: dict[int, weakref.finalize] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tree in (args, result) if self._sees_arguments else (result,):
            for value in tree_iter(tree):
                if isinstance(value, torch.Tensor):
                    self.see(value)
        return result

    def __enter__(self) -> Self:
        """Begin to count."""
        self._resize = resize = torch.UntypedStorage.resize_  # it does not pass through the dispatcher

        def resize_and_see(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage.device.type == self.device_type:
                self._note(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_see  # pyrefly: ignore[bad-assignment]
        return super().__enter__()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        """Stop counting."""
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(exc_type, exc_val, exc_tb)

    def see_all_objects(self) -> None:
        """Count all existing tensors that Python's garbage collector knows."""
        for each in gc.get_objects():
            if issubclass(type(each), torch.Tensor):  # isinstance would evaluate lazy proxies
                self.see(each)

    def see(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor`` once."""
        if tensor.device.type != self.device_type:
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # sparse tensors, for example, have no storage
        self._note(storage)

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()  # noqa: SLF001 - the storage's identity; it has no public name
        known = self._sizes.get(key)
        if known is None:
            self._watches[key] = weakref.finalize(storage, self._freed, key)
            if self.owner is not None:
                self._owners[key] = self.owner()
        if known != size:
            self._sizes[key] = size
            self._change(key, size - (known or 0))
            if self.live_bytes > self.peak_bytes:
                self.peak_bytes, self.peak_by_owner = self.live_bytes, dict(self._by_owner)
            self._mark()

    def _change(self, key: int, num_bytes: int) -> None:
        self.live_bytes += num_bytes
        owner = self._owners.get(key)
        if owner is not None:
            self._by_owner[owner] = self._by_owner.get(owner, 0) + num_bytes

    def _mark(self) -> None:
        if self.history is not None:
            self.history.append((time.perf_counter(), self.live_bytes))

    def begin_peak(self) -> None:
        """Restart the measurement of the peak."""
        self.peak_bytes = self.live_bytes

    def forget(self) -> None:
        """Stop watching storages."""
        for watch in self._watches.values():
            watch.detach()
        self._watches.clear()
        self._sizes.clear()
        self._owners.clear()

    def _freed(self, key: int) -> None:
        self._watches.pop(key, None)
        self._change(key, -self._sizes.pop(key, 0))
        self._owners.pop(key, None)
        self._mark()


def buffer_bytes(model: nn.Module, device_type: str | None = None) -> int:
    """Count the bytes of the distinct storages of the model's buffers, such as tables; ``None``: on any device."""
    return storage_bytes(buffer for buffer in model.buffers() if device_type in {None, buffer.device.type})


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Count the bytes of the tensors' distinct storages."""
    there = [tensor for tensor in tensors if tensor is not None]
    return sum({torch_private.storage_identity(each): each.untyped_storage().nbytes() for each in there}.values())


def held_bytes(engine: Engine, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, int]:
    """Count the bytes of this rank's distinct storages, by category; ``spec.memory.footprint`` predicts them.

    Returns:
        ``parameters`` (masters and replicas), ``gradients`` (``.grad`` and sums that wait for their reduction),
        ``optimizer`` (state of ``optimizers``), ``gathered`` (buffers of gathered units), ``reduce`` (buffers in which
        gradients are collected and received) and ``host`` (offloaded parameters, gradients, optimizer state and
        activations).
    """
    seen: set[int] = set()

    def take(tensors: Iterable[Tensor | None]) -> int:
        total = 0
        for tensor in tensors:
            if tensor is None:
                continue
            identity = torch_private.storage_identity(tensor)
            if identity not in seen:
                seen.add(identity)
                total += tensor.untyped_storage().nbytes()
        return total

    groups, ignored = list(engine.groups), ignored_of(engine).parameters.values()
    offloaded = [group for group in groups if group.facts.is_offloaded]
    state: dict[bool, list[Tensor]] = {True: [], False: []}  # by whether the parameter is offloaded
    for parameter, values in (item for optimizer in optimizers for item in optimizer.state.items()):
        owner = group_of(parameter)
        is_offloaded = owner is not None and owner.facts.is_offloaded
        for value in values.values():
            if isinstance(value, Tensor):
                state[is_offloaded] += (torch_private.wrapped_tensors(value) or {"": value}).values()
    transfers = engine.extras.find(Transfers)
    staging = transfers.staging_buffers if transfers is not None else ()
    buffers = [buffer for group in groups for buffer in group.form.buffers()]

    def of(category: str) -> list[Tensor]:
        return [tensor for other, tensor in buffers if other == category]

    activations = engine.extras.find(ActivationOffload)
    host = take([*state[True], *(t for g in offloaded for t in (g.master, g.gradient.storage.tensor)), *of("host")])
    return {
        "parameters": take([*(t for group in groups for t in (group.master, group.replica)), *of("parameters")])
        + take(ignored),
        "gradients": take(tensor for group in groups for tensor in group.gradient.buffers)
        + take(parameter.grad for parameter in ignored),
        "optimizer": take(state[False]),
        "gathered": take([*(group.gathered for group in groups if group.resident_buffer is None), *staging])
        + take(of("gathered"))
        + packed_pool(engine, "gather").total_bytes,
        "reduce": take(group.gradient.scratch for group in groups)
        + packed_pool(engine, "reduce").total_bytes
        + sum(comm.held_bytes for comm in engine.comms),
        "host": host + (activations.host.num_bytes if activations is not None else 0),
    }
