"""Dtypes by short name, and mixed precision as plain data, without torch.

The short names (``fp32``, ``bf16``, ...) are what configuration files, plans, traces and checkpoint manifests use.
``comm.dtype`` maps them to ``torch.dtype`` on the floors that may import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.spec.errors import ConfigError, PlanError

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


@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    """In which dtypes a unit computes, reduces, and hands on.

    The master copy of a parameter, which the optimizer updates and which checkpoints hold, keeps the dtype that the
    parameter has when it is parallelized. Batch norm computes in its own dtype whatever the policy says.

    Attributes:
        param_dtype: What parameters are cast to for gathering and computing. ``None``: no cast. ``"auto"``: ``bf16``
            where the device (and on GPUs NCCL) supports it, else ``fp32``.
        reduce_dtype: Of the local gradient buffers, their sums over ranks, and what travels. ``None``: the master's.
        output_dtype: What floating-point outputs of the root are cast to. ``None``: no cast.
        buffer_dtype: What floating-point buffers are cast to, once. ``None``: no cast.
        cast_forward_inputs: Cast floating-point inputs of every unit to ``param_dtype``.
        master_dtype: ``None``: the parameter's own. ``"fp32"`` raises 16-bit parameters.
    """

    param_dtype: str | None = "bf16"
    reduce_dtype: str | None = "fp32"
    output_dtype: str | None = None
    buffer_dtype: str | None = None
    cast_forward_inputs: bool = True
    master_dtype: str | None = None

    def __post_init__(self) -> None:
        for field in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype", "master_dtype"):
            value = getattr(self, field)
            if value is None or (value == "auto" and field == "param_dtype"):
                continue
            try:
                name = dtype_name(str(value))
            except ConfigError:
                name = None
            if name not in FLOATING:
                raise PlanError(
                    f"PrecisionPolicy({field}={value!r}) is no floating-point dtype.\n"
                    f"  Use one of: {', '.join(FLOATING)}, or None."
                )
            object.__setattr__(self, field, name)

    def group_dtypes(self, dtype: str, *, keeps_own: bool) -> tuple[str, str, str]:
        """Dtypes of a group: master, compute, reduce.

        Args:
            dtype: The parameters' own.
            keeps_own: They are batch norm's, or not floating-point, and compute in their own dtype.
        """
        if dtype not in FLOATING:
            return dtype, dtype, dtype
        master = self.master_dtype if self.master_dtype and item_bytes(dtype) < item_bytes(self.master_dtype) else dtype
        compute = master if keeps_own or self.param_dtype is None else self.param_dtype
        return master, compute, master if keeps_own or self.reduce_dtype is None else self.reduce_dtype


#: No cast anywhere.
FULL_PRECISION = PrecisionPolicy(param_dtype=None, reduce_dtype=None)


def divisors(size: int, reduce_dtype: str) -> tuple[float, float]:
    """What a sum over ``size`` ranks is divided by before and after it; the product is ``size``.

    All of it afterwards, but in fp16, whose range ends at 65504: there the first divisor is the power of two next above
    the square root. Terms may then be ``size / before`` times closer to the end of the range than without, and lose no
    more than ``before`` at its beginning; a power of two rounds nothing in between.
    """
    if reduce_dtype != "fp16":
        return 1, size
    before = 1 << math.ceil(math.log2(size) / 2)
    return before, size / before
