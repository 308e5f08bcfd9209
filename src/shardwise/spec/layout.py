"""From shapes to a flat buffer: offsets, padding, and who owns what. Pure arithmetic, the same on every rank.

A unit's parameters of one (dtype, trainable) group lie one after the other in a flat buffer, each at a multiple of
``ALIGN_NUMEL`` elements. The buffer is cut into ``size`` slices, again at multiples of ``ALIGN_NUMEL``; slice ``r`` is
what rank ``r`` owns. Slices are equal unless the granularity (``spec.granularity``) forbids it. Example: three
parameters on two ranks ::

    | wq .......... | bq . pad | wo ............. | pad |
    |        rank 0           |         rank 1          |      wo is cut: its first elements are rank 0's

Why multiples of 64 elements: kernels compute other bits on misaligned weights, vectorised optimizers compute other bits
on the cut tails of a tensor, and one misaligned pointer makes NCCL copy a whole segment element by element.

Gradients travel in a buffer of their own (:class:`ReduceLayout`), whose slices carry a short header: one element per
parameter that says whether this rank's backward used it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardwise.spec.errors import MeshError
from shardwise.spec.extent import Extent, logical_stride
from shardwise.spec.granularity import ELEMENT, Granularity, arrange, arrange_whole, assign, round_up, row_numel
from shardwise.spec.precision import item_bytes
from shardwise.spec.slice import Slice, simplest

#: Every parameter and every slice starts at a multiple of this many elements ...
ALIGN_NUMEL = 64
#: ... and of this many bytes.
ALIGN_BYTES = 256


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as the layout sees it.

    Attributes:
        name: Fully qualified name in the plain model; of tied parameters the first.
        shape: Logical shape.
        dtype: Short dtype name.
        is_trainable: ``requires_grad`` when the layout was made.
        stride: Strides where the parameter is dense but not contiguous in the usual order, else ``None``.
        aliases: The other names of a tied parameter.
        slice: Which part of the logical tensor this is, where tensor or expert parallelism has cut it or several
            pipeline stages hold it; ``shape`` is then that of the part.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "fp32"
    is_trainable: bool = True
    stride: tuple[int, ...] | None = None
    aliases: tuple[str, ...] = ()
    slice: Slice | None = None

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar, 0 where a dimension is 0."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return self.numel * item_bytes(self.dtype)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Its strides, contiguous or not."""
        return self.stride or contiguous_stride(self.shape)

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """Shape in the plain model."""
        return self.shape if self.slice is None else self.slice.shape

    def extent(self, start: int, stop: int, *, name: str | None = None, dtype: str | None = None) -> Extent:
        """Elements ``start`` to ``stop`` as a part of the logical tensor, or of one with the same cuts (``name``)."""
        shape, held = self.logical_shape, self.slice
        cuts = () if held is None else simplest(shape, held.cuts)
        stride = logical_stride(shape, self.stride) if cuts else self.stride
        return Extent(name or self.name, shape, dtype or self.dtype, start, stop, stride, cuts)


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


@dataclass(frozen=True, slots=True)
class Rows:
    """``count`` pieces of ``numel`` elements that follow one another in a parameter, ``step`` apart in a flat buffer.

    Attributes:
        start: Of the first piece, in the parameter.
        offset: Of the first piece, in the buffer.
    """

    start: int
    offset: int
    numel: int
    count: int
    step: int

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> tuple[Rows, ...]:
        """The fewest rows that hold ``pieces``, which follow one another in a parameter."""
        found: list[list[int]] = []
        newest = 0
        for piece in pieces:
            step, newest = piece.offset - newest, piece.offset
            last = found[-1] if found else []
            if last and piece.numel == last[2] and (last[3] == 1 or step == last[4]):
                last[3:] = last[3] + 1, step
            else:
                found.append([piece.start, piece.offset, piece.numel, 1, piece.numel])
        return tuple(cls(*row) for row in found)


@dataclass(frozen=True)
class GroupLayout:
    """Flat layout of one group of parameters over ``size`` ranks.

    Attributes:
        params: The parameters, in order.
        size: Number of slices.
        align_numel: Alignment of parameters and slices, in elements.
        granularity: What a cut never divides.
        owners: With granularity ``tensor``: the rank of each parameter.
        offsets: Offset of each parameter in the gathered buffer, in elements.
        cuts: Where the slices begin in the gathered buffer, and where the last one ends: ``size + 1`` numbers.
    """

    params: tuple[ParamSpec, ...]
    size: int
    align_numel: int = ALIGN_NUMEL
    granularity: Granularity = ELEMENT
    owners: tuple[int, ...] | None = None
    offsets: tuple[int, ...] = field(init=False)
    cuts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise MeshError(f"a layout needs at least one rank, got size={self.size}.\n  Launch at least one rank.")
        numels = [param.numel for param in self.params]
        if self.granularity.kind == "tensor":
            owners = self.owners if self.owners is not None else assign(numels, self.size)
            object.__setattr__(self, "owners", tuple(owners))
            offsets, cuts = arrange_whole(numels, owners, self.size, self.align_numel)
        else:
            granules = [self._granule(param) for param in self.params]
            offsets, cuts = arrange(numels, granules, self.size, self.align_numel)
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "cuts", cuts)

    def _granule(self, param: ParamSpec) -> int:
        """Cuts inside ``param`` are multiples of this many elements from its start."""
        least = round_up(max(param.numel, 1), self.align_numel)  # it is never cut
        if self.granularity.kind == "row":
            return min(math.lcm(row_numel(param.shape, param.stride) or 1, self.align_numel), least)
        if self.granularity.kind == "block" and param.stride is not None:
            return least
        return math.lcm(self.granularity.numel, self.align_numel)

    @classmethod
    def build(
        cls,
        params: Sequence[ParamSpec],
        size: int,
        *,
        dtypes: Sequence[str] = (),
        granularity: Granularity = ELEMENT,
        owners: Sequence[int] | None = None,
    ) -> GroupLayout:
        """Lay out ``params`` over ``size`` ranks, slices aligned in every dtype that the buffer is held in."""
        names = [*dtypes, *(p.dtype for p in params[:1])] or ["fp32"]
        align = max(ALIGN_NUMEL, *(ALIGN_BYTES // item_bytes(name) for name in names))
        return cls(tuple(params), size, align, granularity, None if owners is None else tuple(owners))

    @property
    def numel(self) -> int:
        """Elements of the gathered buffer, padding included."""
        return self.cuts[-1]

    def slice_numel(self, rank: int) -> int:
        """Elements of slice ``rank``, padding included."""
        return self.cuts[rank + 1] - self.cuts[rank]

    def slice_of(self, rank: int) -> slice:
        """The place of slice ``rank`` in the gathered buffer."""
        return slice(self.cuts[rank], self.cuts[rank + 1])

    def inner_cuts(self, size: int) -> tuple[int, ...]:
        """The ends of the slices of an inner group of ``size`` ranks: as even as the alignment allows."""
        pieces = self.numel // self.align_numel
        return tuple(index * pieces // size * self.align_numel for index in range(size + 1))

    @cached_property
    def is_even(self) -> bool:
        """All slices are equal."""
        return len({stop - start for start, stop in itertools.pairwise(self.cuts)}) == 1

    @cached_property
    def scattered(self) -> ReduceLayout:
        """Layout of gradients that a reduce-scatter cuts into as many slices."""
        return ReduceLayout(self, self.size)

    @cached_property
    def reduced(self) -> ReduceLayout:
        """Layout of gradients that are all-reduced."""
        return ReduceLayout(self, 1)

    @cached_property
    def uneven_cuts(self) -> tuple[int, ...] | None:
        """``cuts`` where slices differ, else ``None``: what a collective needs to be told."""
        return None if self.is_even else self.cuts

    @cached_property
    def logical_numel(self) -> int:
        """Elements of the parameters themselves."""
        return sum(p.numel for p in self.params)

    @property
    def padding_numel(self) -> int:
        """Elements of the gathered buffer that belong to no parameter."""
        return self.numel - self.logical_numel

    def owned(self, rank: int) -> tuple[Piece, ...]:
        """The pieces in slice ``rank``; offsets count from the start of the slice. Empty parameters have no piece."""
        first, last = self.cuts[rank], self.cuts[rank + 1]
        pieces = []
        for index, (param, offset) in enumerate(zip(self.params, self.offsets, strict=True)):
            start, stop = max(first, offset), min(last, offset + param.numel)
            if start < stop:
                pieces.append(Piece(index, start - offset, stop - offset, start - first))
        return tuple(pieces)

    def owned_by_param(self, rank: int) -> tuple[Piece, ...]:
        """One piece for every parameter, empty where slice ``rank`` holds nothing of it."""
        held = {piece.index: piece for piece in self.owned(rank)}
        return tuple(held.get(index, Piece(index, 0, 0, 0)) for index in range(len(self.params)))

    @cached_property
    def whole(self) -> tuple[Piece, ...]:
        """Every parameter in the gathered buffer, in one piece each."""
        return tuple(
            Piece(index, 0, param.numel, offset)
            for index, (param, offset) in enumerate(zip(self.params, self.offsets, strict=True))
        )

    @cached_property
    def holders(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """By parameter, the ranks that hold a part of it, each with the first element and the end of its part."""
        found: list[list[tuple[int, int, int]]] = [[] for _ in self.params]
        for rank, piece in self.pieces():
            found[piece.index].append((rank, piece.start, piece.stop))
        return tuple(map(tuple, found))

    def pieces(self) -> Iterator[tuple[int, Piece]]:
        """Every rank's pieces, with the rank, parameter by parameter; offsets count from the start of the slice."""
        for index, (param, offset) in enumerate(zip(self.params, self.offsets, strict=True)):
            rank, start = bisect.bisect_right(self.cuts, offset) - 1, 0
            while start < param.numel:
                stop = min(param.numel, self.cuts[rank + 1] - offset)
                if start < stop:
                    yield rank, Piece(index, start, stop, offset + start - self.cuts[rank])
                rank, start = rank + 1, stop

    def held_shape(self, piece: Piece) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """The shape in which an optimizer sees a rank's piece, and its strides where they are unusual.

        * ``element`` and ``block``: (1, ..., 1, k), with as many dimensions as the parameter has.
        * ``row``: its rows: (k, columns), for a stack of matrices (1, k, columns), for a convolution (k, ...).
        * ``tensor``, a single rank, and wherever rows or blocks are no runs of memory: the parameter's own, or with 0
          for the first dimension where the rank does not hold it.
        """
        param = self.params[piece.index]
        shape, kind = param.shape, self.granularity.kind
        is_matrix = len(shape) > 1 and param.numel > 0
        row = row_numel(shape, param.stride) if kind == "row" and is_matrix else 0
        is_odd = row == param.numel > 0 or (kind == "block" and param.stride is not None)
        if kind == "tensor" or self.size == 1 or is_odd:
            return (shape, param.stride) if piece.numel == param.numel else ((0, *shape[1:]), None)
        if row:
            rows = piece.numel // row
            if len(shape) > 3:
                return (rows, *shape[1:]), None if param.stride is None else (row, *param.stride[1:])
            return (*(1,) * (len(shape) - 2), rows, row), None
        return ((1,) * (len(shape) - 1) + (piece.numel,) if shape else (piece.numel,)), None

    def fingerprint(self) -> str:
        """A text that is equal on two ranks exactly when their layouts are."""
        rows = ";".join(f"{p.name}{list(p.shape)}{p.dtype}{p.stride or ''}" for p in self.params)
        return f"{self.size}/{self.align_numel}/{self.granularity}/{self.owners or ''}/{rows}"


def rank_bytes(layouts: Iterable[GroupLayout]) -> tuple[int, ...]:
    """Bytes of the parameters that each rank owns, padding left out, over all of ``layouts``.

    Where fewer ranks share a layout than others, it stands for as many alike, of neighbours (experts).
    """
    layouts = list(layouts)
    held = [0] * max((layout.size for layout in layouts), default=0)
    for layout in layouts:
        alike = len(held) // layout.size
        for place, piece in layout.pieces():
            for rank in range(place * alike, (place + 1) * alike):
                held[rank] += piece.numel * item_bytes(layout.params[piece.index].dtype)
    return tuple(held)


@dataclass(frozen=True)
class ReduceLayout:
    """Layout of the gradient buffer of a group: the group's slices, each followed by a header.

    The header holds one element per parameter: 1 where this rank's backward used it, 0 where not. Summed with the
    gradients, it tells every rank which parameters some rank used, without a message of its own. A gradient that a
    reduce-scatter will cut is held in ``size`` slices, each with its header; one that is all-reduced in a single slice.
    Where slices are unequal, those of ranks that own nothing are empty and have no header either.

    Attributes:
        group: Layout of the parameters.
        num_slices: ``group.size`` for a reduce-scatter, 1 for an all-reduce.
    """

    group: GroupLayout
    num_slices: int

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """The first element of each slice in the buffer, and the end of the last one."""
        return (0, *itertools.accumulate(self.data_numel(i) + self.header_numel(i) for i in range(self.num_slices)))

    @cached_property
    def uneven_cuts(self) -> tuple[int, ...] | None:
        """``cuts`` where slices differ, else ``None``."""
        return None if self.num_slices == 1 or self.group.is_even else self.cuts

    def place(self, rank: int) -> int:
        """The slice whose sum ``rank`` gets."""
        return rank if self.num_slices > 1 else 0

    def data_numel(self, place: int) -> int:
        """Gradient elements of a slice."""
        return self.group.slice_numel(place) if self.num_slices > 1 else self.group.numel

    def header_numel(self, place: int) -> int:
        """Elements of a slice's header."""
        if self.num_slices == 1:
            return round_up(len(self.group.params), self.group.align_numel * self.group.size)
        is_needed = self.group.is_even or self.group.slice_numel(place) or any(p.numel == 0 for p in self.group.params)
        return round_up(len(self.group.params), self.group.align_numel) if is_needed else 0

    def slice_numel(self, rank: int) -> int:
        """Elements of the slice whose sum ``rank`` gets, with its header."""
        place = self.place(rank)
        return self.cuts[place + 1] - self.cuts[place]

    def slice_of(self, rank: int) -> slice:
        """The place in the buffer of the slice whose sum ``rank`` gets."""
        place = self.place(rank)
        return slice(self.cuts[place], self.cuts[place + 1])

    @cached_property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.cuts[-1]

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Every parameter's elements in the buffer; one that crosses a cut has a piece on either side of it."""
        if self.num_slices == 1:
            rows = enumerate(zip(self.group.params, self.group.offsets, strict=True))
            return tuple(Piece(index, 0, param.numel, offset) for index, (param, offset) in rows if param.numel)
        return tuple(
            Piece(piece.index, piece.start, piece.stop, self.cuts[rank] + piece.offset)
            for rank, piece in self.group.pieces()
        )

    @cached_property
    def rows(self) -> tuple[tuple[Rows, ...], ...]:
        """The pieces of each parameter: at most three rows of equal slices, and four of others, for any number."""
        held: list[list[Piece]] = [[] for _ in self.group.params]
        for piece in self.pieces:
            held[piece.index].append(piece)
        return tuple(map(Rows.of, held))

    @cached_property
    def dense_rows(self) -> tuple[tuple[Rows, ...], ...]:
        """The same rows in a dense tensor of each parameter alone, where they follow one another."""
        return tuple(tuple(replace(row, offset=row.start, step=row.numel) for row in rows) for rows in self.rows)

    def is_divided(self, index: int) -> bool:
        """Whether parameter ``index`` is not in one piece: a cut falls inside it, or it is empty."""
        return [held.count for held in self.rows[index]] != [1]

    @cached_property
    def header_rows(self) -> tuple[Rows, ...]:
        """The headers, those of neighbours that lie equally far apart together."""
        return Rows.of(Piece(0, 0, numel, start) for start, numel in self.headers())

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The ranges of the buffer that hold neither a gradient nor a header: padding between parameters."""
        taken = [(p.offset, p.offset + p.numel) for p in self.pieces]
        taken += [(start, start + numel) for start, numel in self.headers()]
        gaps, end = [], 0
        for start, stop in sorted(taken):
            if start > end:
                gaps.append((end, start))
            end = max(end, stop)
        if end < self.numel:
            gaps.append((end, self.numel))
        return tuple(gaps)

    def headers(self) -> tuple[tuple[int, int], ...]:
        """The start of each header, and its number of elements, for the slices that have one."""
        return tuple(
            (self.cuts[place] + self.data_numel(place), self.header_numel(place))
            for place in range(self.num_slices)
            if self.header_numel(place)
        )


@dataclass(frozen=True, slots=True)
class FlatRange:
    """A run of a rank's slice that an optimizer updates at once: pieces of one class and the padding between them.

    Attributes:
        kind: Class of the pieces, such as their weight-decay group.
        pieces: The pieces, by offset.
    """

    kind: int
    pieces: tuple[Piece, ...]

    @property
    def start(self) -> int:
        """The start of its first piece."""
        return self.pieces[0].offset

    @property
    def stop(self) -> int:
        """The end of its last piece."""
        return self.pieces[-1].offset + self.pieces[-1].numel

    @property
    def numel(self) -> int:
        """Elements, padding between pieces included."""
        return self.stop - self.start


def flat_ranges(pieces: Sequence[Piece], kinds: Sequence[int | None]) -> tuple[FlatRange, ...]:
    """The fewest ranges that hold every piece together with pieces of its own class only.

    Args:
        pieces: A rank's piece of each parameter of a group; empty pieces are in no range.
        kinds: Class of each parameter by index, such as its weight-decay group; ``None`` for one that is left out.
    """
    runs: list[list[Piece]] = []
    last: int | None = None
    for piece in sorted((piece for piece in pieces if piece.numel), key=lambda piece: piece.offset):
        kind = kinds[piece.index]
        if kind is not None and kind == last:
            runs[-1].append(piece)
        elif kind is not None:
            runs.append([piece])
        last = kind
    return tuple(FlatRange(kinds[run[0].index] or 0, tuple(run)) for run in runs)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of ``shape``."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """The elements fill one gapless, non-overlapping range of memory, in whatever order of dimensions."""
    if 0 in shape:
        return True  # whatever the strides say
    expected = 1
    for extent, step in sorted(zip(shape, stride, strict=True), key=lambda pair: (pair[1], pair[0])):
        if extent == 1:
            continue
        if step != expected:
            return False
        expected *= extent
    return True
