"""The state of a user's sampler or schedule as what JSON holds, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shardwise.spec.errors import ConfigError

#: Marks what JSON does not hold by itself: mappings with keys that are no text, and infinity.
_PAIRS, _FLOAT = "pairs of a mapping", "float"


def as_json(value: Any, what: str) -> Any:
    """``value`` with lists for tuples, and numbers as keys (``MultiStepLR``) and infinity in words.

    Raises:
        ConfigError: It holds a tensor, or another object.
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
    raise ConfigError(
        f"sw.Run({what}=...): its state_dict() holds a {type(value).__name__}, and checkpoints hold numbers, texts,"
        " lists and mappings beside tensors.\n  Wrap it: return plain values from state_dict()."
    )


def from_json(value: Any) -> Any:
    """What :func:`as_json` was given, but for tuples, which are lists."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if isinstance(value, dict):
        if value.keys() == {_PAIRS}:
            return {from_json(key): from_json(each) for key, each in value[_PAIRS]}
        if value.keys() == {_FLOAT}:
            return float(value[_FLOAT])
        return {key: from_json(each) for key, each in value.items()}
    return value
