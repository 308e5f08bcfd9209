"""Layout of parameters in a flat buffer: offsets, padding, and the slice of each rank. Arithmetic, equal on all ranks.

A unit's parameters of one (dtype, trainable) group are stored one after the other in a flat buffer, each at a multiple
of ``ALIGN_NUMEL`` elements. The buffer is cut into ``size`` slices, again at multiples of ``ALIGN_NUMEL``; rank ``r``
owns slice ``r``. Slices are equal unless the granularity (``spec.granularity``) forbids it. Example: three parameters
on two ranks ::

    | wq .......... | bq . pad | wo ............. | pad |
    |        rank 0           |         rank 1          |      wo is cut: its first elements are rank 0's

There are three reasons for multiples of 64 elements. Kernels compute different bits on misaligned weights. Vectorised
optimizers compute different bits on the cut tails of a tensor. One misaligned pointer makes NCCL copy an entire segment
element by element.

Gradients are reduced in a separate buffer (:class:`ReduceLayout`), whose slices have a short header: one element per
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

#: Every parameter and every slice starts at a multiple of this many elements.
ALIGN_NUMEL = 64
#: Every parameter and every slice starts at a multiple of this many bytes.
ALIGN_BYTES = 256


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as the layout sees it.

    Attributes:
        name: Fully qualified name in the plain model; the first one of a tied parameter.
        shape: Shape on this rank before sharding; with ``slice``, the shape of that part.
        dtype: Short dtype name.
        is_trainable: ``requires_grad`` when the layout was made.
        stride: Strides if the parameter is dense but not contiguous in the usual order, else ``None``.
        aliases: The other names of a tied parameter.
        slice: The part of the logical tensor, if tensor or expert parallelism has cut it or several pipeline stages
            have it.
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
        """Bytes of the elements."""
        return self.numel * item_bytes(self.dtype)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Strides, also of a contiguous parameter."""
        return self.stride or contiguous_stride(self.shape)

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """Shape in the plain model."""
        return self.shape if self.slice is None else self.slice.shape

    def extent(self, start: int, stop: int, *, name: str | None = None, dtype: str | None = None) -> Extent:
        """Elements ``start`` to ``stop`` as a range of the logical tensor, or of tensor ``name`` with the same cuts."""
        shape, part = self.logical_shape, self.slice
        cuts = () if part is None else simplest(shape, part.cuts)
        stride = logical_stride(shape, self.stride) if cuts else self.stride
        return Extent(name or self.name, shape, dtype or self.dtype, start, stop, stride, cuts)


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``start`` to ``stop`` of parameter ``index``, stored at ``offset`` of a flat buffer."""

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
    """``count`` consecutive pieces of a parameter, ``numel`` elements each, that are ``step`` apart in a flat buffer.

    Attributes:
        start: First element of the first piece, in the parameter.
        offset: First element of the first piece, in the buffer.
    """

    start: int
    offset: int
    numel: int
    count: int
    step: int

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> tuple[Rows, ...]:
        """The fewest ``Rows`` that together are ``pieces``, which follow one another in a parameter."""
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
        granularity: The smallest part of a parameter that is never divided.
        owners: With granularity ``tensor``: the rank of each parameter.
        offsets: Offset of each parameter in the gathered buffer, in elements.
        bounds: The start of each slice in the gathered buffer, and the end of the last one: ``size + 1`` numbers.
    """

    params: tuple[ParamSpec, ...]
    size: int
    align_numel: int = ALIGN_NUMEL
    granularity: Granularity = ELEMENT
    owners: tuple[int, ...] | None = None
    offsets: tuple[int, ...] = field(init=False)
    bounds: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise MeshError(f"a layout needs at least one rank, got size={self.size}.\n  Launch at least one rank.")
        numels = [param.numel for param in self.params]
        if self.granularity.kind == "tensor":
            owners = self.owners if self.owners is not None else assign(numels, self.size)
            object.__setattr__(self, "owners", tuple(owners))
            offsets, bounds = arrange_whole(numels, owners, self.size, self.align_numel)
        else:
            granules = [self._granule(param) for param in self.params]
            offsets, bounds = arrange(numels, granules, self.size, self.align_numel)
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "bounds", bounds)

    def _granule(self, param: ParamSpec) -> int:
        """The number of elements of which every cut inside ``param`` is a multiple, counted from its start."""
        least = round_up(max(param.numel, 1), self.align_numel)  # with this granule the parameter is never cut
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
        """Lay out ``params`` over ``size`` ranks, with slices aligned in their own dtype and in all ``dtypes``."""
        names = [*dtypes, *(p.dtype for p in params[:1])] or ["fp32"]
        align = max(ALIGN_NUMEL, *(ALIGN_BYTES // item_bytes(name) for name in names))
        return cls(tuple(params), size, align, granularity, None if owners is None else tuple(owners))

    @property
    def numel(self) -> int:
        """Elements of the gathered buffer, padding included."""
        return self.bounds[-1]

    def slice_numel(self, rank: int) -> int:
        """Elements of slice ``rank``, padding included."""
        return self.bounds[rank + 1] - self.bounds[rank]

    def slice_of(self, rank: int) -> slice:
        """The range of slice ``rank`` in the gathered buffer."""
        return slice(self.bounds[rank], self.bounds[rank + 1])

    def inner_bounds(self, size: int) -> tuple[int, ...]:
        """The bounds for an inner group of ``size`` ranks: as even as the alignment permits."""
        pieces = self.numel // self.align_numel
        return tuple(index * pieces // size * self.align_numel for index in range(size + 1))

    @cached_property
    def is_even(self) -> bool:
        """Whether all slices are equal."""
        return len({stop - start for start, stop in itertools.pairwise(self.bounds)}) == 1

    @cached_property
    def scattered(self) -> ReduceLayout:
        """Layout of gradients that are reduce-scattered into ``size`` slices."""
        return ReduceLayout(self, self.size)

    @cached_property
    def reduced(self) -> ReduceLayout:
        """Layout of gradients that are all-reduced."""
        return ReduceLayout(self, 1)

    @cached_property
    def uneven_bounds(self) -> tuple[int, ...] | None:
        """``bounds`` if slices differ, else ``None``, as collectives accept it."""
        return None if self.is_even else self.bounds

    @cached_property
    def logical_numel(self) -> int:
        """Elements of the parameters, without padding."""
        return sum(p.numel for p in self.params)

    @property
    def padding_numel(self) -> int:
        """Elements of the gathered buffer that belong to no parameter."""
        return self.numel - self.logical_numel

    def owned(self, rank: int) -> tuple[Piece, ...]:
        """The pieces in slice ``rank``; offsets count from the start of the slice. Empty parameters have no piece."""
        first, last = self.bounds[rank], self.bounds[rank + 1]
        pieces = []
        for index, (param, offset) in enumerate(zip(self.params, self.offsets, strict=True)):
            start, stop = max(first, offset), min(last, offset + param.numel)
            if start < stop:
                pieces.append(Piece(index, start - offset, stop - offset, start - first))
        return tuple(pieces)

    def owned_by_param(self, rank: int) -> tuple[Piece, ...]:
        """One piece for every parameter; it is empty if slice ``rank`` has no part of the parameter."""
        by_param = {piece.index: piece for piece in self.owned(rank)}
        return tuple(by_param.get(index, Piece(index, 0, 0, 0)) for index in range(len(self.params)))

    @cached_property
    def whole(self) -> tuple[Piece, ...]:
        """One piece for every parameter in the gathered buffer."""
        return tuple(
            Piece(index, 0, param.numel, offset)
            for index, (param, offset) in enumerate(zip(self.params, self.offsets, strict=True))
        )

    @cached_property
    def holders(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """For each parameter, ``(rank, start, stop)`` of every rank that owns a part of it."""
        found: list[list[tuple[int, int, int]]] = [[] for _ in self.params]
        for rank, piece in self.pieces():
            found[piece.index].append((rank, piece.start, piece.stop))
        return tuple(map(tuple, found))

    def pieces(self) -> Iterator[tuple[int, Piece]]:
        """All pieces with their rank, parameter by parameter; offsets count from the start of the rank's slice."""
        for index, (param, offset) in enumerate(zip(self.params, self.offsets, strict=True)):
            rank, start = bisect.bisect_right(self.bounds, offset) - 1, 0
            while start < param.numel:
                stop = min(param.numel, self.bounds[rank + 1] - offset)
                if start < stop:
                    yield rank, Piece(index, start, stop, offset + start - self.bounds[rank])
                rank, start = rank + 1, stop

    def piece_shape(self, piece: Piece) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """The shape of a rank's piece for the optimizer, and its strides if they are unusual.

        * ``element`` and ``block``: (1, ..., 1, k), with as many dimensions as the parameter has.
        * ``row``: k rows as (k, columns), for a stack of matrices (1, k, columns), for a convolution (k, ...).
        * ``tensor``, a single rank, and parameters whose rows or blocks are not contiguous: the parameter's shape on
          its owner. On other ranks the first dimension is 0.
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
        """A text that is equal on two ranks if and only if their layouts are equal."""
        rows = ";".join(f"{p.name}{list(p.shape)}{p.dtype}{p.stride or ''}" for p in self.params)
        return f"{self.size}/{self.align_numel}/{self.granularity}/{self.owners or ''}/{rows}"


def spread(shapes: Sequence[tuple[int, ...]], size: int) -> list[int]:
    """Order parameters so that each rank gets about its share of their number, as it gets its share of their elements.

    An optimizer's step takes time for each tensor: with all vectors at the end, the last rank would take several times
    as long as the others. A rank's matrices are neighbours, and so are its vectors, because those with weight decay are
    one tensor for the optimizer (``storage.flat_parameters``): the last rank has its vectors last, the one before it
    first, and so on by turns, because a matrix may cross from a rank to the next.

    Args:
        shapes: The shapes in the order of the model.
        size: Number of ranks over which the parameters are cut.

    Returns:
        Indices of ``shapes``.
    """
    numels = [max(math.prod(shape), 1) for shape in shapes]
    total = sum(numels)
    starts = itertools.accumulate(numels[:-1], initial=0)
    after = [size - 1 - start * size // total for start in starts]  # how many ranks follow the one of each parameter
    return sorted(range(len(shapes)), key=lambda i: (-after[i], (len(shapes[i]) < 2) != after[i] % 2))


def rank_bytes(layouts: Iterable[GroupLayout]) -> tuple[int, ...]:
    """Bytes of parameters that each rank owns in all of ``layouts``, without padding.

    A layout over fewer ranks than others, such as that of experts, is repeated: each slice is counted for neighbouring
    ranks, which own different tensors of equal size.
    """
    layouts = list(layouts)
    num_bytes = [0] * max((layout.size for layout in layouts), default=0)
    for layout in layouts:
        alike = len(num_bytes) // layout.size
        for index, piece in layout.pieces():
            for rank in range(index * alike, (index + 1) * alike):
                num_bytes[rank] += piece.numel * item_bytes(layout.params[piece.index].dtype)
    return tuple(num_bytes)


@dataclass(frozen=True)
class ReduceLayout:
    """Layout of the gradient buffer of a group: the group's slices, each followed by a header.

    The header has one element per parameter: 1 if this rank's backward used it, else 0. The header is summed with the
    gradients, so every rank learns which parameters some rank used, without a separate message. A buffer for
    reduce-scatter has ``group.size`` slices, each with a header; a buffer for all-reduce is a single slice. If slices
    are unequal, those of ranks that own nothing are empty and have no header.

    Attributes:
        group: Layout of the parameters.
        num_slices: ``group.size`` for a reduce-scatter, 1 for an all-reduce.
    """

    group: GroupLayout
    num_slices: int

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """The first element of each slice in the buffer, and the end of the last one."""
        return (0, *itertools.accumulate(self.data_numel(i) + self.header_numel(i) for i in range(self.num_slices)))

    @cached_property
    def uneven_bounds(self) -> tuple[int, ...] | None:
        """``bounds`` if slices differ, else ``None``."""
        return None if self.num_slices == 1 or self.group.is_even else self.bounds

    def slice_index(self, rank: int) -> int:
        """Index of the slice whose sum ``rank`` receives."""
        return rank if self.num_slices > 1 else 0

    def data_numel(self, index: int) -> int:
        """Gradient elements of a slice."""
        return self.group.slice_numel(index) if self.num_slices > 1 else self.group.numel

    def header_numel(self, index: int) -> int:
        """Elements of a slice's header."""
        if self.num_slices == 1:
            return round_up(len(self.group.params), self.group.align_numel * self.group.size)
        is_needed = self.group.is_even or self.group.slice_numel(index) or any(p.numel == 0 for p in self.group.params)
        return round_up(len(self.group.params), self.group.align_numel) if is_needed else 0

    def slice_numel(self, rank: int) -> int:
        """Elements of the slice whose sum ``rank`` receives, with its header."""
        index = self.slice_index(rank)
        return self.bounds[index + 1] - self.bounds[index]

    def slice_of(self, rank: int) -> slice:
        """The range in the buffer of the slice whose sum ``rank`` receives."""
        index = self.slice_index(rank)
        return slice(self.bounds[index], self.bounds[index + 1])

    @cached_property
    def numel(self) -> int:
        """Elements of the buffer, headers and padding included."""
        return self.bounds[-1]

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Every parameter's elements in the buffer; a parameter that crosses a cut has a piece on each side."""
        if self.num_slices == 1:
            rows = enumerate(zip(self.group.params, self.group.offsets, strict=True))
            return tuple(Piece(index, 0, param.numel, offset) for index, (param, offset) in rows if param.numel)
        return tuple(
            Piece(piece.index, piece.start, piece.stop, self.bounds[rank] + piece.offset)
            for rank, piece in self.group.pieces()
        )

    @cached_property
    def rows(self) -> tuple[tuple[Rows, ...], ...]:
        """The pieces of each parameter as ``Rows``: at most three if slices are equal, else at most four."""
        pieces: list[list[Piece]] = [[] for _ in self.group.params]
        for piece in self.pieces:
            pieces[piece.index].append(piece)
        return tuple(map(Rows.of, pieces))

    @cached_property
    def dense_rows(self) -> tuple[tuple[Rows, ...], ...]:
        """The same as ``rows``, with offsets in a dense tensor of the parameter, where pieces follow one another."""
        return tuple(tuple(replace(row, offset=row.start, step=row.numel) for row in rows) for rows in self.rows)

    def is_divided(self, index: int) -> bool:
        """Whether parameter ``index`` does not have exactly one piece: a cut is inside it, or it is empty."""
        return [rows.count for rows in self.rows[index]] != [1]

    @cached_property
    def header_rows(self) -> tuple[Rows, ...]:
        """The headers as ``Rows``: consecutive headers at equal distances share one."""
        return Rows.of(Piece(0, 0, numel, start) for start, numel in self.headers())

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The ranges of the buffer that are neither gradient nor header: padding between parameters."""
        used = [(p.offset, p.offset + p.numel) for p in self.pieces]
        used += [(start, start + numel) for start, numel in self.headers()]
        gaps, end = [], 0
        for start, stop in sorted(used):
            if start > end:
                gaps.append((end, start))
            end = max(end, stop)
        if end < self.numel:
            gaps.append((end, self.numel))
        return tuple(gaps)

    def headers(self) -> tuple[tuple[int, int], ...]:
        """The start and the number of elements of each header."""
        return tuple(
            (self.bounds[index] + self.data_numel(index), self.header_numel(index))
            for index in range(self.num_slices)
            if self.header_numel(index)
        )


@dataclass(frozen=True, slots=True)
class FlatRange:
    """A run of a rank's slice that an optimizer updates at once: pieces of one class and the padding between them.

    Attributes:
        kind: Class of the pieces, such as their weight-decay group.
        pieces: The pieces, sorted by offset.
    """

    kind: int
    pieces: tuple[Piece, ...]

    @property
    def start(self) -> int:
        """The start of the first piece."""
        return self.pieces[0].offset

    @property
    def stop(self) -> int:
        """The end of the last piece."""
        return self.pieces[-1].offset + self.pieces[-1].numel

    @property
    def numel(self) -> int:
        """Elements, padding between pieces included."""
        return self.stop - self.start


def flat_ranges(pieces: Sequence[Piece], kinds: Sequence[int | None]) -> tuple[FlatRange, ...]:
    """The fewest ranges of a rank's pieces that contain every piece, and each only pieces of one class.

    Args:
        pieces: A rank's piece of each parameter of a group; empty pieces are in no range.
        kinds: Class of each parameter by index, such as its weight-decay group; ``None``: the parameter is left out.
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
    """Whether the elements fill one range of memory without gaps or overlaps, in any order of dimensions."""
    if 0 in shape:
        return True  # with any strides
    expected = 1
    for extent, step in sorted(zip(shape, stride, strict=True), key=lambda pair: (pair[1], pair[0])):
        if extent == 1:
            continue
        if step != expected:
            return False
        expected *= extent
    return True
