"""The state of a user's sampler or schedule as what JSON holds, and back."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import torch

from shardwise.spec.errors import ConfigError

#: Marks what JSON does not hold by itself: mappings with keys that are no text, infinity, and bytes of a generator.
_PAIRS, _FLOAT, _BYTES = "pairs of a mapping", "float", "bytes of a tensor"
#: Bytes of a tensor at most; the state of a generator of torch has about 5,000.
_MOST_BYTES = 1 << 16


def as_json(value: Any, what: str) -> Any:
    """``value`` with lists for tuples, and numbers as keys (``MultiStepLR``) and infinity in words.

    A tensor of bytes of one dimension is the state of a generator, by which loaders shuffle.

    Raises:
        ConfigError: It holds another tensor, or another object.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if isinstance(value, list | tuple):
        return [as_json(each, what) for each in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: as_json(each, what) for key, each in value.items()}
        return {_PAIRS: [[as_json(key, what), as_json(each, what)] for key, each in value.items()]}
    if isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and _is_short(value):
        return {_BYTES: base64.b64encode(value.numpy(force=True).tobytes()).decode()}
    raise ConfigError(
        f"sw.Run({what}=...): its state_dict() holds a {type(value).__name__}, and checkpoints hold numbers, texts,"
        " lists and mappings beside tensors.\n  Wrap it: return plain values from state_dict()."
    )


def _is_short(value: torch.Tensor) -> bool:
    return value.dim() == 1 and 0 < value.numel() <= _MOST_BYTES


def from_json(value: Any) -> Any:
    """What :func:`as_json` was given, but for tuples, which are lists."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if isinstance(value, dict):
        if value.keys() == {_PAIRS}:
            return {from_json(key): from_json(each) for key, each in value[_PAIRS]}
        if value.keys() == {_FLOAT}:
            return float(value[_FLOAT])
        if value.keys() == {_BYTES}:
            return torch.frombuffer(bytearray(base64.b64decode(value[_BYTES])), dtype=torch.uint8)
        return {key: from_json(each) for key, each in value.items()}
    return value
