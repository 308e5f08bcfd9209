"""The smallest part of a parameter that is never divided over ranks, and where the slices of a flat buffer begin.

=============  ===================================================  ==========================================
granularity    never divided                                        for optimizers whose update of an element
=============  ===================================================  ==========================================
``element``    an element                                           needs only that element (AdamW, SGD)
``block`` n    n consecutive elements, counted from the             needs its block (8-bit states with one
               parameter's start                                    scale for each block)
``row``        a row, see :func:`row_numel`                         needs its row
``tensor``     a parameter: one rank owns all of it                 needs the full parameter (Muon, Adafactor)
=============  ===================================================  ==========================================

``block`` and ``row`` do not divide a parameter at all if its dimensions have an unusual order in memory.

With ``element`` all slices are equal. With ``block`` and ``row`` they are equal if that costs little padding, and
otherwise end at the nearest permitted place. With ``tensor`` a slice consists of its rank's parameters, and may be
empty.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.spec.errors import PlanError
from shardwise.spec.slice import Slice

#: The kinds, in the order of the table above.
KINDS = ("element", "block", "row", "tensor")

#: Slices are made equal if that adds at most this fraction of padding: one in-place collective then moves equal slices,
#: also over NCCL.
EVEN_PADDING = 0.02

_USAGE = "  Use 'element', 'row', 'tensor', or sw.block(n): in a file [block, n]."


@dataclass(frozen=True, slots=True)
class Granularity:
    """The smallest part of a parameter that is never divided over ranks.

    Attributes:
        kind: One of ``KINDS``.
        numel: Elements of a block; 1 for the other kinds.
    """

    kind: str = "element"
    numel: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PlanError(f"granularity {self.kind!r} is not one of {', '.join(KINDS)}.\n{_USAGE}")
        if isinstance(self.numel, bool) or not isinstance(self.numel, int) or self.numel < 1:
            raise PlanError(f"a block of {self.numel!r} elements: expected a positive integer.\n{_USAGE}")
        if self.kind != "block" and self.numel != 1:
            raise PlanError(f"granularity {self.kind!r} takes no number, got {self.numel}.\n{_USAGE}")

    def __str__(self) -> str:
        return f"block of {self.numel}" if self.kind == "block" else self.kind

    def covers(self, needed: Granularity) -> bool:
        """Whether parts that ``needed`` never divides are not divided by this granularity either, for any shape."""
        if self.kind == "tensor" or needed.kind == "element":
            return True
        if self.kind == needed.kind == "block":
            return self.numel % needed.numel == 0
        return self.kind == needed.kind


ELEMENT = Granularity("element")
ROW = Granularity("row")
TENSOR = Granularity("tensor")


def block(numel: int) -> Granularity:
    """The granularity that never divides blocks of ``numel`` consecutive elements of a parameter."""
    return Granularity("block", numel)


def resolve_granularity(value: object) -> Granularity:
    """``ParallelPlan.granularity`` as an object; configuration files write ``("block", n)`` for a block.

    Raises:
        PlanError: The value is not a granularity.
    """
    if isinstance(value, Granularity):
        return value
    if isinstance(value, str) and value in KINDS and value != "block":
        return Granularity(value)
    if isinstance(value, list | tuple) and len(value) == 2 and value[0] == "block":
        return Granularity("block", value[1])
    raise PlanError(f"granularity={value!r} is none.\n{_USAGE}")


def keeps(part: Slice, needed: Granularity | None) -> bool:
    """Whether tensor and expert parallelism have cut a tensor only where ``needed`` permits it; ``None``: nowhere."""
    cuts = [cut for cut in part.cuts if cut.ranges != ((0, part.shape[cut.dim]),)]
    if not cuts or needed == ELEMENT:
        return True
    if needed is None or needed == TENSOR:
        return False
    if needed.kind == "row":
        return all(cut.dim < first_row_dim(len(part.shape)) for cut in cuts)
    inner = math.prod(part.shape[1:])
    edges = [edge * inner for cut in cuts for bounds in cut.ranges for edge in bounds]
    return all(cut.dim == 0 for cut in cuts) and all(edge % needed.numel == 0 for edge in edges)


def first_row_dim(num_dims: int) -> int:
    """The outermost dimension of a row (:func:`row_numel`)."""
    if num_dims < 2:
        return num_dims
    return num_dims - 1 if num_dims <= 3 else 1


def row_numel(shape: tuple[int, ...], stride: tuple[int, ...] | None = None) -> int:
    """Number of elements of a row.

    * 2 or 3 dimensions (a matrix, or a stack of matrices such as experts): the last dimension.
    * More dimensions (convolutions): one index of the first dimension, that is, one filter.
    * Fewer dimensions: one element.
    * If such a row is not contiguous in memory (``stride``): the full parameter.
    """
    if len(shape) < 2:
        return 1
    first = first_row_dim(len(shape))
    numel = math.prod(shape[first:])
    if stride is None:
        return numel
    own = [step for extent, step in zip(shape[first:], stride[first:], strict=True) if extent > 1]
    others = [step for extent, step in zip(shape[:first], stride[:first], strict=True) if extent > 1]
    is_run = not own or not others or max(own) < min(others)
    return numel if is_run else math.prod(shape)


def assign(weights: Sequence[int], size: int) -> tuple[int, ...]:
    """Assign each parameter to a rank: the heaviest first, each to the rank with the least weight so far.

    No rank gets more than the sum of the mean and the heaviest parameter, nor more than 4/3 of the best possible
    maximum (Graham 1969). Ties go to the earlier parameter and to the lower rank, so all ranks compute the same owners.
    """
    loads = [(0, rank) for rank in range(size)]
    owners = [0] * len(weights)
    for index in sorted(range(len(weights)), key=lambda index: (-weights[index], index)):
        load, rank = loads[0]
        owners[index] = rank
        heapq.heapreplace(loads, (load + weights[index], rank))
    return tuple(owners)


# -- flat buffers: the offset of each parameter, and where the slices begin and end


def round_up(value: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def _pack(numels: Sequence[int], multiples: Sequence[int]) -> tuple[list[int], int]:
    """The offset of each parameter, a multiple of its entry in ``multiples``, and the end of the last one."""
    offsets, end = [], 0
    for numel, multiple in zip(numels, multiples, strict=True):
        offsets.append(round_up(end, multiple))
        end = offsets[-1] + numel
    return offsets, end


def arrange(
    numels: Sequence[int], granules: Sequence[int], size: int, align_numel: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets of the parameters, and the ``size + 1`` places where slices begin and end.

    Args:
        numels: Elements of each parameter.
        granules: A cut inside a parameter is a multiple of this many elements from its start. Multiples of
            ``align_numel``.
        size: Number of slices.
        align_numel: Parameters and slices start at multiples of this.
    """
    step = math.lcm(align_numel, *granules)
    offsets, end = _pack(numels, granules)
    each = round_up(end, size * step) // size
    tight, tight_end = _pack(numels, [align_numel] * len(numels))
    tight_end = round_up(tight_end, align_numel)
    least = round_up(tight_end, size * align_numel)
    if size * each <= least or size * each - least <= EVEN_PADDING * tight_end:
        return tuple(offsets), tuple(index * each for index in range(size + 1))
    edges = [*tight, tight_end]
    bounds = [_nearest(index * tight_end, size, edges, numels, granules) for index in range(size)]
    ordered: list[int] = []
    for _, inside in itertools.groupby(bounds, key=lambda cut: bisect.bisect_right(edges, cut)):
        # Slices inside one parameter may differ by a granule. With the larger slices first, few strided copies
        # (``layout.Rows``) move all of them.
        first, *others = inside
        steps = sorted((stop - start for start, stop in itertools.pairwise([first, *others])), reverse=True)
        ordered += itertools.accumulate(steps, initial=first)
    return tuple(tight), (*ordered, tight_end)


def _nearest(target: int, divisor: int, offsets: Sequence[int], numels: Sequence[int], granules: Sequence[int]) -> int:
    """The permitted place for a cut that is nearest to ``target / divisor``; of two equally near ones the lower.

    ``offsets`` are the parameters' offsets and the end of the last one.
    """
    index = bisect.bisect_right(offsets, target // divisor) - 1
    start, granule = offsets[index], granules[index]
    below = start + (target // divisor - start) // granule * granule
    above = below + granule
    if above >= start + numels[index]:
        above = offsets[index + 1]
    return below if target - below * divisor <= above * divisor - target else above


def arrange_whole(
    numels: Sequence[int], owners: Sequence[int], size: int, align_numel: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same as :func:`arrange`, with each undivided parameter in the slice of its owner, in order."""
    owned: list[list[int]] = [[] for _ in range(size)]
    for index, owner in enumerate(owners):
        owned[owner].append(index)
    offsets, bounds, end = [0] * len(numels), [0], 0
    for indices in owned:
        for index in indices:
            offsets[index] = end
            end = round_up(end + numels[index], align_numel)
        bounds.append(end)
    return tuple(offsets), tuple(bounds)
