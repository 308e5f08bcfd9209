"""Tensors as ranges of their own memory."""

from __future__ import annotations

from torch import Tensor


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of ``shape``."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def is_dense(tensor: Tensor) -> bool:
    """The elements fill one gapless, non-overlapping range of memory, in whatever order of dimensions."""
    if tensor.numel() == 0:
        return True  # whatever its strides say
    expected = 1
    for extent, step in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if extent == 1:
            continue
        if step != expected:
            return False
        expected *= extent
    return True


def memory_order(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as a flat view, in the order in which they lie in memory."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))
