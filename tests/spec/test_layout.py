"""Flat layouts: every element has one owner, everything that must be aligned is, whatever the shapes and the world."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.errors import MeshError
from shardwise.spec.granularity import ELEMENT, EVEN_PADDING, ROW, TENSOR, block, round_up, row_numel
from shardwise.spec.layout import (
    ALIGN_BYTES,
    ALIGN_NUMEL,
    GroupLayout,
    ParamSpec,
    Piece,
    ReduceLayout,
    flat_ranges,
    spread,
)
from shardwise.spec.precision import ITEM_BYTES, item_bytes

#: Scalars, zero-sized, odd and round shapes; more ranks than elements come with the worlds.
SHAPES = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
    st.tuples(st.sampled_from([1, 7, 63, 64, 65, 127, 128, 300]), st.sampled_from([1, 3, 64])),
    st.tuples(st.integers(1, 5), st.integers(1, 9), st.sampled_from([32, 64, 100])),
    st.tuples(st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
)
GRANULARITIES = st.one_of(st.sampled_from([ELEMENT, ROW, TENSOR]), st.integers(1, 700).map(block))
WORLDS = st.integers(1, 64)
DTYPES = st.sampled_from(["fp64", "fp32", "bf16", "fp16"])


@st.composite
def strides(draw, shape):
    """None, or the strides of some order of the dimensions in memory that is not the usual one."""
    order = draw(st.permutations(range(len(shape))))
    if math.prod(shape) == 0 or order == sorted(order):
        return None
    found, step = [0] * len(shape), 1
    for dim in reversed(order):
        found[dim] = step
        step *= shape[dim]
    return tuple(found)


@st.composite
def layouts(draw):
    dtype = draw(DTYPES)
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=8))
    params = [ParamSpec(f"p{i}", shape, dtype, stride=draw(strides(shape))) for i, shape in enumerate(shapes)]
    return GroupLayout.build(
        params, draw(WORLDS), dtypes=draw(st.lists(DTYPES, max_size=2)), granularity=draw(GRANULARITIES)
    )


@given(layouts())
def test_every_element_is_owned_exactly_once(layout):
    owned = {index: [] for index in range(len(layout.params))}
    for rank in range(layout.size):
        for piece in layout.owned(rank):
            assert piece.numel > 0
            owned[piece.index].append((piece.start, piece.stop))
    for index, ranges in owned.items():
        end = 0
        for start, stop in ranges:  # in rank order they follow one another without gap or overlap
            assert start == end
            end = stop
        assert end == layout.params[index].numel


@given(layouts())
def test_pieces_lie_where_the_gathered_buffer_has_them(layout):
    for rank in range(layout.size):
        for piece in layout.owned(rank):
            assert piece.offset >= 0
            assert piece.offset + piece.numel <= layout.slice_numel(rank)
            gathered = layout.bounds[rank] + piece.offset
            assert gathered == layout.offsets[piece.index] + piece.start


@given(layouts())
def test_parameters_and_slices_start_at_multiples_of_64_elements_and_256_bytes(layout):
    starts = [*layout.offsets, *layout.bounds]
    for start in starts:
        assert start % ALIGN_NUMEL == 0
        assert start * item_bytes(layout.params[0].dtype) % ALIGN_BYTES == 0


@given(layouts())
def test_parameters_do_not_overlap_and_fit(layout):
    ranges = sorted((offset, offset + param.numel) for offset, param in zip(layout.offsets, layout.params, strict=True))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    assert ranges[-1][1] <= layout.numel
    assert layout.bounds[0] == 0
    assert layout.numel == sum(layout.slice_numel(rank) for rank in range(layout.size))
    assert min(layout.slice_numel(rank) for rank in range(layout.size)) >= 0
    assert layout.padding_numel == layout.numel - sum(param.numel for param in layout.params) >= 0


@given(layouts())
def test_padding_is_less_than_one_alignment_for_each_parameter_and_each_slice(layout):
    if layout.granularity == ELEMENT:
        assert layout.is_even
        assert layout.padding_numel < layout.align_numel * (len(layout.params) + layout.size)
    else:  # where slices are not equal, nothing pads them
        slices = layout.align_numel * layout.size + EVEN_PADDING * (layout.numel - layout.padding_numel) * 2
        padding = layout.align_numel * len(layout.params) + (slices if layout.is_even else 0)
        assert layout.padding_numel <= padding


@given(layouts())
def test_no_cut_falls_inside_what_the_granularity_keeps_whole(layout):
    for rank, piece in layout.pieces():
        param, kind = layout.params[piece.index], layout.granularity.kind
        if kind == "tensor":
            assert (piece.start, piece.stop) == (0, param.numel)
            assert rank == layout.owners[piece.index]
            continue
        granule = row_numel(param.shape, param.stride) if kind == "row" else layout.granularity.numel
        if kind == "block" and param.stride is not None:
            granule = param.numel
        assert piece.start % granule == 0
        assert piece.stop % granule == 0 or piece.stop == param.numel


@given(layouts())
def test_all_pieces_are_those_of_the_ranks(layout):
    found = {rank: [] for rank in range(layout.size)}
    for rank, piece in layout.pieces():
        found[rank].append(piece)
    assert all(tuple(pieces) == layout.owned(rank) for rank, pieces in found.items())


@given(layouts())
def test_an_optimizer_sees_a_piece_with_the_dimensions_of_the_parameter_and_its_elements(layout):
    for rank in range(layout.size):
        for piece, param in zip(layout.owned_by_param(rank), layout.params, strict=True):
            shape, _ = layout.piece_shape(piece)
            assert len(shape) == max(len(param.shape), 0 if shape == param.shape else 1)
            assert math.prod(shape) == piece.numel
            if layout.granularity == TENSOR and piece.numel:
                assert shape == param.shape
            if layout.granularity == ROW and len(param.shape) > 1 and piece.numel:
                assert shape[-1] == param.shape[-1]


@given(layouts())
def test_there_is_one_piece_for_every_parameter_where_one_is_asked_for(layout):
    for rank in range(layout.size):
        pieces = layout.owned_by_param(rank)
        assert [piece.index for piece in pieces] == list(range(len(layout.params)))
        assert tuple(piece for piece in pieces if piece.numel) == layout.owned(rank)


@given(layouts(), st.booleans())
def test_pieces_headers_and_gaps_of_a_gradient_buffer_cover_it_exactly_once(layout, scatters):
    reduce = ReduceLayout(layout, layout.size if scatters else 1)
    ranges = [(piece.offset, piece.offset + piece.numel) for piece in reduce.pieces]
    ranges += [(start, start + numel) for start, numel in reduce.headers()]
    assert all(numel >= len(layout.params) for _, numel in reduce.headers())
    ranges += reduce.gaps
    end = 0
    for start, stop in sorted(ranges):
        assert start == end
        assert stop > start
        end = stop
    assert end == reduce.numel


def expanded(rows):
    """Start, offset and elements of every piece of rows."""
    return [(r.start + k * r.numel, r.offset + k * r.step, r.numel) for r in rows for k in range(r.count)]


@given(layouts(), st.booleans())
def test_rows_hold_the_pieces_of_a_parameter_and_the_headers(layout, scatters):
    reduce = ReduceLayout(layout, layout.size if scatters else 1)
    for index, rows in enumerate(reduce.rows):
        pieces = [piece for piece in reduce.pieces if piece.index == index]
        assert expanded(rows) == [(piece.start, piece.offset, piece.numel) for piece in pieces]
        assert len(rows) <= (3 if layout.is_even else 4)
        assert reduce.is_divided(index) == (len(pieces) != 1)
    assert [(offset, numel) for _, offset, numel in expanded(reduce.header_rows)] == list(reduce.headers())


@pytest.mark.parametrize("granularity", [ELEMENT, block(2048), ROW], ids=str)
@pytest.mark.parametrize("size", [8, 64, 1024])
def test_more_ranks_make_no_more_rows(size, granularity):
    """Slices of whole rows of GPT-2 are unequal from 64 ranks on."""
    shapes = [(768, 2304), (768, 768), (768, 3072), (3072, 768), (768,), (2304,), (3072,)]
    params = [ParamSpec(f"p{index}", shape) for index, shape in enumerate(shapes)]
    layout = GroupLayout.build(params, size, granularity=granularity)
    assert layout.is_even or granularity != ELEMENT
    assert max(map(len, layout.scattered.rows)) <= (3 if layout.is_even else 4)
    assert len(layout.scattered.header_rows) <= (1 if layout.is_even else 4 * len(shapes))


@given(layouts(), st.booleans())
def test_a_gradient_lies_in_the_slice_of_the_rank_that_owns_it_at_the_same_place(layout, scatters):
    reduce = ReduceLayout(layout, layout.size if scatters else 1)
    found = {}
    for piece in reduce.pieces:
        place = bisect.bisect_right(reduce.bounds, piece.offset) - 1
        offset = piece.offset - reduce.bounds[place]
        assert offset + piece.numel <= reduce.data_numel(place)
        found.setdefault(place, []).append(dataclasses.replace(piece, offset=offset))
    if scatters:
        for rank in range(layout.size):
            assert reduce.data_numel(rank if layout.size > 1 else 0) == layout.slice_numel(rank)
            assert tuple(found.get(rank, ())) == layout.owned(rank)
    else:
        assert {piece.index: piece.offset for piece in found.get(0, ())} == {
            index: offset for index, offset in enumerate(layout.offsets) if layout.params[index].numel
        }


@given(layouts(), st.booleans())
def test_slices_of_a_gradient_buffer_are_aligned_and_those_that_hold_something_have_a_header(layout, scatters):
    reduce = ReduceLayout(layout, layout.size if scatters else 1)
    assert reduce.bounds[-1] == reduce.numel
    assert all(cut % ALIGN_NUMEL == 0 for cut in reduce.bounds)
    if layout.is_even:
        assert reduce.numel % layout.size == 0
        assert reduce.uneven_bounds is None
        assert len(reduce.headers()) == reduce.num_slices
    for rank in range(layout.size):
        place = reduce.slice_index(rank)
        assert reduce.slice_numel(rank) == reduce.data_numel(place) + reduce.header_numel(place)
        if layout.owned(rank) or any(param.numel == 0 for param in layout.params):
            assert reduce.header_numel(place) >= len(layout.params)


def test_the_example_of_the_docstring():
    wq, bq, wo = ParamSpec("wq", (12, 12)), ParamSpec("bq", (12,)), ParamSpec("wo", (12, 12))
    layout = GroupLayout.build([wq, bq, wo], 2)
    assert layout.offsets == (0, 192, 256)
    assert layout.bounds == (0, 256, 512)
    assert [(piece.index, piece.start, piece.stop, piece.offset) for piece in layout.owned(0)] == [
        (0, 0, 144, 0),
        (1, 0, 12, 192),
    ]
    assert [(piece.index, piece.start, piece.stop, piece.offset) for piece in layout.owned(1)] == [(2, 0, 144, 0)]


def test_a_parameter_that_a_cut_divides_has_a_piece_on_either_side():
    layout = GroupLayout.build([ParamSpec("w", (5, 41))], 2)
    assert [(piece.start, piece.stop) for rank in range(2) for piece in layout.owned(rank)] == [(0, 128), (128, 205)]


@pytest.mark.parametrize(("dtype", "align"), [("fp64", 64), ("fp32", 64), ("bf16", 128), ("fp8_e4m3", 256)])
def test_narrow_dtypes_are_aligned_to_more_elements(dtype, align):
    assert GroupLayout.build([ParamSpec("w", (3,), dtype)], 1).align_numel == align
    assert GroupLayout.build([ParamSpec("w", (3,), "fp32")], 1, dtypes=[dtype]).align_numel == align


def test_every_dtype_divides_the_alignment():
    assert all(ALIGN_BYTES % num_bytes == 0 for num_bytes in ITEM_BYTES.values())


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_rank_gets_its_share_of_the_vectors_and_few_runs_of_parameters_with_weight_decay(size):
    """An optimizer's time is that of its tensors: vectors after all matrices gave one rank four times as many."""
    block_of = [(64,), (64,), (192, 64), (192,), (64, 64), (64,), (64,), (64,), (256, 64), (256,), (64, 256), (64,)]
    shapes = block_of * 8
    order = spread(shapes, size)
    assert sorted(order) == list(range(len(shapes)))
    layout = GroupLayout.build([ParamSpec(f"p{index}", shapes[index], "fp32") for index in order], size)
    pieces: list[list[Piece]] = [[] for _ in range(size)]
    for rank, piece in layout.pieces():
        pieces[rank].append(piece)
    assert max(map(len, pieces)) <= 1.5 * min(map(len, pieces))
    for own in pieces:
        kinds = [int(len(layout.params[index].shape) < 2) for index in range(len(layout.params))]
        assert len(flat_ranges(own, kinds)) <= 4


def test_a_layout_without_parameters_is_empty():
    layout = GroupLayout.build([], 3)
    assert (layout.numel, layout.padding_numel, layout.owned(2)) == (0, 0, ())


def test_a_layout_without_ranks_is_refused():
    with pytest.raises(MeshError, match=r"at least one rank, got size=0"):
        GroupLayout.build([ParamSpec("w", (3,))], 0)


def test_fingerprints_tell_layouts_apart():
    base = ParamSpec("w", (3, 4))
    layouts = [
        GroupLayout.build([spec], size)
        for spec, size in [
            (base, 2),
            (base, 3),
            (dataclasses.replace(base, name="v"), 2),
            (dataclasses.replace(base, shape=(4, 3)), 2),
            (dataclasses.replace(base, dtype="bf16"), 2),
            (dataclasses.replace(base, stride=(1, 3)), 2),
        ]
    ]
    assert len({layout.fingerprint() for layout in layouts}) == len(layouts)
    assert layouts[0].fingerprint() == GroupLayout.build([base], 2).fingerprint()


@given(st.integers(0, 10**9), st.integers(1, 10**6))
def test_rounding_up_gives_the_smallest_multiple(value, multiple):
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - value < multiple
