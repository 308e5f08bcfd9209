"""Shapes of results on ``meta``, computed only once for repeated operations."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.torch_private import storage_identity

#: A part of a result: a tensor's shape, stride and dtype, or a value that is not a tensor.
_Part = tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | int | float | bool | None
#: A result: its parts, and whether it is one tensor instead of a tuple. ``None``: must be computed each time.
_Result = tuple[tuple[_Part, ...], bool] | None

_known: dict[Hashable, _Result] = {}
_MOST_KNOWN = 100_000
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class KnownShapes(TorchDispatchMode):
    """Computes the shapes of an operation's results on ``meta`` once for arguments of the same shapes.

    torch computes most shapes in Python, which takes up to a millisecond. Nearly all operations of a dry run repeat
    earlier ones, because the blocks of a model are alike. Operations that write to an argument, return a view or an
    argument, or have arguments other than plain ``meta`` tensors are always run by torch.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        key = _key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        if key not in _known:
            result = func(*args, **kwargs)
            if len(_known) >= _MOST_KNOWN:
                _known.clear()
            _known[key] = _described(result, [*args, *kwargs.values()])
            return result
        known = _known[key]
        if known is None:
            return func(*args, **kwargs)
        parts, is_alone = known
        made = tuple(_made(part) for part in parts)
        return made[0] if is_alone else made


def _made(part: _Part) -> Any:
    if not isinstance(part, tuple):
        return part
    shape, stride, dtype = part
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _key(func: Any, args: Any, kwargs: Any) -> Hashable | None:
    """A key of the operation and of everything that determines its results' shapes; ``None``: do not remember them."""
    if not _makes_new_tensors(func):
        return None
    found: list[Hashable] = [func, torch.get_default_dtype(), *kwargs]
    try:
        num_tensors = _add(found, [*args, *kwargs.values()])
    except TypeError:
        return None
    return tuple(found) if num_tensors else None


@functools.cache
def _makes_new_tensors(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    # The result of a user's operator may depend on more than its arguments.
    is_torch_s = getattr(func, "namespace", None) in {"aten", "prims"}
    return (
        is_torch_s
        and schema is not None
        and not (schema.is_mutable or any(each.alias_info is not None for each in schema.returns))
    )


def _add(found: list[Hashable], value: Any) -> int:
    """Add the properties of ``value`` that determine results to ``found``, and return its number of tensors."""
    if isinstance(value, Tensor):
        if not (type(value) in {Tensor, nn.Parameter} and value.is_meta and value.layout is torch.strided):
            raise TypeError
        if value.is_conj() or value.is_neg():
            raise TypeError
        found += (value.shape, value.stride(), value.dtype)
        return 1
    if isinstance(value, (tuple, list)):
        found.append(len(value))
        return sum([_add(found, each) for each in value])
    if type(value) not in _PLAIN:
        raise TypeError
    found += (type(value), value)
    return 0


def _described(result: Any, arguments: list[Any]) -> _Result:
    is_alone = isinstance(result, Tensor)
    parts = (result,) if is_alone else result
    if not isinstance(parts, tuple):
        return None
    seen = {storage_identity(each) for each in tensors_in(arguments)}
    described: list[_Part] = []
    for part in parts:
        if not isinstance(part, Tensor):
            if type(part) not in {bool, int, float, type(None)}:
                return None
            described.append(part)
            continue
        identity = storage_identity(part)
        if type(part) is not Tensor or not part.is_meta or part.layout is not torch.strided or identity in seen:
            return None
        seen.add(identity)
        shape, stride = tuple(part.shape), part.stride()
        like = torch.empty_strided(shape, stride, dtype=part.dtype, device="meta")
        if part.is_conj() or part.is_neg() or part.untyped_storage().nbytes() != like.untyped_storage().nbytes():
            return None
        described.append((shape, stride, part.dtype))
    return tuple(described), is_alone


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among the arguments of an operator, lists included."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += tensors_in(value)
    return found
