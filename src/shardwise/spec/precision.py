"""Dtypes by short name, without torch.

Configuration files, plans, traces and checkpoint manifests use the short names (``fp32``, ``bf16``, ...).
``comm.dtype`` maps them to ``torch.dtype`` for packages that may import torch.
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
    """Bytes of one element of dtype ``name``, in any spelling that :func:`dtype_name` accepts."""
    return ITEM_BYTES[dtype_name(name)]


#: Dtypes that parameters may compute and gradients may be reduced in.
FLOATING = ("fp64", "fp32", "bf16", "fp16")


def divisors(size: int, reduce_dtype: str) -> tuple[float, float]:
    """The divisors of a sum over ``size`` ranks, applied before and after it; their product is ``size``.

    Sums are divided afterwards only, except in fp16, whose largest number is 65504. There each term is divided by a
    power of two, at least the square root of ``size``, which makes overflow of the sum less likely; the rest of the
    division follows the sum. Division by a power of two rounds only numbers near the smallest ones of fp16.
    """
    if reduce_dtype != "fp16":
        return 1, size
    before = 1 << math.ceil(math.log2(size) / 2)
    return before, size / before
