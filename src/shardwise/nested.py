"""Tensors in nested containers: sequences, mappings, data classes."""

from __future__ import annotations

import contextlib
import copy as copying
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(value: object, levels: int = 16) -> Iterator[Tensor]:
    """Yield every tensor in a value, up to ``levels`` deep, because a container may contain itself."""
    if isinstance(value, Tensor):
        yield value
        return
    for part in (parts_of(value) or ()) if levels else ():
        yield from tensors_in(part, levels - 1)


def parts_of(value: object) -> Iterable[object] | None:
    """The parts of a container; ``None`` for anything else."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (tuple, list, set)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [each for _, each in _fields_of(value)]
    return None


def _fields_of(value: Any) -> Iterator[tuple[dataclasses.Field[Any], object]]:
    """Yield the fields of a data class instance with values, without properties that may raise (transformers)."""
    attributes = getattr(value, "__dict__", {})
    for field in dataclasses.fields(value):
        yield field, attributes[field.name] if field.name in attributes else getattr(value, field.name, None)


def replace_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Replace every tensor in nested containers by ``change(tensor)``; returns ``value`` itself if none is changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return _replace_in_sequence(value, change)
    if isinstance(value, Mapping):
        return _replace_in_mapping(value, change)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = _changed({field.name: each for field, each in _fields_of(value) if field.init}, change)
        return dataclasses.replace(value, **changed) if changed else value
    return value


def _replace_in_sequence(value: tuple[Any, ...] | list[Any], change: Callable[[Tensor], Tensor]) -> Any:
    items = [replace_tensors(item, change) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _replace_in_mapping(value: Mapping[str, Any], change: Callable[[Tensor], Tensor]) -> Any:
    changed = _changed(value, change)
    if not changed:
        return value
    copy: Any = copying.copy(value)  # transformers' ModelOutput sets attributes when items are set
    for key, item in changed.items():
        copy[key] = item
    return copy


def _changed(value: Mapping[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {key: new for key, item in value.items() if (new := replace_tensors(item, change)) is not item}


_Cached = type(functools.cache(replace_tensors))


@contextlib.contextmanager
def forgets_meta() -> Iterator[None]:
    """At the end of the block clear caches of ``functools`` with meta tensors, which code would later use as values."""
    try:
        yield
    finally:
        for each in gc.get_objects():
            if type(each) is _Cached and any(tensor.is_meta for tensor in tensors_in(gc.get_referents(each), 4)):
                each.cache_clear()
