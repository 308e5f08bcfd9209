"""Dtypes by short name, without torch.

The short names (``fp32``, ``bf16``, ...) are what configuration files, plans, traces and checkpoint manifests use.
``comm.dtype`` maps them to ``torch.dtype`` on the floors that may import torch.
"""

from __future__ import annotations

import math

from shardwise.spec.errors import ConfigError

#: Bytes of one element, by short dtype name.
ITEM_BYTES: dict[str, int] = {
    "fp64": 8,
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}

_ALIASES = {
    "float64": "fp64",
    "double": "fp64",
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}


def dtype_name(name: str) -> str:
    """The short name of a dtype given in any common spelling (``torch.float32``, ``float32``, ``fp32``).

    Raises:
        ConfigError: The name is not a known dtype.
    """
    plain = name.removeprefix("torch.").lower()
    plain = _ALIASES.get(plain, plain)
    if plain not in ITEM_BYTES:
        raise ConfigError(f"unknown dtype {name!r}.\n  Use one of: {', '.join(ITEM_BYTES)}.")
    return plain


def item_bytes(name: str) -> int:
    """Bytes of one element of dtype ``name`` (any spelling that :func:`dtype_name` takes)."""
    return ITEM_BYTES[dtype_name(name)]


#: Dtypes that parameters may compute and gradients may be reduced in.
FLOATING = ("fp64", "fp32", "bf16", "fp16")


def divisors(size: int, reduce_dtype: str) -> tuple[float, float]:
    """The divisors of a sum over ``size`` ranks, before and after it; their product is ``size``.

    All of it afterwards, but in fp16, whose range ends at 65504: there the first divisor is the power of two next above
    the square root. Terms may then be ``size / before`` times closer to the end of the range than without, and lose no
    more than ``before`` at its beginning; a power of two rounds nothing in between.
    """
    if reduce_dtype != "fp16":
        return 1, size
    before = 1 << math.ceil(math.log2(size) / 2)
    return before, size / before
