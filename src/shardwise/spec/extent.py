"""A range of elements of a named logical tensor: the common tongue of the engine and of checkpoints.

A rank's piece of a parameter is a contiguous range of the parameter's elements in memory order, and so is the
piece that a checkpoint file holds. Loading on any other layout is an intersection of ranges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Extent:
    """Elements ``start`` to ``stop`` of the logical tensor ``name``, counted in memory order.

    Attributes:
        name: Logical, fully qualified name, as in the plain model's ``state_dict``. For optimizer state:
            ``optimizer/<parameter name>/<state key>``. For buffers: ``buffer/<name>``.
        shape: Logical shape of the whole tensor.
        dtype: Short name: ``fp32``, ``bf16``, ``fp16``, ``fp64``, ``int64``, ... (``spec.precision``).
        start: First element held.
        stop: One past the last element held. ``start == stop`` is an empty extent.
        stride: Strides of the logical tensor where it is dense but not contiguous in the usual order, else ``None``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int
    stride: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Number of elements held."""
        return self.stop - self.start

    @property
    def logical_numel(self) -> int:
        """Number of elements of the whole logical tensor."""
        return math.prod(self.shape)

    def overlap(self, other: Extent) -> tuple[int, int]:
        """The range ``(start, stop)`` that both hold; ``start == stop`` if none."""
        start = max(self.start, other.start)
        return start, max(start, min(self.stop, other.stop))
