"""From shapes to a flat buffer: offsets, padding, and who owns what. Pure arithmetic, the same on every rank.

A unit's parameters of one (dtype, trainable) group lie one after the other in a flat buffer, each at a multiple of
``ALIGN_NUMEL`` elements. The buffer is cut into ``size`` equal slices, again at multiples of ``ALIGN_NUMEL``; slice
``r`` is what rank ``r`` owns. Example: three parameters on two ranks ::

    | wq .......... | bq . pad | wo ............. | pad |
    |        rank 0           |         rank 1          |      wo is cut: its first elements are rank 0's

Why multiples of 64 elements: kernels compute other bits on misaligned weights, vectorised optimizers compute other bits
on the cut tails of a tensor, and one misaligned pointer makes NCCL copy a whole segment element by element.

Gradients travel in a buffer of their own (:class:`ReduceLayout`), whose slices carry a short header: one element per
parameter that says whether this rank's backward used it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardwise.spec.errors import MeshError
from shardwise.spec.precision import item_bytes

#: Every parameter and every slice starts at a multiple of this many elements ...
ALIGN_NUMEL = 64
#: ... and of this many bytes.
ALIGN_BYTES = 256


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter as the layout sees it.

    Attributes:
        name: Fully qualified name in the plain model; of tied parameters the first.
        shape: Logical shape.
        dtype: Short dtype name.
        is_trainable: ``requires_grad`` when the layout was made.
        stride: Strides where the parameter is dense but not contiguous in the usual order, else ``None``.
        aliases: The other names of a tied parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "fp32"
    is_trainable: bool = True
    stride: tuple[int, ...] | None = None
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar, 0 where a dimension is 0."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``start`` to ``stop`` of parameter ``index``, which lie at ``offset`` of some flat buffer."""

    index: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class GroupLayout:
    """Flat layout of one group of parameters over ``size`` ranks.

    Attributes:
        params: The parameters, in order.
        size: Number of slices.
        align_numel: Alignment of parameters and slices, in elements.
        offsets: Offset of each parameter in the gathered buffer, in elements.
        shard_numel: Elements of one slice, padding included.
    """

    params: tuple[ParamSpec, ...]
    size: int
    align_numel: int = ALIGN_NUMEL
    offsets: tuple[int, ...] = field(init=False)
    shard_numel: int = field(init=False)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise MeshError(f"a layout needs at least one rank, got size={self.size}.\n  Launch at least one rank.")
        offset, offsets = 0, []
        for param in self.params:
            offsets.append(offset)
            offset = round_up(offset + param.numel, self.align_numel)
        object.__setattr__(self, "offsets", tuple(offsets))
        object.__setattr__(self, "shard_numel", round_up(offset, self.size * self.align_numel) // self.size)

    @classmethod
    def build(cls, params: Sequence[ParamSpec], size: int, *, dtypes: Sequence[str] = ()) -> GroupLayout:
        """Lay out ``params`` over ``size`` ranks, slices aligned in every dtype that the buffer is held in."""
        names = [*dtypes, *(p.dtype for p in params[:1])] or ["fp32"]
        align = max(ALIGN_NUMEL, *(ALIGN_BYTES // item_bytes(name) for name in names))
        return cls(tuple(params), size, align)

    @property
    def numel(self) -> int:
        """Elements of the gathered buffer, padding included."""
        return self.size * self.shard_numel

    @cached_property
    def logical_numel(self) -> int:
        """Elements of the parameters themselves."""
        return sum(p.numel for p in self.params)

    @property
    def padding_numel(self) -> int:
        """Elements of the gathered buffer that belong to no parameter."""
        return self.numel - self.logical_numel

    def owned(self, rank: int) -> tuple[Piece, ...]:
        """What lies in slice ``rank``; offsets count from the start of the slice. Empty parameters have no piece."""
        return self._pieces(rank * self.shard_numel, (rank + 1) * self.shard_numel, 0)

    def owned_by_param(self, rank: int) -> tuple[Piece, ...]:
        """One piece for every parameter, empty where slice ``rank`` holds nothing of it."""
        held = {piece.index: piece for piece in self.owned(rank)}
        return tuple(held.get(index, Piece(index, 0, 0, 0)) for index in range(len(self.params)))

    def _pieces(self, first: int, last: int, base: int) -> tuple[Piece, ...]:
        pieces = []
        for index, (param, offset) in enumerate(zip(self.params, self.offsets, strict=True)):
            start, stop = max(first, offset), min(last, offset + param.numel)
            if start < stop:
                pieces.append(Piece(index, start - offset, stop - offset, base + start - first))
        return tuple(pieces)

    def fingerprint(self) -> str:
        """A text that is equal on two ranks exactly when their layouts are."""
        rows = ";".join(f"{p.name}{list(p.shape)}{p.dtype}{p.stride or ''}" for p in self.params)
        return f"{self.size}/{self.align_numel}/{rows}"


@dataclass(frozen=True)
class ReduceLayout:
    """Layout of the gradient buffer of a group: the group's slices, each followed by a header.

    The header holds one element per parameter: 1 where this rank's backward used it, 0 where not. Summed with the
    gradients, it tells every rank which parameters some rank used, without a message of its own. A gradient that a
    reduce-scatter will cut is held in ``size`` slices, each with its header; one that is all-reduced in a single slice.

    Attributes:
        group: Layout of the parameters.
        num_slices: ``group.size`` for a reduce-scatter, 1 for an all-reduce.
    """

    group: GroupLayout
    num_slices: int

    @property
    def data_numel(self) -> int:
        """Gradient elements of one slice."""
        return self.group.numel // self.num_slices

    @property
    def header_numel(self) -> int:
        """Elements of one header."""
        multiple = self.group.align_numel * (self.group.size // self.num_slices)
        return round_up(len(self.group.params), multiple)

    @property
    def slice_numel(self) -> int:
        """Elements of one slice with its header."""
        return self.data_numel + self.header_numel

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.num_slices * self.slice_numel

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Every parameter's elements in the buffer; one that crosses a cut has a piece on either side of it."""
        found: list[Piece] = []
        for index in range(self.num_slices):
            first = index * self.data_numel
            found += self.group._pieces(first, first + self.data_numel, index * self.slice_numel)  # noqa: SLF001 - same module
        return tuple(found)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The ranges of the buffer that hold neither a gradient nor a header's flags: padding."""
        taken = [(p.offset, p.offset + p.numel) for p in self.pieces]
        flags = len(self.group.params)
        for index in range(self.num_slices):
            start = index * self.slice_numel + self.data_numel
            taken.append((start, start + flags))
        gaps, end = [], 0
        for start, stop in sorted(taken):
            if start > end:
                gaps.append((end, start))
            end = max(end, stop)
        if end < self.numel:
            gaps.append((end, self.numel))
        return tuple(gaps)

    def flag_offsets(self) -> tuple[int, ...]:
        """Where each slice's header starts."""
        return tuple(index * self.slice_numel + self.data_numel for index in range(self.num_slices))
