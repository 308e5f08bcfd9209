"""Dtypes by short name, and mixed precision as plain data, without torch.

The short names (``fp32``, ``bf16``, ...) are what configuration files, plans, traces and checkpoint manifests use.
``comm.dtype`` maps them to ``torch.dtype`` on the floors that may import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

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
    parameter has when it is parallelized, unless ``master_dtype`` raises it (``shardwise train`` sets it for Hugging
    Face folders that store 16 bit). Batch norm computes in its own dtype whatever the policy says.

    Attributes:
        param_dtype: What parameters are cast to for gathering and computing. ``None``: no cast. ``"auto"``: ``bf16``
            where the device (and on GPUs NCCL) supports it, else ``fp32``.
        reduce_dtype: Of the local gradient buffers, their sums over ranks, and what travels. ``None``: the master's.
            Microbatches that a rank adds up before it sends (``accumulation="unsharded"``) are added in it too; means
            that have been reduced (``"sharded"``) are added in the master's dtype.
        output_dtype: What floating-point outputs of the root are cast to. ``None``: no cast.
        buffer_dtype: What floating-point buffers are cast to, once. State dicts and checkpoints hold them in the dtype
            that they had before. ``None``: no cast.
        cast_forward_inputs: Cast floating-point inputs of every unit to ``param_dtype``.
        master_dtype: ``None``: the parameter's own. ``"fp32"`` raises 16-bit parameters.
        overrides: Other policies for parts of the model, by qualified name of a module or a shell pattern (``*`` does
            not cross a dot). The part is the module with all below it, but for what a longer name in here says again.
            Its inputs are cast to its ``param_dtype`` and its outputs to its ``output_dtype``: inside a unit, give the
            dtype that goes on with them. ``PrecisionPolicy(overrides={"head": PrecisionPolicy(param_dtype="fp32")})``
    """

    param_dtype: str | None = "bf16"
    reduce_dtype: str | None = "fp32"
    output_dtype: str | None = None
    buffer_dtype: str | None = None
    cast_forward_inputs: bool = True
    master_dtype: str | None = None
    overrides: Mapping[str, PrecisionPolicy | Mapping[str, Any]] | tuple[tuple[str, PrecisionPolicy], ...] = ()

    def __post_init__(self) -> None:
        parts = self.overrides.items() if isinstance(self.overrides, Mapping) else self.overrides
        policies = tuple((str(name), PrecisionPolicy.parse(part, f"overrides[{name!r}]")) for name, part in parts)
        object.__setattr__(self, "overrides", policies)
        for name, part in policies:
            if part.overrides or not name:
                raise PlanError(
                    f"PrecisionPolicy(overrides=...): {name!r} has overrides of its own, or no name.\n"
                    "  Give every part of the model by its full name, side by side."
                )
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

    @property
    def parts(self) -> tuple[tuple[str, PrecisionPolicy], ...]:
        """``overrides`` as pairs, whatever they were given as."""
        assert isinstance(self.overrides, tuple)  # __post_init__ has replaced them
        return self.overrides

    @classmethod
    def parse(cls, value: object, name: str = "mp_policy") -> PrecisionPolicy:
        """A policy from a policy, or from the mapping of its fields that a configuration file writes.

        Raises:
            PlanError: It is neither, or a field is unknown or wrong. ``name`` says of what.
        """
        if isinstance(value, cls):
            return value
        known = tuple(field.name for field in fields(cls))
        if not isinstance(value, Mapping):
            raise PlanError(
                f"{name}={value!r}: expected a PrecisionPolicy or a mapping of its fields.\n"
                f"  Its fields are: {', '.join(known)}."
            )
        unknown = [str(key) for key in value if key not in known]
        if unknown:
            raise PlanError(f"{name} has no field {', '.join(unknown)}.\n  Its fields are: {', '.join(known)}.")
        return cls(**value)

    def as_dict(self) -> dict[str, Any]:
        """The fields that differ from the defaults, as a configuration file writes them."""
        held = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "overrides"}
        usual = {field.name: field.default for field in fields(self)}
        found = {name: value for name, value in held.items() if value != usual[name] or name == "param_dtype"}
        if self.parts:
            found["overrides"] = {name: part.as_dict() for name, part in self.parts}
        return found

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
