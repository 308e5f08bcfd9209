"""Equality to the last bit, and how far from it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Integers as wide as an element.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether shapes, dtypes and all bits are the same: -0.0 is not 0.0 here, and a NaN is itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(_INTEGERS[tensor.itemsize])


def worst(*values: float) -> float:
    """The largest; infinite where one is not a number, which ``max`` passes over."""
    return max(math.inf if math.isnan(value) else value for value in values)
