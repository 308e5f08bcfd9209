"""Conversion of short dtype names (``spec.precision``) to ``torch.dtype`` and back; flat views in memory order."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.spec.extent import Extent, shared
from shardwise.spec.precision import dtype_name as _short_name

_BY_NAME: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}
_BY_DTYPE = {dtype: name for name, dtype in _BY_NAME.items()}


def torch_dtype(name: str) -> torch.dtype:
    """The ``torch.dtype`` of a short or long dtype name."""
    return _BY_NAME[_short_name(name)]


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a ``torch.dtype``."""
    return _BY_DTYPE.get(dtype) or _short_name(str(dtype))


def memory_order(tensor: Tensor) -> Tensor:
    """Return a flat view of a dense tensor, in the order of its memory."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as a view of real and imaginary parts, (..., 2); any other tensor as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def copy_shared(source: Extent, content: Tensor, target: Extent, into: Tensor) -> None:
    """Copy the elements that two extents of one tensor share, between the flat tensors that store the extents."""
    for block in shared(source, target):
        there = content.as_strided(block.shape, block.source_stride, content.storage_offset() + block.source)
        into.as_strided(block.shape, block.target_stride, into.storage_offset() + block.target).copy_(there)
