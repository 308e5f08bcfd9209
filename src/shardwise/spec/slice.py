"""A rank's part of a logical tensor that tensor or expert parallelism has cut.

A cut selects ranges of one dimension. A column-parallel weight of shape ``(f, h)`` on rank 1 of 2 is
``Cut(0, ((f/2, f),))``; a fused query-key-value weight has one cut with three ranges, the rank's rows of each. Cuts of
several dimensions combine, such as the experts of a rank, and the rank's columns of each expert.

Several ranks may have the same elements. Sums over all ranks, such as norms, count them only on the rank with ``copy``
0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.spec.errors import PlanError


@dataclass(frozen=True, slots=True)
class Cut:
    """Ranges ``(start, stop)`` of dimension ``dim``, in the order of the rank's local tensor."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Length of the dimension on this rank."""
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True, slots=True)
class Slice:
    """A rank's part of a logical tensor.

    Attributes:
        shape: Logical shape.
        cuts: One cut for each dimension that is cut.
        copy: Index of this rank among the ranks that have the same elements.
        copies: Number of ranks that have the same elements.
        names: All names of the tensor in the plain model, if weights are tied across pipeline stages, so that this
            rank's modules do not have all of these names.
        is_expert: Whether the tensor belongs to experts that other ranks of ``ep`` do not have. Only ranks with the
            same experts shard or replicate it, and sum its gradients.
    """

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    copy: int = 0
    copies: int = 1
    names: tuple[str, ...] = ()
    is_expert: bool = False

    def __post_init__(self) -> None:
        """Refuse cuts outside the shape."""
        dims = [cut.dim for cut in self.cuts]
        for cut in self.cuts:
            inside = 0 <= cut.dim < len(self.shape) and all(
                0 <= start <= stop <= self.shape[cut.dim] for start, stop in cut.ranges
            )
            if not inside or dims.count(cut.dim) > 1:
                raise PlanError(f"{cut} does not cut a tensor of shape {list(self.shape)}.")

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the rank's part."""
        sizes = list(self.shape)
        for cut in self.cuts:
            sizes[cut.dim] = cut.size
        return tuple(sizes)

    @property
    def is_counted(self) -> bool:
        """Whether sums over all ranks, such as norms, count this rank's elements, because it is the first with them."""
        return self.copy == 0

    def boxes(self) -> Iterator[tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]]:
        """The boxes of elements, each as a range for each dimension of the logical and of the local tensor."""
        by_dim = {cut.dim: cut for cut in self.cuts}
        sides: list[list[tuple[tuple[int, int], tuple[int, int]]]] = []
        for dim, size in enumerate(self.shape):
            ranges = by_dim[dim].ranges if dim in by_dim else ((0, size),)
            starts = itertools.accumulate((stop - start for start, stop in ranges), initial=0)
            sides.append([(span, (at, at + span[1] - span[0])) for span, at in zip(ranges, starts, strict=False)])
        for sides_of_box in itertools.product(*sides):
            logical, local = tuple(side[0] for side in sides_of_box), tuple(side[1] for side in sides_of_box)
            if all(stop > start for start, stop in logical):
                yield logical, local

    @property
    def numel(self) -> int:
        """Number of elements of the rank's part."""
        return math.prod(self.local_shape)


def simplest(shape: tuple[int, ...], cuts: Iterable[Cut]) -> tuple[Cut, ...]:
    """The cuts in normal form: sorted by dimension, adjacent ranges joined, without cuts that select everything."""
    found = []
    for cut in sorted(cuts, key=lambda cut: cut.dim):
        ranges: list[tuple[int, int]] = []
        for start, stop in cut.ranges:
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            elif start < stop:
                ranges.append((start, stop))
        if ranges != [(0, shape[cut.dim])] and (ranges or shape[cut.dim]):
            found.append(Cut(cut.dim, tuple(ranges)))
    return tuple(found)


def even_ranges(size: int, parts: int, part: int, *, blocks: int = 1) -> tuple[tuple[int, int], ...]:
    """Ranges of rank ``part`` of ``parts`` in a dimension of ``blocks`` equal blocks, each divided evenly.

    Raises:
        PlanError: ``parts`` does not divide a block.
    """
    if size % (blocks * parts):
        each = size // blocks if size % blocks == 0 else size
        shown = f"{blocks} x {each}" if blocks > 1 and size % blocks == 0 else str(size)
        divisors = ", ".join(str(degree) for degree in range(1, min(each, 64) + 1) if each % degree == 0)
        raise PlanError(
            f"a dimension of {shown} cannot be divided evenly over {parts} ranks: {each} / {parts} ="
            f" {each / parts:.4g}.\n  Use a degree that divides it: {divisors}."
        )
    block, width = size // blocks, size // (blocks * parts)
    return tuple((index * block + part * width, index * block + (part + 1) * width) for index in range(blocks))


_KEY = "_shardwise_slice"


def set_slice(parameter: Any, part: Slice) -> None:
    """Record a parameter's slice, as an attribute of the parameter."""
    parameter.__dict__[_KEY] = part


def slice_of(parameter: Any) -> Slice | None:
    """The slice that :func:`set_slice` recorded; ``None`` for a parameter that is not cut."""
    return parameter.__dict__.get(_KEY) if hasattr(parameter, "__dict__") else None
