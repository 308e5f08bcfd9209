"""Converts state to plain JSON and back, strictly: texts that parsers may interpret differently are refused.

``pack`` converts tuples, bytes, tensors, non-finite floats and dicts with other keys than strings to tagged objects,
and ``unpack`` converts them back. Only plain values are allowed: files contain no class names, and none is looked up.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import math
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.dtype import dtype_name, torch_dtype
from shardwise.spec.text import size

#: Maximum nesting of lists and objects that is written or read.
MAX_DEPTH = 64
_MAX_INT_BITS = 4096
#: Maximum bytes of a tensor, enough for states of random number generators.
_MAX_TENSOR_BYTES = 16 * 2**20
_TUPLE, _BYTES, _FLOAT, _PAIRS, _TENSOR = "__tuple__", "__bytes__", "__float__", "__pairs__", "__tensor__"
_TAGS = frozenset({_TUPLE, _BYTES, _FLOAT, _PAIRS, _TENSOR})
_CONTAINERS = frozenset({list, dict})


def pack(value: Any, where: str = "data", *, depth: int = 0) -> Any:
    """Convert ``value`` to something that JSON can represent without loss.

    Args:
        value: ``None``, bool, int, float, str, bytes, small tensors, and lists, tuples and dicts of these.
        where: Place of the value, for messages.
        depth: Nesting depth of ``value`` itself.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"{where} is nested deeper than {MAX_DEPTH} levels")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return _pack_number(value, where)
    if isinstance(value, bytes | bytearray | Tensor):
        return _pack_bytes(value, where)
    if isinstance(value, list | tuple):
        inner = depth + (2 if isinstance(value, tuple) else 1)
        items = [pack(item, f"{where}[{i}]", depth=inner) for i, item in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        return {_PAIRS: pack([list(item) for item in value.items()], where, depth=depth)}
    if isinstance(value, dict):
        return {_key(key, where): pack(item, f"{where}.{key}", depth=depth + 1) for key, item in value.items()}
    raise ValueError(
        f"{where} is a {type(value).__name__}; only None, bool, int, float, str, bytes, tensor, list, tuple and dict"
        " are kept"
    )


def _pack_number(value: float, where: str) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if value.bit_length() > _MAX_INT_BITS:
        raise ValueError(f"{where} is an integer of {value.bit_length()} bits, more than {_MAX_INT_BITS}")
    return int(value)


def _pack_bytes(value: bytes | bytearray | Tensor, where: str) -> Any:
    if not isinstance(value, Tensor):
        return {_BYTES: base64.b64encode(value).decode("ascii")}
    if value.nbytes > _MAX_TENSOR_BYTES:
        raise ValueError(f"{where} is a tensor of {size(value.nbytes)}; at most {size(_MAX_TENSOR_BYTES)} are kept")
    flat = value.detach().cpu().contiguous().view(-1)
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return {_TENSOR: [dtype_name(value.dtype), list(value.shape), base64.b64encode(raw).decode("ascii")]}


def _key(key: str, where: str) -> str:
    if key in _TAGS:
        raise ValueError(f"{where} has the key {key!r}, which is reserved")
    return key


def unpack(value: Any) -> Any:
    """The inverse of :func:`pack`."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    tags = _TAGS & value.keys()
    if not tags:
        return {key: unpack(item) for key, item in value.items()}
    tag = next(iter(tags))
    if len(value) == 1:
        with contextlib.suppress(TypeError, ValueError, KeyError, RuntimeError):
            return _untagged(tag, value[tag])
    raise ValueError(f"an object with the key {tag!r} is malformed")


def _untagged(tag: str, content: Any) -> Any:
    if tag == _BYTES:
        return base64.b64decode(content, validate=True)
    if tag == _FLOAT and content in {"nan", "inf", "-inf"}:
        return float(content)
    if tag == _TENSOR:
        dtype, shape, text = content
        raw = bytearray(base64.b64decode(text, validate=True))
        flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        return flat.view(torch_dtype(dtype)).view(shape)
    if tag != _FLOAT and isinstance(content, list):
        return tuple(unpack(content)) if tag == _TUPLE else dict(unpack(content))
    raise ValueError(tag)


def dumps(value: Any) -> bytes:
    """Canonical JSON: ASCII, sorted keys, no spaces, no NaN. Equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def loads(raw: bytes, *, max_items: int) -> Any:
    """Parse JSON from an untrusted source.

    Args:
        raw: The text; the caller has limited its size.
        max_items: Maximum number of values. Counted before parsing, so that a small file cannot fill the memory. A dict
            needs as much memory as several numbers, so dicts may be an eighth and lists a quarter of it.
    """
    for byte, most in ((b",", max_items), (b"[", max_items // 4), (b"{", max_items // 8)):
        if raw.count(byte) > most:
            raise ValueError(f"it has more than {most} times {byte.decode()!r}")
    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_finite
        )
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    level = [value] if type(value) in _CONTAINERS else []
    for _ in range(MAX_DEPTH + 4):  # data is a few levels below the top of a manifest
        objects = [outer.values() for outer in level if type(outer) is dict]
        inner = itertools.chain.from_iterable([*objects, *(outer for outer in level if type(outer) is list)])
        if _CONTAINERS.isdisjoint(map(type, inner)):  # fast, because most of a manifest is lists of numbers
            return value
        level = [inner for outer in level for inner in _containers(outer)]
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


def _containers(outer: Any) -> list[Any]:
    """Return the lists and objects in a list or object; fast for a long list of numbers."""
    inside = outer.values() if type(outer) is dict else outer
    if _CONTAINERS.isdisjoint(map(type, inside)):
        return []
    return [inner for inner in inside if type(inner) in _CONTAINERS]


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the key {twice[:80]!r} occurs twice in one object")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is out of range")
    return number
