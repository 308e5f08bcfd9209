"""Tensors that claim to be on ``cuda`` but are in host memory.

``torch.Tensor`` is a Python class, so its properties and methods can be replaced, for all threads. For torch's C++ code
these are CPU tensors, so autograd, optimizers and kernels work with real values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise import torch_private
from shardwise.testing.streams.detector import Detector, memory_of, side_of
from shardwise.testing.streams.device import current_device
from shardwise.testing.streams.memory import Side
from shardwise.testing.streams.patches import Patches

_FACTORIES = (
    *("empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint", "randperm", "eye", "empty_strided"),
    *("linspace", "tril_indices", "triu_indices", "scalar_tensor"),
)
_FROM_DATA = ("tensor", "as_tensor")
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided")
#: Attribute of a tensor without memory (a wrapper subclass) that claims to be on ``cuda``.
_WRAPPER = "_shardwise_is_on_device"
_CPU = torch.device("cpu")

# torch's functions, before they are replaced.
_device: Any = Tensor.device
_to, _tolist, _numpy, _clone = Tensor.to, Tensor.tolist, Tensor.numpy, Tensor.clone
_storage_device: Any = torch.UntypedStorage.device
_resize: Any = torch.UntypedStorage.resize_


def install(patches: Patches, detector: Detector) -> None:
    """Replace methods of ``torch.Tensor`` and factories of tensors."""
    with torch.device("cpu"):
        torch.empty(0)  # makes torch collect the factories that a device context affects, before they are replaced
    _Methods(detector).install(patches)
    replaced = _replace_factories(patches, detector)
    torch_private.replace_in_device_contexts(patches.set, replaced)


def _is_device(device: Any) -> bool:
    return device is not None and (isinstance(device, int) or torch.device(device).type == "cuda")


class _Property(property):
    """A property with a ``__name__``, like torch's properties, because handlers of subclasses read it."""

    def __init__(self, name: str, get: Callable[[Any], Any]) -> None:
        super().__init__(get)
        self.__name__ = name


class _Methods:
    """Replacements of properties and methods of ``torch.Tensor`` and of storages."""

    def __init__(self, detector: Detector) -> None:
        self._detector = detector

    def install(self, patches: Patches) -> None:
        replaced = {
            "device": _Property("device", _device_of),
            "is_cuda": _Property("is_cuda", lambda tensor: _device_of(tensor).type == "cuda"),
            "is_cpu": _Property("is_cpu", lambda tensor: _device_of(tensor).type == "cpu"),
            "get_device": lambda tensor: _device_of(tensor).index if _device_of(tensor).type == "cuda" else -1,
            "is_pinned": lambda tensor, *_, **__: side_of(tensor) is Side.PINNED,
            "to": _method(self.to),
            "cuda": lambda tensor, device=None, non_blocking=False, **_: self.to(
                tensor, current_device(device), non_blocking=non_blocking
            ),
            "cpu": lambda tensor, **_: self.to(tensor, _CPU),
            "pin_memory": _method(self.pin_memory),
            "record_stream": _method(self.record_stream),
            "tolist": _method(self.tolist),
            "numpy": _method(self.numpy),
        }
        for name, value in replaced.items():
            patches.set(Tensor, name, value)
        patches.set(torch.UntypedStorage, "resize_", _method(self.resize_))
        patches.set(torch.UntypedStorage, "device", property(_device_of_storage))
        torch_private.replace_wrapper_factory(patches.set, _wrapper)

    def to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Replacement of ``tensor.to(...)``, in all of its forms."""
        target, args, kwargs = _target_of(args, kwargs)
        if target is None or target.type not in {"cpu", "cuda"} or _device.__get__(tensor).type != "cpu":
            return _to(tensor, *((target,) if target is not None else ()), *args, **kwargs)
        if target.type == _device_of(tensor).type:
            return _to(tensor, *args, **kwargs) if args or kwargs else tensor
        dtype, non_blocking, kwargs = _options_of(args, kwargs, tensor.dtype)
        side = Side.DEVICE if target.type == "cuda" else Side.PINNED if non_blocking else Side.HOST
        with self._detector.placing_new_tensors(side, non_blocking=non_blocking):
            moved = _to(tensor, dtype, copy=True, **kwargs)
        if memory_of(moved) is None and not moved.is_meta:  # this thread's operators are not observed
            self._detector.make(moved.untyped_storage(), side)
        return moved

    def pin_memory(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        """A copy in page-locked memory."""
        if memory_of(tensor) is not None:
            self._detector.on_host("pin_memory", [tensor], [])
        with self._detector.unobserved():
            pinned = _clone(tensor)
        self._detector.make(pinned.untyped_storage(), Side.PINNED)
        return pinned

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """Note that the allocator also waits for this stream before it reuses the memory."""
        memory = memory_of(tensor)
        if memory is not None:
            memory.recorded.add(stream.agent)

    def tolist(self, tensor: Tensor) -> Any:
        """The values, for which the host waits."""
        self._read("tolist", tensor)
        with self._detector.unobserved():
            return _tolist(tensor)

    def numpy(self, tensor: Tensor, **kwargs: Any) -> Any:
        """The memory as an array; only for host tensors."""
        if _device_of(tensor).type == "cuda":
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        self._read("numpy", tensor)
        return _numpy(tensor, **kwargs)

    def _read(self, name: str, tensor: Tensor) -> None:
        if self._detector.local.num_unobserved or memory_of(tensor) is None:
            return
        if side_of(tensor) is Side.DEVICE:
            self._detector.launch(name, [tensor], [])
            self._detector.host_waits(name)
        else:
            self._detector.on_host(name, [tensor], [])

    def resize_(self, storage: Any, num_bytes: int) -> Any:
        """Resize a storage, which frees or allocates its memory."""
        memory = storage.__dict__.get("_shardwise_memory")
        if memory is not None and memory.side is Side.DEVICE:
            self._detector.resize(memory, num_bytes)
        return _resize(storage, num_bytes)


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a bound method in a plain function, which becomes a method when it is set on a class."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return method


def _device_of(tensor: Tensor) -> torch.device:
    found: torch.device = _device.__get__(tensor)
    if found.type != "cpu":
        return found
    memory = memory_of(tensor)
    if memory is None:
        return current_device() if tensor.__dict__.get(_WRAPPER) else found
    return current_device() if memory.side is Side.DEVICE else found


def _device_of_storage(storage: Any) -> torch.device:
    memory = storage.__dict__.get("_shardwise_memory")
    is_on_device = memory is not None and memory.side is Side.DEVICE
    return current_device() if is_on_device else _storage_device.__get__(storage)


def _target_of(args: Any, kwargs: Any) -> tuple[torch.device | None, Any, Any]:
    """The device that ``to(*args, **kwargs)`` names, and the other arguments."""
    kwargs = dict(kwargs)
    target = kwargs.pop("device", None)
    if "other" in kwargs:
        args = (kwargs.pop("other"), *args)
    if args and isinstance(args[0], Tensor):
        target, args = args[0].device, (args[0].dtype, *args[1:])
    elif args and args[0] is None:
        args = args[1:]
    elif args and isinstance(args[0], (torch.device, str, int)) and not isinstance(args[0], bool):
        target, args = args[0], args[1:]
    if target is None:
        return None, args, kwargs
    return torch.device("cuda", target) if isinstance(target, int) else torch.device(target), args, kwargs


def _options_of(args: Any, kwargs: Any, dtype: torch.dtype) -> tuple[torch.dtype, bool, Any]:
    """The dtype, whether the copy is non-blocking, and the other options of ``to``."""
    options = dict(kwargs)
    given = list(args)
    if given and not isinstance(given[0], bool):
        dtype = given.pop(0) or dtype
    dtype = options.pop("dtype", None) or dtype
    non_blocking = bool(options.pop("non_blocking", given.pop(0) if given else False))
    options.pop("copy", None)
    return dtype, non_blocking, options


def _wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a factory of tensors without memory, so that they may claim to be on the device."""

    def make(*args: Any, **kwargs: Any) -> Any:
        is_on_device = _is_device(kwargs.get("device"))
        if is_on_device:
            kwargs["device"] = _CPU
        made = original(*args, **kwargs)
        if is_on_device:
            setattr(made, _WRAPPER, True)
        return made

    return make


# -- factories


def _replace_factories(patches: Patches, detector: Detector) -> dict[Any, Any]:
    """Replace the factories, and return replacements by original, except for factories that take a tensor."""
    replaced: dict[Any, Any] = {}
    for name in _FACTORIES:
        original = getattr(torch, name)
        replaced[original] = _factory(detector, original)
        patches.set(torch, name, replaced[original])
    for name in _FROM_DATA:
        original = getattr(torch, name)
        replaced[original] = _from_data(detector, original)
        patches.set(torch, name, replaced[original])
    for owner, names in ((torch, _LIKE), (Tensor, _NEW)):
        for name in names:
            patches.set(owner, name, _factory_like(detector, getattr(owner, name)))
    return replaced


def _side_of_options(kwargs: dict[str, Any]) -> Side | None:
    """The side of the tensor that a factory with these options makes; changes the options to those of a CPU tensor."""
    is_pinned = bool(kwargs.pop("pin_memory", False))
    if _is_device(kwargs.get("device")):
        kwargs["device"] = _CPU
        return Side.DEVICE
    return Side.PINNED if is_pinned else None


def _make(detector: Detector, side: Side, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with detector.placing_new_tensors(side):
        made = original(*args, **kwargs)
    if isinstance(made, Tensor) and not made.is_meta and memory_of(made) is None:
        detector.make(made.untyped_storage(), side)
    return made


def _factory(detector: Detector, original: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        side = _side_of_options(kwargs)
        if side is not None:
            return _make(detector, side, original, *args, **kwargs)
        made = original(*args, **kwargs)
        is_on_host = isinstance(made, Tensor) and _device.__get__(made).type == "cpu"
        if is_on_host and not detector.local.num_unobserved and memory_of(made) is None:
            detector.make(made.untyped_storage(), Side.HOST)
        return made

    return make


def _from_data(detector: Detector, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a factory that copies numbers from pageable memory, for which the host waits."""

    def make(data: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data, Tensor) and _is_device(kwargs.get("device")):
            return data.to(kwargs["device"], dtype=kwargs.get("dtype"))
        side = _side_of_options(kwargs)
        if side is None:
            return original(data, *args, **kwargs)
        with detector.unobserved():
            made = original(data, *args, **kwargs)
        detector.make(made.untyped_storage(), side)
        if side is Side.DEVICE:
            detector.launch("a tensor of numbers", [], [made])
            detector.host_waits("a tensor of numbers, from pageable host memory")
        return made

    return make


def _factory_like(detector: Detector, original: Callable[..., Any]) -> Callable[..., Any]:
    def make(like: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("device")
        side = _side_of_options(kwargs)
        if side is None and given is None:
            side = Side.DEVICE if _device_of(like).type == "cuda" and type(like) is not torch.Size else None
        if side is None and side_of(like) is Side.DEVICE:  # a host tensor with the shape of a device tensor
            with detector.unobserved():
                return original(like, *args, **kwargs)
        if side is None:
            return original(like, *args, **kwargs)
        return _make(detector, side, original, like, *args, **kwargs)

    return make
